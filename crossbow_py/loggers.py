"""Listeners that record a run in a tracking service."""

from __future__ import annotations

from crossbow_py.telemetry.loggers.mlflow_logger import MLflowLogger
from crossbow_py.telemetry.loggers.wandb_logger import WandbLogger

__all__ = ["MLflowLogger", "WandbLogger"]
