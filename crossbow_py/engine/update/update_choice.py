"""Which update a run or a pack gets."""

from __future__ import annotations

from pathlib import Path

import torch

from crossbow_py.averaging.rule import AveragingRule
from crossbow_py.engine.update.native.agreement import check_once
from crossbow_py.engine.update.native.library import NativeError, load
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.row_update import NativeUpdate, TorchUpdate


def choose_update(
    optimizer: Optimizer, rule: AveragingRule, device: torch.device, dtype: torch.dtype, cache: Path | None = None
) -> tuple[TorchUpdate, str | None]:
    """Native code where there is some, that compiles and agrees with the reference; else torch operators.

    Returns the update and, where native code failed, a sentence for the user.
    """
    reference = TorchUpdate(optimizer, rule)
    if not NativeUpdate.supports(optimizer, rule, device, dtype):
        return reference, None
    try:
        library = load(cache)
        check_once(optimizer, rule, library)
    except NativeError as error:
        return reference, (
            f"Updates run as torch operators, which is slower for models with many parameters, because {error}; "
            f"{error.remedy}."
        )
    return NativeUpdate(optimizer, rule, library), None
