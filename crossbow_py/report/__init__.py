"""`python -m crossbow_py.report`: what runs did, as one page that reads without a network."""
