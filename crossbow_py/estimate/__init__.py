"""`python -m crossbow_py.estimate`: how large batches may be, how many learners fit, and how many workers feed them."""
