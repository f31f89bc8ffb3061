"""The plain values that a search reports, and the listener that receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crossbow_py.search.hyperband import Bracket, TrialState
from crossbow_py.search.space import Space

SEARCH_FILE = "search.json"  # in the search's folder: how it stands, and in the end how it ended


@dataclass(frozen=True)
class SearchInfo:
    """The facts of a search that are fixed when it starts.

    Attributes:
        metric: the name of the values; `maximize` says whether greater is better.
        num_train_samples: the samples of an epoch.
        brackets: which trials train how far.
        space: the search space.
        num_finished_segments: those finished by any worker before this one began.
    """

    experiment: str
    data: str
    num_trials: int
    num_brackets: int
    method: str
    sampler: str
    metric: str
    maximize: bool
    max_epochs: float
    device: str
    precision: str
    policy: str
    seed: int
    storage: str
    worker: str
    num_train_samples: int
    brackets: tuple[Bracket, ...]
    space: Space
    num_finished_segments: int = 0
    output_dir: str | None = None


@dataclass(frozen=True)
class TrialRecord:
    """A trial as it stands.

    Attributes:
        rung: the last rung where it was measured, with `value`.
        values: the values by the epochs they were measured at.
        params: the parameters; None while it has not been sampled.
        worker: the worker that measured it last.
        reason: why it failed.
    """

    trial: int
    bracket: int
    state: TrialState
    rung: int | None
    value: float | None
    values: Mapping[float, float]
    params: Mapping[str, Any] | None
    seconds: float
    worker: str | None
    reason: str | None


@dataclass(frozen=True)
class RunningTrial:
    """A trial on a row of this worker: `progress` is how much of its segment is over, 0 to 1."""

    trial: int
    rung: int
    progress: float
    pack: int


@dataclass(frozen=True)
class SearchProgress:
    """About once a second, and after every segment.

    `images_per_s`: of all packs of this worker together while they train, the mean since it began.
    """

    running: tuple[RunningTrial, ...]
    num_finished: int
    num_segments: int
    images_per_s: float
    elapsed_s: float
    best_trial: int | None
    best_value: float | None


@dataclass(frozen=True)
class BestTrial:
    """The trial that won: `value` on the validation data, `test_accuracy` measured once, at the end.

    `command` trains it again as far as it was trained, `epochs`; `model_path` is None where its files are not.
    """

    trial: int
    value: float
    epochs: float
    params: Mapping[str, Any]
    seed: int
    test_accuracy: float | None
    test_loss: float | None
    model_path: str | None
    command: str


@dataclass(frozen=True)
class SearchSummary:
    """The end of a search: `status` is finished, stopped (at its time or target), interrupted or terminated.

    Of this worker, in seconds of its `wall_time_s`: `loading_time_s` until device and data were there, `train_time_s`
    its packs trained, `evaluation_time_s` trials were measured, the best one on the test data too, `tuning_time_s` it
    was found out how to pack; `waiting_time_s` there was nothing to do, as others held what was left; `overhead_time_s`
    is the rest: sampling, storage, files of trials, changing seats. `notes`: what the user was told meanwhile.
    """

    info: SearchInfo
    status: str
    trials: tuple[TrialRecord, ...]
    best: BestTrial | None
    samples: int
    loading_time_s: float
    train_time_s: float
    evaluation_time_s: float
    tuning_time_s: float
    waiting_time_s: float
    overhead_time_s: float
    wall_time_s: float
    images_per_s: float
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class SearchListener:
    """Hooks a search calls; every one is a no-op to override. Called from the search's thread only."""

    def on_start(self, info: SearchInfo) -> None:
        """The search begins, or goes on."""

    def on_progress(self, progress: SearchProgress) -> None:
        """Take the progress, about once a second and after every segment."""

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        """All trials, after a segment of this worker."""

    def on_message(self, message: str) -> None:
        """A sentence for the user: how trials are packed, why one failed."""

    def on_leave(self, num_others: int) -> None:
        """This worker takes nothing more, also after an error; so many others still search."""

    def on_end(self, summary: SearchSummary) -> None:
        """The search ended in an orderly way, whatever the status."""

    def close(self) -> None:
        """Release files and the terminal. Called once, also after an error; must not raise."""
