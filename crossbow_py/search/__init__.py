"""`python -m crossbow_py.search`: many configurations trained side by side, and the best of them to the end."""
