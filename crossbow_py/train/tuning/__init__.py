"""Choices that a run makes by measuring: executor, number of learners, number of data workers."""
