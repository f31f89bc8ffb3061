"""Busy cores, noticed by a run: cuts training time into windows, and follows the rule on how threads wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.engine.device.host import SleepingThreads, threads_spin
from crossbow_py.engine.device.wait_rule import WaitState, Window, observe
from crossbow_py.engine.executors import EXECUTORS

WINDOW_S = 0.3


class Sleep(Protocol):
    """A way to have threads sleep while they wait for each other, from `start` to `stop`."""

    def start(self) -> None:
        """No effect when they sleep."""

    def stop(self) -> None:
        """No effect when they do not."""


class BusyCores:
    """Has threads sleep while they wait where that is faster. Owned by the training loop, and a rank's own affair.

    Args:
        sleep: the effect.
        take_load: what the kernel says by now; None where others on this host are part of the run.
    """

    def __init__(self, sleep: Sleep, take_load: Callable[[], LoadSnapshot] | None = LoadSnapshot.take) -> None:
        self.state = WaitState()
        self._sleep, self._take_load = sleep, take_load
        self._begun: tuple[float, LoadSnapshot | None] | None = None
        self._images = 0

    def after_round(self, images: int, num_learners: int, training_s: float) -> str:
        """Count a round of so many images that is over by `training_s`, pauses and waiting for data left out.

        Called between rounds. Returns a sentence for the user when something is to be said, else nothing.
        """
        if self._begun is None:
            self._begun = training_s, self._load()
            return ""
        self._images += images
        seconds = training_s - self._begun[0]
        if seconds < WINDOW_S:
            return ""
        load = self._load()
        window = Window(self._images / seconds, num_learners, _others(self._begun[1], load))
        slept = self.state.sleeps
        self.state, said = observe(self.state, window, int(seconds / WINDOW_S))
        self._begun, self._images = (training_s, load), 0
        if self.state.sleeps != slept:
            (self._sleep.start if self.state.sleeps else self._sleep.stop)()
        return said

    @property
    def on_trial(self) -> bool:
        """Whether threads wait in another way than before, until that is measured."""
        return self.state.on_trial

    def stop(self) -> None:
        """Leave torch's threads as they were; the next round begins anew."""
        self._sleep.stop()
        self.state, self._begun, self._images = WaitState(), None, 0

    def _load(self) -> LoadSnapshot | None:
        return None if self._take_load is None else self._take_load()


def _others(before: LoadSnapshot | None, after: LoadSnapshot | None) -> float | None:
    """The cores that others held."""
    share = None if before is None or after is None else foreign_share(before, after)
    return None if share is None or after is None else share * after.cores


def busy_cores(executor: str, device_type: str, is_alone: bool = True) -> BusyCores | None:
    """Return what looks after a run by an executor; None where no threads wait by spinning.

    A run that has other processes here, ranks or data workers, `is_alone` no more: their load says nothing of others.
    """
    num_cores = len(usable_core_ids())
    if device_type != "cpu" or not EXECUTORS[executor].SPLITS_OPERATORS or not threads_spin(num_cores):
        return None
    return BusyCores(SleepingThreads(num_cores), LoadSnapshot.take if is_alone else None)
