"""A run's folder: choosing it, the configuration recorded in it, and the reporter of what happens."""
