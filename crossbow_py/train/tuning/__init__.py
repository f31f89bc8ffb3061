"""What a run measures to choose for itself: executor, number of learners, number of data workers."""
