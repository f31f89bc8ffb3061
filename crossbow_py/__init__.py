"""Crossbow for PyTorch: many small-batch learners per device, kept together by synchronous model averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossbow_py.averaging import (
    PAPA,
    SMA,
    AveragingRule,
    Crossbow,
    DiLoCo,
    Elastic,
    GroupedSMA,
    Independent,
    LocalSGD,
    SlowMo,
    SynchronousSGD,
)
from crossbow_py.core.errors import (
    BadDataError,
    BadSampleError,
    CentralModelError,
    CheckpointError,
    CrossbowError,
    DataError,
    DeviceLostError,
    LearnerError,
    NonFiniteError,
    RankError,
    RankLostError,
    UnknownIdError,
    UserError,
)
from crossbow_py.core.version import __version__
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Collated
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.auto_tuner import AutoTunerSettings
from crossbow_py.engine.modules.frozen import frozen
from crossbow_py.engine.modules.losses import model_loss
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon, TorchOptimizer
from crossbow_py.predict.ensemble import Ensemble
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowLogger
from crossbow_py.telemetry.loggers.wandb_logger import WandbLogger
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.run_folder.reporter import Result
from crossbow_py.train.run_settings import RunSettings
from crossbow_py.train.schedules import WSD, Constant, Cosine, Exponential, Inverse, MultiStep, Step
from crossbow_py.train.trainer import Trainer

if TYPE_CHECKING:
    from crossbow_py.predict.trained_models import load_models
else:

    def __getattr__(name: str) -> object:
        """`load_models`, imported when it is asked for: it brings the command line's configuration, and Hydra."""
        if name != "load_models":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from crossbow_py.predict.trained_models import load_models  # noqa: PLC0415

        return load_models


__all__ = [
    "PAPA",
    "SGD",
    "SMA",
    "WSD",
    "AdamW",
    "Augmentation",
    "AutoTunerSettings",
    "AveragingRule",
    "BadDataError",
    "BadSampleError",
    "CentralModelError",
    "CheckpointError",
    "CheckpointSettings",
    "Collated",
    "ConsoleListener",
    "Constant",
    "Cosine",
    "Crossbow",
    "CrossbowError",
    "DataError",
    "DeviceLostError",
    "DiLoCo",
    "DistributedSettings",
    "Elastic",
    "Ensemble",
    "Exponential",
    "GroupedSMA",
    "Independent",
    "Inverse",
    "LearnerError",
    "Listener",
    "LocalSGD",
    "MLflowLogger",
    "MultiStep",
    "Muon",
    "NonFiniteError",
    "ParameterGroup",
    "RankError",
    "RankLostError",
    "Result",
    "RunSettings",
    "SlowMo",
    "Step",
    "SynchronousSGD",
    "TorchOptimizer",
    "Trainer",
    "UnknownIdError",
    "UserError",
    "WandbLogger",
    "__version__",
    "frozen",
    "joined",
    "load_models",
    "model_loss",
]
