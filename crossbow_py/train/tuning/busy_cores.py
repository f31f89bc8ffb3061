"""Notices busy cores: cuts training time into windows, and applies the rule on how threads wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep

import torch

from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.engine.device.host import SleepingThreads, threads_spin
from crossbow_py.engine.device.wait_rule import HELD_CORES, WaitState, Window, observe
from crossbow_py.engine.executors import EXECUTORS, SerialExecutor

WINDOW_S = 0.3
_LOOK_S = 0.1  # in which the kernel's clock ticks often enough to tell the load


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
        self._begins_asleep: bool | None = None  # not looked at yet
        self._begun: tuple[float, LoadSnapshot | None] | None = None
        self._images = 0

    def start(self) -> str:
        """Have threads sleep from the beginning if other programs hold cores that they need, or if they slept before.

        Takes a tenth of a second, the first time. Returns a message, or an empty one.
        """
        said = ""
        if self._begins_asleep is None and self._take_load is not None:
            before = self._take_load()
            sleep(_LOOK_S)
            load = self._take_load()
            others = (foreign_share(before, load) or 0.0) * load.cores
            self._begins_asleep = others - (load.cores - torch.get_num_threads()) >= HELD_CORES
            if self._begins_asleep:
                said = f"Other programs hold {others:.1f} of {load.cores} cores: threads sleep while they wait."
        if self._begins_asleep:
            self.state = WaitState(sleeps=True)
            self._sleep.start()
        return said

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
        self._begins_asleep = None if self._begins_asleep is None else self.state.sleeps
        self._sleep.stop()
        self.begin_anew()
        self.state = WaitState()

    def _load(self) -> LoadSnapshot | None:
        return None if self._take_load is None else self._take_load()


@contextmanager
def sleeping_where_busy(device_type: str) -> Iterator[bool]:
    """Have threads sleep during the block if other programs hold cores that they need; the value is whether they do."""
    watch = busy_cores(SerialExecutor.NAME, device_type)
    asleep = watch is not None and bool(watch.start())
    try:
        yield asleep
    finally:
        if watch is not None:
            watch.stop()


def busy_cores(executor: str, device_type: str, is_alone: bool = True) -> BusyCores | None:
    """Return a `BusyCores` for a run with this executor; None if no threads wait by spinning.

    `is_alone` is whether the run has no other processes on this host, ranks or data workers. If it has, the load does
    not tell them from other programs.
    """
    num_cores = len(usable_core_ids())
    if device_type != "cpu" or not EXECUTORS[executor].SPLITS_OPERATORS or not threads_spin(num_cores):
        return None
    return BusyCores(SleepingThreads(num_cores), LoadSnapshot.take if is_alone else None)
