"""The rules that batch each operator of the graph over all learners."""
