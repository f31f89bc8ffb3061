"""Running out of memory: how it is recognised on every device, and what is given back."""

from __future__ import annotations

import gc

import torch

_HOST_WORDS = ("can't allocate memory", "not enough memory")  # torch's CPU allocator raises a plain RuntimeError


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_WORDS)


def free_memory(device: torch.device) -> None:
    """Give back what torch keeps for later; call it when what failed is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
