"""Checkpoints: their format, the background writer, which are kept, and resuming from one."""
