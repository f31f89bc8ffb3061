"""What a run tells the outside: throughput, console, TensorBoard and records."""
