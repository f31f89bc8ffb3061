"""How a `Trainer.fit` is held to windows: in the auto-tuner's place, which the training loop asks after every round.

A call comes when a round has been submitted and the one before is over. As this holds at both ends of a window, as many
rounds are finished within it as are submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from crossbow_py.core.errors import CrossbowError
from crossbow_py.engine.auto_tuner import AutoTuner, Decision
from crossbow_py.train.tuning import executor_choice
from crossbow_py.train.tuning.calibration import Calibration, Candidate, RememberedChoices, calibrate
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from experiments.throughput.gate import Gate


class PacedLearners(LearnerTuning):
    """Passes the gate after every round, and gives the run the number of learners that the next window wants."""

    def __init__(self, gate: Gate, batch_size: int) -> None:
        super().__init__(AutoTuner())
        self._gate, self._batch_size = gate, batch_size

    def after_round(self, images: int, elapsed_s: float) -> Decision | None:
        """See LearnerTuning; a decision without a reason is not told to the listeners."""
        self._gate.tick(images)
        now, wanted = images // self._batch_size, self._gate.num_learners
        if wanted is None or wanted == now:
            return None
        return Decision("grow" if wanted > now else "shrink", wanted)

    def out_of_memory(self) -> Decision:
        """A window that was asked for cannot be had. Raises CrossbowError."""
        raise CrossbowError(f"memory does not hold {self._gate.num_learners} learners")


class SettlingLearners(PacedLearners):
    """Lets a run's own auto-tuner work until it has settled or a time limit is over, then calls `ready` and paces.

    From then on the number of learners is left alone: the auto-tuner would take the pauses between windows for a device
    that became slow.
    """

    def __init__(
        self,
        tuning: LearnerTuning,
        gate: Gate,
        batch_size: int,
        limit_s: float,
        ready: Callable[[int, bool, float], None],
    ) -> None:
        """`ready` gets the number of learners, whether they are settled, and the seconds of training so far."""
        super().__init__(gate, batch_size)
        self._tuning, self._limit_s, self._ready, self._is_ready = tuning, limit_s, ready, False

    def after_round(self, images: int, elapsed_s: float) -> Decision | None:
        """See LearnerTuning. What the auto-tuner settled on has run a round when `ready` is called."""
        if self._is_ready:
            return super().after_round(images, elapsed_s)
        settled = self._tuning.state.phase == "settled"
        if not settled and elapsed_s < self._limit_s:
            return self._tuning.after_round(images, elapsed_s)
        self._is_ready = True
        self._ready(images // self._batch_size, settled, elapsed_s)
        return None

    def out_of_memory(self) -> Decision:
        """The auto-tuner's to answer while it searches."""
        return super().out_of_memory() if self._is_ready else self._tuning.out_of_memory()


@dataclass
class Stopwatch:
    """Seconds that passed under it."""

    seconds: float = 0.0


@contextmanager
def choosing_afresh(folder: Path) -> Iterator[Stopwatch]:
    """Trainers built inside know nothing of the executors that earlier runs took; their choosing is timed."""
    watch = Stopwatch()

    def timed(candidates: Sequence[Candidate], batch_size: int, device: torch.device) -> Calibration:
        begun_s = time.perf_counter()
        try:
            return calibrate(candidates, batch_size, device)
        finally:
            watch.seconds += time.perf_counter() - begun_s

    memory = partial(RememberedChoices, folder / "executors.json")
    with patch.object(executor_choice, "RememberedChoices", memory), patch.object(executor_choice, "calibrate", timed):
        yield watch
