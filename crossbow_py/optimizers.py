"""Each learner's own optimizer, and its groups of parameters."""

from __future__ import annotations

from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon, TorchOptimizer

__all__ = ["SGD", "AdamW", "Muon", "ParameterGroup", "TorchOptimizer"]
