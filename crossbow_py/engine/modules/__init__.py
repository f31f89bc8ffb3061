"""A learner's module: its random numbers, number format and compiled form, and what its forward pass may do."""
