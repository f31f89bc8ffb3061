"""Measuring models that are not being trained."""
