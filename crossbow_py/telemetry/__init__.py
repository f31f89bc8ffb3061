"""Telemetry of a run: throughput, console, TensorBoard and records."""
