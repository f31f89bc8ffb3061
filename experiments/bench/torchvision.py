"""torchvision beside a CPU build of torch, for packages that import it: timm and transformers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any

import torch


@cache
def import_torchvision() -> Any:
    """Import it where it is installed: timm needs it, transformers does without.

    PyPI's is a CUDA build: beside a CPU build of torch it lacks its compiled operators. No model here calls them, but
    torchvision wants to find these two when it is imported.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    _OPERATORS.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _OPERATORS[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


_OPERATORS: list[Any] = []  # which go with the library that declared them
