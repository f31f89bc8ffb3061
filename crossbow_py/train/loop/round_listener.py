"""The interface of what attaches to the training loop between rounds, and what `fit` attaches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import SupportsIndex

from crossbow_py.core.errors import UserError
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.train.loop.learners import Learners
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter
from crossbow_py.train.run_settings import MOST_LEARNERS
from crossbow_py.train.tuning.busy_cores import WINDOW_S


class RoundListener:
    """Called by the loop's thread between rounds. The methods here do nothing."""

    @property
    def on_trial(self) -> bool:
        """Whether rounds run under other conditions for a while, so that nothing else may be measured by them."""
        return False

    def start(self) -> None:
        """Called once, before the first round."""

    def after_round(self, images: int) -> Decision | None:
        """Called once a round of `images` is submitted and the one before is over.

        Returns the number of learners per device to continue with; None to leave it as it is.
        """
        return None

    def stop(self) -> None:
        """Called once, after the last round or an error."""


class HostTuning(RoundListener):
    """Tunes the number of data workers, and how threads wait for each other on a busy machine; numbers stay."""

    def __init__(self, run: Run, learners: Learners, reporter: Reporter) -> None:
        self._run, self._learners, self._reporter, self._meter = run, learners, reporter, reporter.meter

    @property
    def on_trial(self) -> bool:
        return self._run.busy_cores is not None and self._run.busy_cores.on_trial

    def start(self) -> None:
        if self._run.worker_autotuner:
            self._run.worker_autotuner.start()
        if self._run.busy_cores and (said := self._run.busy_cores.start()):
            self._reporter.message(said)

    def after_round(self, images: int) -> Decision | None:
        run, elapsed_s, waited_s = self._run, self._meter.elapsed_s, self._meter.waited_s
        if run.worker_autotuner:
            batches = run.state.samples_seen // run.settings.samples_per_step // run.ranks.num_ranks
            if said := run.worker_autotuner.after_round(elapsed_s, waited_s, batches):
                self._reporter.message(said)
                self._reporter.workers(run.train_feed.num_workers)
        watch, learners = run.busy_cores, run.bank.num_learners
        if watch and not self._learners.executor.SPLITS_OPERATORS:  # as more learners came
            watch.stop()
        elif watch and (said := watch.after_round(images, learners, elapsed_s - waited_s)):
            self._reporter.message(said)
        return None

    def stop(self) -> None:
        if self._run.busy_cores:
            self._run.busy_cores.stop()


class AfterRound(RoundListener):
    """Calls `after_round` of `fit`."""

    def __init__(
        self, call: Callable[[RoundEnd], int | None], run: Run, learners: Learners, reporter: Reporter
    ) -> None:
        self._call, self._run, self._learners, self._meter = call, run, learners, reporter.meter

    def after_round(self, images: int) -> Decision | None:
        """Raise UserError for a number of learners that the run cannot have."""
        tuning, now = self._run.tuning, self._run.bank.num_learners
        settled = tuning is None or tuning.state.phase == "settled"
        in_effect = tuple(self._learners.executor.in_effect())
        begun_s = self._meter.elapsed_s
        wanted = self._call(RoundEnd(images, begun_s, self._meter.waited_s, now, settled, in_effect))
        if self._run.busy_cores and self._meter.elapsed_s - begun_s > WINDOW_S:
            self._run.busy_cores.begin_anew()  # what was done meanwhile was no training
        if wanted is None:
            return None
        is_whole = isinstance(wanted, SupportsIndex) and not isinstance(wanted, bool)
        count = operator.index(wanted) if is_whole else 0
        if not 1 <= count <= MOST_LEARNERS:
            raise UserError(
                f"after_round must return None or a whole number of learners from 1 to {MOST_LEARNERS}, got {wanted!r}"
                "; return None to leave their number as it is."
            )
        if tuning is None and count != now:
            raise UserError(
                f"after_round may change the number of learners only with num_learners=auto, got {count} with "
                f"num_learners={now}; set num_learners=auto, or return None."
            )
        return Decision("grow" if count > now else "shrink", count)
