"""Nodes of a graph that run as one step: which they are, and how a step runs for all learners."""
