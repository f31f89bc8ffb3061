"""The tasks of a round and what each waits for. A task is a value, without tensors.

    learning(j, n)     gradient of learner j at its weights        after correction(j, n−1)
    correction(j, n)   gradient step and pull towards z            after learning(j, n) and, if it pulls, averaging(n−1)
    averaging(n)       z moves by the sum of all corrections       after every correction(·, n)

and, with rules that average gradients, between learning and correction:

    gradient mean(n)   learners take the mean of their gradients   after every learning(·, n), before corrections

In rounds that compare gradients, also

    comparison(n)      norms of the gradients and of their mean    after every learning(·, n), before what changes them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class _TaskOfLearner:
    NAME: ClassVar[str]

    learner: int
    round_index: int

    def __str__(self) -> str:
        return f"{self.NAME}({self.learner})"


class LearningTask(_TaskOfLearner):
    """The forward and backward pass of one learner on one batch."""

    NAME = "learning"


class CorrectionTask(_TaskOfLearner):
    """The learner's gradient step and, in rounds that average, its correction."""

    NAME = "correction"


@dataclass(frozen=True)
class _TaskOfAll:
    NAME: ClassVar[str]

    round_index: int

    def __str__(self) -> str:
        return self.NAME


class AveragingTask(_TaskOfAll):
    """The step of the central average model."""

    NAME = "averaging"


class GradientMeanTask(_TaskOfAll):
    """The averaging of gradients in all groups of learners."""

    NAME = "gradient mean"


class ComparisonTask(_TaskOfAll):
    """The comparison of all learners' gradients, for the gradient noise scale."""

    NAME = "comparison"


Task = LearningTask | CorrectionTask | AveragingTask | GradientMeanTask | ComparisonTask
