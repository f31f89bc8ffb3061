"""What a device is asked for: streams, graphs, threads and memory, and the tasks that never make the host wait."""
