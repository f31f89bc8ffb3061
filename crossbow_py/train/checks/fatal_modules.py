"""Modules whose backward pass ends the process: errors of torch's kernels for channels-last tensors on CPUs.

- GroupNorm, if its weight is trained on inputs that ask for no gradient: it reads that gradient
  (`torch.autograd.grad(GroupNorm(x).sum(), weight)`).
- A float32 convolution by 1 x 1 with a stride over fewer than 8 channels, as in the first layer of RepVGG: the gradient
  of its weight is written beyond its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError

_FEW_CHANNELS = 8  # more are done by other kernels


@contextmanager
def refusing_fatal_modules(model: nn.Module) -> Iterator[None]:
    """Run a block that calls the model, before any backward pass.

    Raises UserError at its end if a backward pass would end the process.
    """
    found = list[str]()
    kinds = (nn.GroupNorm, nn.Conv2d)
    watched = [(name, own) for name, own in model.named_modules() if isinstance(own, kinds)]
    hooks = [own.register_forward_pre_hook(partial(_look, found, name), with_kwargs=True) for name, own in watched]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        raise UserError(
            f"the model's {found[0]}, for which torch {torch.__version__} ends the process in channels-last format; "
            "set channels_last=false, or freeze it."
        )


def _look(
    found: list[str], name: str, own: nn.GroupNorm | nn.Conv2d, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given, weight = next(iter((*args, *kwargs.values())), None), own.weight
    if not isinstance(given, Tensor) or given.device.type != "cpu" or weight is None or not weight.requires_grad:
        return
    if isinstance(own, nn.GroupNorm):
        if not given.requires_grad and not given.is_contiguous():
            found.append(f"{name} is a GroupNorm to train on what is frozen")
    elif _strides_over_few_channels(own) and _is_channels_last(given, weight):
        found.append(f"{name} is a convolution by 1 x 1 with a stride over {own.in_channels} channels")


def _strides_over_few_channels(own: nn.Conv2d) -> bool:
    return own.kernel_size == (1, 1) and own.groups == 1 and max(own.stride) > 1 and own.in_channels < _FEW_CHANNELS


def _is_channels_last(images: Tensor, weight: Tensor) -> bool:
    """Return whether a float32 convolution runs in that format, as it does if either is in it."""
    if images.dtype != torch.float32 or images.ndim != 4:
        return False
    return images.stride(1) == 1 or weight.stride(2) == weight.shape[1] > 1
