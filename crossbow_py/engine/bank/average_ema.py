"""The exponential moving average (EMA) of the central average model z, in memory; equations in averaging/ema.py.

A step takes 0.3 ms for the digits' MLP and 0.6 ms for LeNet (medians on two shared CPU cores). The digits, with rounds
of 2 ms and a step after every second or third of them, are the worst case: 7 % fewer images/s with K = 2 under
`threads`, 4 % with K = 1. The cost is inversely proportional to the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crossbow_py.averaging import ema
from crossbow_py.engine.bank.layout import Rows, clone_all
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.host import intra_op_threads


class AverageEMA:
    """The EMA of the weights and floating-point buffers of z, in master precision and on the bank's device.

    Buffers, including BatchNorm's running variances, are averaged as weights are. Use it when nothing is in flight: it
    enqueues work on the current stream, and the host does not block.

    Args:
        bank: the bank whose z it follows.
        horizon: h, in samples.

    Attributes:
        samples: the number of samples seen when it last moved; before that the EMA is zero and has no weight.
    """

    def __init__(self, bank: ReplicaBank, horizon: float) -> None:
        self.horizon, self.samples = horizon, 0
        self._weights = bank.new_flat()
        self._buffers = Rows(bank.buffer_layout, 1, bank.precision.master, bank.device)
        self._values = {**self._weights.shaped(), **self._buffers.shaped()}

    def is_due(self, before: int, after: int, samples_per_epoch: int) -> bool:
        """Return whether it moves after a round from `before` to `after` samples seen."""
        return ema.is_due(before, after, self.horizon, samples_per_epoch)

    @torch.no_grad()
    def move(self, state: Mapping[str, Tensor], samples: int) -> None:
        """Move towards z, given as a state dict, when `samples` have been seen."""
        # Two threads save 0.1 of 0.4 ms (400,000 values), and cost 6 ms where another program has one of the cores.
        with intra_op_threads(1):
            torch._foreach_lerp_(list(self._values.values()), self._ordered(state), self._weight(samples))
        self.samples = samples

    @torch.no_grad()
    def at(self, state: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Return the state dict that the EMA would have after a move, without moving it.

        Integer buffers are those of `state`.
        """
        moved = torch._foreach_lerp(list(self._values.values()), self._ordered(state), self._weight(samples))
        return {**state, **dict(zip(self._values, moved, strict=True))}

    def _ordered(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        return [state[name] for name in self._values]

    def _weight(self, samples: int) -> float:
        return 1 - ema.decay(samples - self.samples, samples, self.horizon)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, on the host."""
        return {
            "samples": self.samples,
            "weights": clone_all(self._weights.shaped()),
            "buffers": clone_all(self._buffers.shaped()),
        }

    def load_state_dict(self, saved: Mapping[str, Any], samples_seen: int) -> None:
        """Restore the `state_dict()` of a run that has seen `samples_seen` samples.

        Raises KeyError or ValueError if no run of this model can have written it.
        """
        samples = saved["samples"]
        if type(samples) is not int or not 0 <= samples <= samples_seen:
            raise ValueError(f"an EMA that moved after {samples!r} of {samples_seen} samples")
        self._weights.load(0, saved["weights"])
        self._buffers.load(0, saved["buffers"])
        self.samples = samples
