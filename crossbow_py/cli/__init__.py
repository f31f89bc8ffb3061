"""The command line: composing a configuration, --help, completion, errors and exit codes."""
