"""What the central average model takes from its learners besides z: means of buffers; and measures of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Add = Callable[[Tensor], None]  # sums a vector over devices in place
_CHECKED_AT_ONCE = 2**20  # values: what they take as integers is no memory to speak of


def mean_buffers(stacked: Mapping[str, Tensor], add: Add | None) -> dict[str, Tensor]:
    """Means over rows `[K, *shape]`; of BatchNorm's variances with the between-learner term.

    With `add` over all devices' rows.
    """
    means_of = {name: name.removesuffix("running_var") + "running_mean" for name in stacked}
    paired = {name: mean for name, mean in means_of.items() if name.endswith("running_var") and mean in stacked}
    if add is not None:
        return _over_devices(stacked, paired, add)
    # In float64 equal values have themselves as the mean, be they the largest that there are.
    means = {name: rows.mean(0, dtype=torch.float64).to(rows) for name, rows in stacked.items()}
    for name, mean in paired.items():
        means[name] = means[name] + stacked[mean].var(0, correction=0)
    return means


def _over_devices(stacked: Mapping[str, Tensor], paired: Mapping[str, str], add: Add) -> dict[str, Tensor]:
    """Means over all devices' rows; of `paired` variances with the spread of their means. Summed in float64."""
    first = next(iter(stacked.values()), None)
    if first is None:
        return {}
    sums = {name: rows.double().sum(0) for name, rows in stacked.items()}
    squares = {name: stacked[mean].double().square().sum(0) for name, mean in paired.items()}
    count = torch.full((1,), float(len(first)), dtype=torch.float64, device=first.device)
    parts = [count, *sums.values(), *squares.values()]
    flat = torch.cat([part.flatten() for part in parts]).cpu()  # host–device synchronisation on CUDA
    add(flat)
    total, *added = torch.split(flat, [part.numel() for part in parts])
    means = dict(zip(sums, (values / total for values in added), strict=False))
    of_squares = dict(zip(squares, (values / total for values in added[len(sums) :]), strict=True))
    for name, mean in paired.items():
        means[name] = means[name] + (of_squares[name] - means[mean].square()).clamp(min=0)
    return {name: means[name].view(rows.shape[1:]).to(rows) for name, rows in stacked.items()}


def level(stacked: Tensor, add: Add | None, num_devices: int) -> None:
    """Every row `[K, ...]` becomes their mean, in place; with `add` the mean of all devices' rows."""
    mean = stacked.mean(0, keepdim=True)
    if add is not None:
        on_host = mean.to("cpu", copy=True) / num_devices
        add(on_host)
        mean = on_host.to(mean)
    stacked.copy_(mean.expand_as(stacked))


def norm(vectors: Sequence[Tensor]) -> float:
    """Of all values together, summed in float64 over vectors."""
    norms = torch._foreach_norm(list(vectors))
    return float(torch.stack(norms).double().square().sum().sqrt())


def checksum(values: Tensor) -> int:
    """52 bits that are others, in all likelihood, when a bit of `values` [n] is. Synchronises with the host on CUDA."""
    words, total = values.view(torch.int32), 0  # of float64 two each: 64 bits times a place would lose the upper ones
    for first in range(0, len(words), _CHECKED_AT_ONCE):
        bits = words[first : first + _CHECKED_AT_ONCE].to(torch.int64)
        places = torch.arange(first, first + len(bits), device=bits.device) * 2 + 1
        total += int((bits * places).sum())  # wraps, alike everywhere
    return total % 2**52
