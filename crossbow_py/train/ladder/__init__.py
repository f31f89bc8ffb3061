"""The ladder of trust: what executors may use on a device is tried on it, part by part, in child processes."""
