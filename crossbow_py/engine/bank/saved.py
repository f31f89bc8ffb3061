"""Rows of a bank as values by name: those of saved banks, and means over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Add = Callable[[Tensor], None]  # sums a vector over devices in place


def mean_weights(saved: Sequence[Mapping[str, Any]], nonfinite: Sequence[Collection[int]]) -> dict[str, Tensor]:
    """Return the mean weights of the learners in several banks' `state_dict()`, without each bank's non-finite ones."""
    rows = [[row for row in range(num_saved(one)) if row not in bad] for one, bad in zip(saved, nonfinite, strict=True)]
    return {
        name: torch.cat([one["weights"][name][own] for one, own in zip(saved, rows, strict=True)]).mean(0)
        for name in saved[0]["weights"]
    }


def num_saved(saved: Mapping[str, Any]) -> int:
    """Return the number of learners in a bank's `state_dict()`. Raises ValueError when it is not one."""
    number, counts = saved["num_learners"], saved["step_counts"]
    if not number or len(counts) != number or any(type(count) is not int for count in counts):
        raise ValueError(f"{number!r} learners with the step counts {counts!r}")
    return len(counts)


def saved_base(saved: Mapping[str, Any], row: int) -> dict[str, Tensor]:
    """Return a learner's frozen parameters of a `state_dict()`; older ones have them among the weights."""
    found = saved["frozen"] if "frozen" in saved else saved["weights"]
    return {name: values[min(row, len(values) - 1)] for name, values in found.items()}


def mean_buffers(stacked: Mapping[str, Tensor], add: Add | None) -> dict[str, Tensor]:
    """Return means over rows `[K, *shape]`; see `ReplicaBank.central_buffers`."""
    means_of = {name: name.removesuffix("running_var") + "running_mean" for name in stacked}
    paired = {name: mean for name, mean in means_of.items() if name.endswith("running_var") and mean in stacked}
    if add is not None:
        return _over_devices(stacked, paired, add)
    # In float64 the mean of equal values is that value, even of the largest there are.
    means = {name: rows.mean(0, dtype=torch.float64).to(rows) for name, rows in stacked.items()}
    for name, mean in paired.items():
        means[name] = means[name] + stacked[mean].var(0, correction=0)
    return means


def _over_devices(stacked: Mapping[str, Tensor], paired: Mapping[str, str], add: Add) -> dict[str, Tensor]:
    """Return means over all devices' rows, summed in float64. `paired` maps variances to their means."""
    first = next(iter(stacked.values()), None)
    if first is None:
        return {}
    sums = {name: rows.double().sum(0) for name, rows in stacked.items()}
    squares = {name: stacked[mean].double().square().sum(0) for name, mean in paired.items()}
    count = torch.full((1,), float(len(first)), dtype=torch.float64, device=first.device)
    terms = [count, *sums.values(), *squares.values()]
    flat = torch.cat([term.flatten() for term in terms]).cpu()  # host–device synchronisation on CUDA
    add(flat)
    total, *added = torch.split(flat, [term.numel() for term in terms])
    means = dict(zip(sums, (values / total for values in added), strict=False))
    of_squares = dict(zip(squares, (values / total for values in added[len(sums) :]), strict=True))
    for name, mean in paired.items():
        means[name] = means[name] + (of_squares[name] - means[mean].square()).clamp(min=0)
    return {name: means[name].view(rows.shape[1:]).to(rows) for name, rows in stacked.items()}
