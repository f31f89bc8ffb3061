"""Loggers beside TensorBoard: runs and searches in a tracking service, MLflow or Weights & Biases."""
