"""Pictures: how they are written to files, and those that are drawn without matplotlib."""
