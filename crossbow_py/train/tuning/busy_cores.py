"""Notices busy cores: cuts training time into windows, and applies the rule on how threads wait."""

from __future__ import annotations

from collections.abc import Callable

from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.engine.device.host import SleepingThreads, threads_spin
from crossbow_py.engine.device.wait_rule import WaitState, Window, observe
from crossbow_py.engine.executors import EXECUTORS

WINDOW_S = 0.3


class BusyCores:
    """Makes threads sleep while they wait, if that is faster. Owned by the training loop; each rank decides alone.

    Args:
        sleep: makes threads sleep while they wait for each other, from `start` to `stop`.
        take_load: takes the load of this host; None if other processes on it are part of the run.
    """

    def __init__(
        self, sleep: SleepingThreads, take_load: Callable[[], LoadSnapshot] | None = LoadSnapshot.take
    ) -> None:
        self.state = WaitState()
        self._sleep, self._take_load = sleep, take_load
        self._begun: tuple[float, LoadSnapshot | None] | None = None
        self._images = 0

    def after_round(self, images: int, num_learners: int, training_s: float) -> str:
        """Count a round of `images` that is over at `training_s`, without pauses and waiting for data.

        Called between rounds. Returns a message for the user, empty if there is none.
        """
        if self._begun is None:
            self._begun = training_s, self._load()
            return ""
        self._images += images
        seconds = training_s - self._begun[0]
        if seconds < WINDOW_S:
            return ""
        before, load = self._begun[1], self._load()
        share = None if before is None or load is None else foreign_share(before, load)
        others = None if share is None or load is None else share * load.cores  # cores that other programs used
        window = Window(self._images / seconds, num_learners, others)
        slept = self.state.sleeps
        self.state, said = observe(self.state, window, int(seconds / WINDOW_S))
        self._begun, self._images = (training_s, load), 0
        if self.state.sleeps != slept:
            (self._sleep.start if self.state.sleeps else self._sleep.stop)()
        return said

    def begin_anew(self) -> None:
        """Forget the window under way, as something else than training took its time."""
        self._begun, self._images = None, 0

    @property
    def on_trial(self) -> bool:
        """True while threads are trying another way to wait, which is being measured."""
        return self.state.on_trial

    def stop(self) -> None:
        """Restore torch's threads; the next round begins anew."""
        self._sleep.stop()
        self.begin_anew()
        self.state = WaitState()

    def _load(self) -> LoadSnapshot | None:
        return None if self._take_load is None else self._take_load()


def busy_cores(executor: str, device_type: str, is_alone: bool = True) -> BusyCores | None:
    """Return a `BusyCores` for a run with this executor; None if no threads wait by spinning.

    `is_alone` is whether the run has no other processes on this host, ranks or data workers. If it has, the load does
    not tell them from other programs.
    """
    num_cores = len(usable_core_ids())
    if device_type != "cpu" or not EXECUTORS[executor].SPLITS_OPERATORS or not threads_spin(num_cores):
        return None
    return BusyCores(SleepingThreads(num_cores), LoadSnapshot.take if is_alone else None)
