"""Nodes of a graph that run as one step: finding them, and running the step for all learners."""
