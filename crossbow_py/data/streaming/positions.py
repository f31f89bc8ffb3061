"""Which positions of the sample stream a rank takes its batches at. Pure functions of values.

A round takes K·R adjoining batches from the cursor on: rank r of R, with K learners of its own, those at
cursor + (r·K + j)·B for j < K. So a rank's next ones lie K·R·B behind these, whichever rank it is and wherever the
cursor stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Positions(Protocol):
    """Positions in the order in which they are taken, each larger than the one before; a `range` is such."""

    def __getitem__(self, index: int, /) -> int:
        """The position of batch number `index`, from 0 on."""


@dataclass(frozen=True)
class RankPositions:
    """The positions of a rank's batches from a round on: this round's, the next round's, and so on without end.

    Attributes:
        own: this round's, different ones in order; those of learners adjoin.
        batch_size: samples from one batch to the next.
        num_ranks: R, ranks that take as many batches a round each.
    """

    own: tuple[int, ...]
    batch_size: int
    num_ranks: int

    def __getitem__(self, index: int, /) -> int:
        """See `Positions`: batch j of the n-th round from here, counted from 0, for index = n·K + j."""
        num_own = len(self.own)
        rounds, j = divmod(index, num_own)
        if rounds == 0:
            return self.own[j]
        return self.own[-1] + ((rounds * self.num_ranks - 1) * num_own + 1 + j) * self.batch_size


def joins(path: Positions, at: int, other: Positions, index: int, soon: int) -> bool:
    """Whether `path`, from its number `at` on, comes to `other[index]` and follows `other` from there.

    At most `soon` positions may come before it, and as many behind it are compared: from K on, these tell a path of
    another K, or one that stands at another learner, from one that agrees for ever.
    """
    for number in range(at, at + soon + 1):
        if path[number] == other[index]:
            return all(path[number + more] == other[index + more] for more in range(1, soon + 1))
    return False
