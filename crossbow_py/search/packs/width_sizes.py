"""Which sizes of packs are measured, by which executors, and in what order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossbow_py.engine.executors import EXECUTORS, SerialExecutor
from crossbow_py.search.packs.width import NEARLY

# In the order they are measured: there may be time for the first alone, and an executor that is far behind the others
# with it is not measured with more. Twice the largest, and so on, come before the small ones, while they still gain.
_LARGE_SIZES, _SMALL_SIZES = (16, 8, 32), (4, 2)
LARGEST_ALWAYS = max(_LARGE_SIZES)  # larger ones are measured while they gain


def asked(names: Sequence[str], bound: int) -> list[tuple[str, int]]:
    """What is to be measured, what tells most first: one trial at a time, and packs where they run side by side.

    Trials that run apart on a CPU gain nothing from there being more of them than cores.
    """
    packed = [name for name in names if name != SerialExecutor.NAME or len(names) == 1]
    sizes = {name: _apart_sizes(bound) if _is_apart(name) else _sizes(bound) for name in packed}
    packs = [
        (name, own[place]) for place in range(max(map(len, sizes.values()))) for name, own in sizes.items()
        if place < len(own)
    ]  # fmt: skip
    first = [(names[0], 1), *packs[: len(packed)]]
    order = [*first, *((name, 1) for name in names[1:]), *packs[len(packed) :]]
    return list(dict.fromkeys(order))


def _is_apart(name: str) -> bool:
    """Whether an executor runs trials by themselves, each on a core."""
    return not EXECUTORS[name].FUSES and EXECUTORS[name].DEVICE != "cuda"


def _apart_sizes(bound: int) -> list[int]:
    return sorted({min(size, bound) for size in (torch.get_num_threads(), 4, 8)})


def _sizes(bound: int) -> list[int]:
    """Packs of up to `bound` trials: some sizes, and doubled ones up to nearly all that there can be."""
    doubled, size = [], LARGEST_ALWAYS
    while NEARLY * size < bound:
        size *= 2
        doubled.append(size)
    return list(dict.fromkeys(min(size, bound) for size in (*_LARGE_SIZES, *doubled, *_SMALL_SIZES)))


def steady(bound: int) -> int:
    """`bound` rounded down to 1, 2, 3, 4, 6, 8, 12 and so on: free memory is never quite the same."""
    power = 1 << (bound.bit_length() - 1)
    return power + power // 2 if 2 * bound >= 3 * power else power
