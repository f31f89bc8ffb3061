"""The policies that choose which waiting trials are admitted next. Pure, and deterministic for a given seed.

`batch_size`, `random` and `knn` are the policies of Pack (Liu, Krishnan, Elmore and Franklin, "Understanding and
Optimizing Packed Neural Network Training for Hyper-Parameter Tuning", 2021, arXiv 2002.02885). Here, trials of any
batch size and architecture may run beside each other, each with batches of its own size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["signature", "batch_size", "random", "knn", "none"]

_ROUNDING = 1e-9  # ten shares of a tenth fill the device


@dataclass(frozen=True)
class Waiting:
    """A trial that waits or runs.

    Attributes:
        trial: its number.
        signature: trials of one signature can share a bank.
        batch_size: samples a batch.
        features: its configuration as numbers from 0 to 1, alike for all trials.
        share: how much of the device it takes, 1 / the width of a full pack of its signature.
    """

    trial: int
    signature: str
    batch_size: int
    features: tuple[float, ...]
    share: float


def admit(policy: Policy, waiting: Sequence[Waiting], running: Sequence[Waiting], *, seed: int) -> list[Waiting]:
    """Return the trials to start now, in this order.

    `signature` takes those that can join a bank that runs, or the bank of the first one waiting; then, while there is
    room, those of the next signature. `batch_size` takes those of the batch size that runs, or of the first one
    waiting, and no others. `random` takes any. `knn` takes those nearest to the mean of the running ones, or to the
    first one waiting. `none` runs one trial at a time.

    Args:
        policy: one of these.
        waiting: in the order to prefer where the policy does not care.
        running: those that hold a part of the device.
        seed: of `random`.

    Returns:
        As many as fit beside the running ones with all shares at most 1, and at least one when nothing runs.
    """
    used = math.fsum(each.share for each in running)
    admitted: list[Waiting] = []
    for each in _in_order(policy, waiting, running, seed):
        is_alone = not running and not admitted
        if is_alone or math.fsum((used, each.share)) <= 1 + _ROUNDING:
            admitted.append(each)
            used += each.share
    return admitted


def few_kinds(admitted: Sequence[Waiting], running: Sequence[Waiting], most: int) -> list[Waiting]:
    """Return those admitted of the first `most` signatures, at least 1, counting those that run."""
    kinds = list(dict.fromkeys(each.signature for each in (*running, *admitted)))[: max(1, most)]
    return [each for each in admitted if each.signature in kinds]


def fair_share(num_segments: int, num_searchers: int) -> int:
    """Return the most segments that one search process should hold, so that each process has some."""
    return -(-num_segments // max(1, num_searchers))


def _in_order(policy: Policy, waiting: Sequence[Waiting], running: Sequence[Waiting], seed: int) -> Sequence[Waiting]:
    """Return the trials that the policy would admit if all had room, in its order."""
    match policy:
        case "none":
            return [] if running else waiting[:1]
        case "signature":
            names = dict.fromkeys(each.signature for each in (*running, *waiting))  # those that run come first
            ranks = {name: rank for rank, name in enumerate(names)}
            return sorted(waiting, key=lambda each: ranks[each.signature])
        case "batch_size":
            sizes = {each.batch_size for each in running or waiting[:1]}
            return [each for each in waiting if each.batch_size in sizes]
        case "random":
            # Each trial draws for itself: who else waits, and in which order they came, changes nothing.
            return sorted(waiting, key=lambda each: random.Random(f"{seed}/{each.trial}").random())
        case "knn":
            around = running or waiting[:1]
            mean = [math.fsum(column) / len(around) for column in zip(*(each.features for each in around), strict=True)]
            return sorted(waiting, key=lambda each: math.dist(each.features, mean))
