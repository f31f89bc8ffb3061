"""`python -m crossbow_py.train`: one model, trained by several learners; the trainer, its loop and their components."""
