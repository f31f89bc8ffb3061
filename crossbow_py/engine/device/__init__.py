"""The interface to devices: streams, graphs, threads and memory, and tasks that never block the host."""
