"""The memory model, and what follows from it: batch sizes, numbers of learners, and the workers that feed them."""
