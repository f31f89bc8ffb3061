"""The engine: the bank of replicas, tasks, scheduler, executors and optimizers."""
