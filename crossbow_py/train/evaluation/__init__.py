"""Evaluation: accuracy and loss of copies of the models, and statistics of learning."""
