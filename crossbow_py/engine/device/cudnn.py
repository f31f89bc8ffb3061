"""cuDNN's settings: what users have set, and what is set for a while.

torch has two names for TF32 in convolutions, `cudnn.allow_tf32` and the newer `cudnn.conv.fp32_precision`. Reading the
old one, as `torch.backends.cudnn.flags` does too, raises RuntimeError once a user has set the new one; the new one has
what either was set to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch


def uses_tf32() -> bool:
    """Return whether torch's convolutions may multiply float32 as TF32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def must_repeat() -> bool:
    """Return whether a user wants the same bits from every call: no algorithm that adds in an order of its own."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


@contextmanager
def cudnn_set(name: Literal["benchmark", "enabled"], value: bool) -> Iterator[None]:
    """Have the block run with a setting of the process."""
    before = getattr(torch.backends.cudnn, name)
    setattr(torch.backends.cudnn, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cudnn, name, before)


def searching_libraries() -> AbstractContextManager[None]:
    """Return a context in which cuDNN tries its algorithms for each new shape, and keeps the fastest.

    Some of them add with atomics, in any order. Where results must repeat, nothing is tried.
    """
    return cudnn_set("benchmark", not must_repeat())
