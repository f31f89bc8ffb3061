"""The exponential moving average (EMA) of the central average model z, in memory; its equations: averaging/ema.py.

Measured on two CPU cores that other programs used as well, a step takes 0.3 ms for the MLP of the digits and 0.6 ms
for LeNet (medians). LeNet on MNIST with a horizon of one epoch (K = 2, `threads`), where a step comes every 94
rounds, is as fast as without within the noise. The digits are the worst case, rounds of 2 ms and with a horizon of
one epoch a step after every second or third: 7 % fewer images/s with K = 2 under `threads`, 4 % with K = 1 (the
fastest of 5 to 7 runs with it and 10 to 14 without, taken in turns; in medians of pairs, between −10 % and +3 %).
Longer horizons cost as much less as they are longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crossbow_py.averaging import ema
from crossbow_py.engine.bank.layout import Rows, clone_all
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.intra_op import intra_op_threads


class AverageEMA:
    """EMA of the weights and floating-point buffers of z: P values and the buffers, in master precision, on its device.

    Buffers, BatchNorm's running variances among them, are averaged as weights are. Used when nothing is in flight; what
    it enqueues is on the current stream, and the host does not block.

    Args:
        bank: whose z it follows.
        horizon: h, in samples.

    Attributes:
        samples: seen when it last moved. Before that it is zero, and counts for nothing.
    """

    def __init__(self, bank: ReplicaBank, horizon: float) -> None:
        self.horizon, self.samples = horizon, 0
        self._weights = bank.new_flat()
        self._buffers = Rows(bank.buffer_layout, 1, bank.precision.master, bank.device)
        self._values = {**self._weights.shaped(), **self._buffers.shaped()}

    def is_due(self, before: int, after: int, samples_per_epoch: int) -> bool:
        """Whether it moves after a round from `before` to `after` samples seen."""
        return ema.is_due(before, after, self.horizon, samples_per_epoch)

    @torch.no_grad()
    def move(self, state: Mapping[str, Tensor], samples: int) -> None:
        """Move towards the state dict of z after so many samples."""
        # Two threads save 0.1 of 0.4 ms (400,000 values), and cost 6 ms where another program has one of the cores.
        with intra_op_threads(1):
            torch._foreach_lerp_(list(self._values.values()), self._same_of(state), self._share(samples))
        self.samples = samples

    @torch.no_grad()
    def at(self, state: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The state dict of the EMA, if it moved now, and it does not. Integer buffers are those of `state`."""
        moved = torch._foreach_lerp(list(self._values.values()), self._same_of(state), self._share(samples))
        return {**state, **dict(zip(self._values, moved, strict=True))}

    def _same_of(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        return [state[name] for name in self._values]

    def _share(self, samples: int) -> float:
        return 1 - ema.decay(samples - self.samples, samples, self.horizon)

    def state_dict(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "samples": self.samples,
            "weights": clone_all(self._weights.shaped()),
            "buffers": clone_all(self._buffers.shaped()),
        }

    def load_state_dict(self, saved: Mapping[str, Any], samples_seen: int) -> None:
        """Restore `state_dict()` of a run that has seen so many samples.

        Raises KeyError or ValueError for what no run of this model has written.
        """
        samples = saved["samples"]
        if type(samples) is not int or not 0 <= samples <= samples_seen:
            raise ValueError(f"an EMA that moved after {samples!r} of {samples_seen} samples")
        self._weights.load(0, saved["weights"])
        self._buffers.load(0, saved["buffers"])
        self.samples = samples
