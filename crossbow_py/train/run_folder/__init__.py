"""A run's folder: which one it is, the configuration recorded in it, and what is reported into it."""
