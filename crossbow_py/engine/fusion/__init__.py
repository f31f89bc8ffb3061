"""Cross-model fusion: one graph for K learners, and the rules that make an operator of one an operator of all."""
