"""What a search goes by, and how its epochs count in samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from crossbow_py.search.hyperband import Bracket
from crossbow_py.search.packs.policies import Policy
from crossbow_py.train.run_settings import StopConditions


@dataclass(frozen=True)
class SearchRules:
    """What a search goes by.

    Attributes:
        brackets: its trials, and how far each is trained.
        metric: of the validation data; `accuracy` is maximized, `loss` minimized.
        policy: who is packed with whom.
        lookahead: new trials that are sampled before there is room for them, for policies to choose from.
        checkpoint_every_s: how often segments that are long are kept on their way; None: only when a stop ends them.
    """

    brackets: tuple[Bracket, ...]
    metric: str
    policy: Policy
    seed: int
    lookahead: int
    checkpoint_every_s: float | None = None

    @property
    def maximize(self) -> bool:
        """Whether greater values are better."""
        return self.metric == "accuracy"


def epoch_samples(epochs: float, samples_per_epoch: int) -> int:
    """After how many samples a training run of so many epochs ends."""
    planned = StopConditions(max_epochs=epochs).planned_samples(samples_per_epoch)
    assert planned is not None, "a number of epochs is a number of samples"
    return planned


def segment_lengths(bracket: Bracket) -> list[float]:
    """Epochs between its rungs, the first from 0."""
    return [end - begin for begin, end in pairwise((0.0, *bracket.epochs))]


def planned_epochs(brackets: Iterable[Bracket]) -> float:
    """Epochs of training of a whole search when no trial fails."""
    return sum(
        size * length for each in brackets for size, length in zip(each.sizes, segment_lengths(each), strict=True)
    )


def total_samples(brackets: Iterable[Bracket], samples_per_epoch: int) -> int:
    """That a whole search trains on when no trial fails."""
    return round(planned_epochs(brackets) * samples_per_epoch)
