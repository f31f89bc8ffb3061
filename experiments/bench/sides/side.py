"""The sides of comparisons: what one is, and the names of those that there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.gate import Ready

SINGLE_SIDES = ("default_loop", "tuned_single")
EXECUTOR_SIDES = tuple(EXECUTORS)
AUTO = "auto"
OPEN = 0
AVERAGING_WORDS = {
    "sma": "with SMA", "none": "without averaging", "synchronous_sgd": "with averaged gradients",
}  # fmt: skip

Executor = Literal["auto", "serial", "threads", "fused", "streams"]


@dataclass(frozen=True)
class Side:
    """One row of a comparison.

    Attributes:
        side: its name.
        num_learners: K; OPEN where every window says how many it wants, and for `auto` until it has settled.
        averaging: sma, synchronous_sgd, or none: learners that never meet, or a side of one plain model.
        precision: fp32 or bf16.
    """

    side: str
    num_learners: int
    averaging: str
    precision: PrecisionName

    @property
    def executor(self) -> Executor:
        """The executor of a side of ours, which `Trainer` calls the same."""
        return cast(Executor, self.side)

    @property
    def label(self) -> str:
        if self.side in SINGLE_SIDES:
            return f"{self.side} {self.precision}"
        learners = "" if self.num_learners == OPEN else f" K={self.num_learners}"
        return f"{self.side}{learners} {AVERAGING_WORDS[self.averaging]} {self.precision}"

    def chosen(self, ready: Ready) -> Side:
        """The side with the number of learners it chose, if it chose one."""
        return self if ready.choice is None else replace(self, num_learners=ready.choice.num_learners)
