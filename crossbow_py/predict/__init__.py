"""`python -m crossbow_py.predict`: trained models, and ensembles of them, on test data."""
