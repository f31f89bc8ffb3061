"""Dropout that draws from its learner's own stream of numbers.

Masks follow from (seed, round, learner) alone, so threads, resumes and executors see the same masks, and no
generator state has to be saved.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

# Shape of the mask for an input [B, C, ...]: whole channels for the N-d kinds, single values for nn.Dropout.
_KINDS: dict[type[nn.Module], bool] = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


class CounterDropout(nn.Module):
    """Replaces one nn.Dropout module; all of a model's share the learner's generator."""

    def __init__(self, p: float, whole_channels: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.p, self.whole_channels, self.generator = p, whole_channels, generator

    def forward(self, inputs: Tensor) -> Tensor:
        """Inverted dropout: kept values are scaled by 1/(1−p)."""
        if not self.training or self.p == 0:
            return inputs
        shape = inputs.shape[:2] + (1,) * (inputs.ndim - 2) if self.whole_channels else inputs.shape
        mask = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
        mask.bernoulli_(1 - self.p, generator=self.generator)
        return inputs * mask.div_(max(1 - self.p, torch.finfo(inputs.dtype).tiny))


def replace_dropout(module: nn.Module, generator: torch.Generator) -> bool:
    """Replace every nn.Dropout, Dropout1d, 2d and 3d below `module` in place. Returns whether there was any."""
    found = False
    for name, child in list(module.named_children()):
        if type(child) in _KINDS:
            setattr(module, name, CounterDropout(child.p, _KINDS[type(child)], generator))  # type: ignore[arg-type]
            found = True
        else:
            found = replace_dropout(child, generator) or found
    return found


def counter_seed(seed: int, purpose: str, round_index: int, learner: int) -> int:
    """A 63-bit seed that follows from its arguments alone, on every platform."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{round_index}/{learner}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
