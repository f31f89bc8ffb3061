"""Runs on cores that other programs use: what they notice, do and say, on a simulated clock and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from crossbow_py import Trainer, UserError
from crossbow_py.core.host import LoadSnapshot
from crossbow_py.engine.auto_tuner import AutoTuner
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train import trainer as trainer_module
from crossbow_py.train.tuning import busy_cores as busy_cores_module
from crossbow_py.train.tuning.busy_cores import BusyCores, busy_cores
from crossbow_py.train.tuning.calibration import Calibration, Candidate, calibrate
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from tests.trainers import Recorder, change_run, make_trainer


class Machine:
    """Two cores and a clock: a round takes 1 s, while others hold a core 10 s, or 2 s if threads sleep.

    Others come or go after the rounds in `changes`. It is also what has threads sleep, and keeps what it was told.
    """

    def __init__(self, changes: tuple[int, ...] = ()) -> None:
        self.changes, self.rounds, self.told = changes, 0, list[str]()
        self.now_s, self.busy_s, self.idle_s = 0.0, 0.0, 0.0

    def start(self) -> None:
        self.told.append(f"sleep {self.rounds}")

    def stop(self) -> None:
        self.told.append(f"spin {self.rounds}")

    @property
    def is_busy(self) -> bool:
        return sum(change <= self.rounds for change in self.changes) % 2 == 1

    def train(self) -> None:
        """Train for another round."""
        sleeps, is_busy = bool(self.told) and self.told[-1].startswith("sleep"), self.is_busy
        seconds = 1.0 if not is_busy else 2.0 if sleeps else 10.0
        self.rounds, self.now_s = self.rounds + 1, self.now_s + seconds
        self.busy_s += seconds * (1.0 + is_busy)

    def idle(self, seconds: float) -> None:
        """Let time pass without training."""
        self.now_s, self.busy_s = self.now_s + seconds, self.busy_s + seconds * self.is_busy
        self.idle_s += seconds

    def load(self) -> LoadSnapshot:
        """Return the load if this process keeps one core busy and others the other."""
        own_s = self.now_s - self.idle_s
        return LoadSnapshot(wall_s=self.now_s, own_s=own_s, busy_s=self.busy_s, cores=2)


def run_on(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
    meter: type[ThroughputMeter] = ThroughputMeter,
    after_round: Callable[[RoundEnd], None] | None = None,
) -> list[str]:
    """Return the messages of a run of `rounds` rounds, of 8 images each."""
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder])
    change_run(trainer, busy_cores=BusyCores(machine, machine.load))
    train(trainer, machine, monkeypatch, rounds, meter, after_round)
    return [message for message in recorder.of("message") if "hreads" in message]


def train(
    trainer: Trainer,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
    meter: type[ThroughputMeter] = ThroughputMeter,
    after_round: Callable[[RoundEnd], None] | None = None,
) -> None:
    """Train for some rounds on the machine's clock."""
    monkeypatch.setattr(busy_cores_module, "sleep", machine.idle)
    monkeypatch.setattr(trainer_module, "ThroughputMeter", lambda **_: meter(lambda: machine.now_s))
    submit = SerialExecutor.submit

    def timed(self, plan):
        done = submit(self, plan)
        machine.train()
        return done

    monkeypatch.setattr(SerialExecutor, "submit", timed)
    trainer.fit(max_rounds=rounds, after_round=after_round)


def test_run_on_a_quiet_machine_changes_nothing_and_says_nothing(monkeypatch):
    machine = Machine()
    assert run_on(machine, monkeypatch, 60) == []
    assert machine.told == ["spin 60"]  # as it is left


def test_run_whose_throughput_collapses_has_threads_sleep_and_spin_again_when_the_load_goes(monkeypatch):
    machine = Machine(changes=(10, 20))
    said = run_on(machine, monkeypatch, 40)
    # A round takes as long as three windows or more, and so is a measurement by itself: 8 images in 10 s, in the trial
    # in 2 s; and asleep in 1 s when the others have gone, as fast as spinning here.
    assert said == [
        "Training ran at 1 images/s, as happens where other programs use the cores: threads now sleep while they wait "
        "for each other, which gives 4 images/s and the same results.",
        "Threads spin again while they wait for each other, as they do where cores are free: 8 images/s, 8 before.",
    ]
    assert machine.told == ["sleep 11", "spin 21", "spin 40"]


@pytest.mark.usefixtures("two_threads")
def test_run_that_begins_on_busy_cores_sleeps_from_its_first_round(monkeypatch):
    machine = Machine(changes=(0, 20))
    assert run_on(machine, monkeypatch, 40) == [
        "Other programs hold 1.0 of 2 cores: threads sleep while they wait.",
        "Threads spin again while they wait for each other, as they do where cores are free: 8 images/s, 8 before.",
    ]
    assert machine.told[0] == "sleep 0" and machine.told[-2:] == ["spin 21", "spin 40"]


