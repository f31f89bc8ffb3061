"""Cross-model fusion: one graph for K learners, and the rules that batch each operator over them."""
