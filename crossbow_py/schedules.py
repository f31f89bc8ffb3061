"""The learning rate as a function of samples seen."""

from __future__ import annotations

from crossbow_py.train.schedules import WSD, Constant, Cosine, Exponential, Inverse, MultiStep, Step

__all__ = ["WSD", "Constant", "Cosine", "Exponential", "Inverse", "MultiStep", "Step"]