def test_cores_that_threads_do_not_need_are_not_missed(monkeypatch):
    machine = Machine(changes=(0,))  # one of two cores is taken, and torch has one thread
    monkeypatch.setattr(busy_cores_module, "sleep", machine.idle)
    assert not BusyCores(machine, machine.load).start() and not machine.told


@pytest.mark.usefixtures("two_threads")
def test_run_goes_on_asleep_as_the_last_call_ended(monkeypatch):
    machine = Machine(changes=(0,))
    monkeypatch.setattr(busy_cores_module, "sleep", machine.idle)
    watch = BusyCores(machine, machine.load)
    assert [bool(watch.start()), watch.stop(), watch.start()] == [True, None, ""]
    assert machine.told == ["sleep 0", "spin 0", "sleep 0"]


@pytest.mark.usefixtures("two_threads")
def test_executors_are_measured_with_threads_that_wait_as_they_will_in_training(monkeypatch):
    for changes, told in (((0,), ["sleep 0"]), ((), [])):
        machine, seen = Machine(changes), list[list[str]]()
        monkeypatch.setattr(busy_cores_module, "usable_core_ids", lambda: {0, 1})
        monkeypatch.setattr(busy_cores_module, "SleepingThreads", lambda cores, own=machine: own)
        monkeypatch.setattr(busy_cores_module, "sleep", machine.idle)
        monkeypatch.setattr(LoadSnapshot, "take", machine.load)

        def build(own=machine, seen=seen):
            seen.append([*own.told])
            raise UserError("not needed")

        with pytest.raises(UserError, match="no executor can run"):
            calibrate([Candidate("serial", 1, build)], 8, torch.device("cpu"))
        assert seen == [told] and machine.told == [*told, "spin 0"]
    rates = {("serial", 1): 1.0, ("threads", 1): 2.0}
    assert Calibration("threads", rates).is_lasting and not Calibration("threads", rates, asleep=True).is_lasting


def test_run_that_waits_for_data_is_not_taken_for_one_on_busy_cores(monkeypatch):
    class Late(ThroughputMeter):
        waited_s = property(lambda self: 0.9 * max(0.0, machine.now_s - 10.0))

    class LateMachine(Machine):
        def train(self) -> None:
            """Train for a round of 1 s, after ten with 9 s of waiting for data each."""
            super().train()
            self.now_s += 9.0 if self.rounds > 10 else 0.0

    machine = LateMachine()
    assert run_on(machine, monkeypatch, 30, Late) == []
    assert machine.told == ["spin 30"]


def test_run_that_is_held_up_between_rounds_is_not_taken_for_one_on_busy_cores(monkeypatch):
    machine = Machine()

    def held_up(end: RoundEnd) -> None:  # while other programs have all cores
        if machine.rounds % 5 == 0:
            machine.now_s, machine.busy_s = machine.now_s + 30.0, machine.busy_s + 60.0

    assert run_on(machine, monkeypatch, 40, after_round=held_up) == []
    assert machine.told == ["spin 40"]


def test_auto_tuner_measures_nothing_while_threads_try_another_way_to_wait(monkeypatch):
    class Tuning(LearnerTuning):
        interrupted, seen = 0, 0

        def interrupt(self) -> None:
            self.interrupted += 1

        def after_round(self, images, elapsed_s, noise=None):
            self.seen += 1

    class Trying(BusyCores):
        on_trial = property(lambda self: 4 <= machine.rounds < 7)

    machine, trainer = Machine(), make_trainer(num_learners="auto")
    change_run(trainer, tuning=Tuning(AutoTuner()), busy_cores=Trying(machine, machine.load))
    train(trainer, machine, monkeypatch, 10)
    # Ten meetings, before each round, of which the first has nothing to look at.
    assert (trainer.run.tuning.interrupted, trainer.run.tuning.seen) == (3, 7)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)  # that of all tests


@pytest.mark.parametrize(
    ("executor", "looked_after"), [("serial", True), ("fused", True), ("threads", False), ("fused_threads", False)]
)
@pytest.mark.usefixtures("two_threads")
def test_executors_whose_operators_use_several_threads_are_looked_after(monkeypatch, executor, looked_after):
    monkeypatch.setattr("crossbow_py.train.tuning.busy_cores.usable_core_ids", lambda: {0, 1})
    assert (busy_cores(executor, "cpu") is not None) is looked_after
    assert busy_cores(executor, "cuda") is None


@pytest.mark.parametrize(("num_threads", "looked_after"), [(1, False), (2, True), (3, False)])
def test_one_thread_waits_for_nobody_and_more_than_there_are_cores_sleep_anyway(monkeypatch, num_threads, looked_after):
    monkeypatch.setattr("crossbow_py.train.tuning.busy_cores.usable_core_ids", lambda: {0, 1})
    torch.set_num_threads(num_threads)
    assert (busy_cores("serial", "cpu") is not None) is looked_after
    torch.set_num_threads(1)
