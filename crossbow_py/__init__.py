"""Crossbow for PyTorch: many small-batch learners per device, kept together by synchronous model averaging.

More is in `crossbow_py.averaging`, `optimizers`, `schedules`, `loggers` and `errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from crossbow_py import averaging, errors, loggers, optimizers, schedules
from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.core.version import __version__
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Collated
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.auto_tuner import AutoTunerSettings
from crossbow_py.engine.modules.losses import model_loss
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon
from crossbow_py.many.members import Member, folds
from crossbow_py.many.train_many import train_many
from crossbow_py.models.frozen import frozen
from crossbow_py.models.lora import LoRA
from crossbow_py.predict.ensemble import Ensemble
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.events import Listener
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.run_folder.reporter import Result
from crossbow_py.train.trainer import Trainer

if TYPE_CHECKING:
    from crossbow_py.predict.trained_models import load_models
    from crossbow_py.search.from_python import Search
else:
    # They are imported when they are asked for: they bring the command line's configuration, and Hydra.
    _LATER = {"load_models": "crossbow_py.predict.trained_models", "Search": "crossbow_py.search.from_python"}

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "SGD",
    "SMA",
    "AdamW",
    "Augmentation",
    "AutoTunerSettings",
    "CheckpointSettings",
    "Collated",
    "ConsoleListener",
    "DistributedSettings",
    "Ensemble",
    "Independent",
    "Listener",
    "LoRA",
    "Member",
    "Muon",
    "Result",
    "Search",
    "Trainer",
    "UserError",
    "__version__",
    "averaging",
    "errors",
    "folds",
    "frozen",
    "joined",
    "load_models",
    "loggers",
    "model_loss",
    "optimizers",
    "schedules",
    "train_many",
]
