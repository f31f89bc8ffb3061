"""Checkpoints: their format, the background writer, the manager, and resuming from one."""
