"""What everything may import: settings, errors, files, locks, signals, and what the machine offers."""
