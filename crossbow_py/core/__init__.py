"""The modules that everything may import: settings, errors, files, locks, signals, and the machine."""
