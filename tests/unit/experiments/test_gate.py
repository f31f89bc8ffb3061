"""The gate and the load meter: what belongs to a window and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from crossbow_py.core.host import LoadSnapshot, busy_ticks, foreign_share
from crossbow_py.telemetry.events import RoundEnd
from experiments.bench.gate import LEAD_IN_S, FinishedError, Gate, Paced, Ready, Visit, Window


class Channel:
    """The parent's commands, in order, and what the side sent."""

    def __init__(self, *commands: Visit | None) -> None:
        self.commands, self.sent = list(commands), []

    def send(self, obj: Any, /) -> None:
        self.sent.append(obj)

    def recv(self) -> Any:
        if not self.commands:
            raise EOFError
        return self.commands.pop(0)


class Clock:
    """Seconds that pass when told; `others` is the processor time of other programs."""

    def __init__(self) -> None:
        self.now = self.others = 0.0

    def __call__(self) -> float:
        return self.now

    def snapshot(self) -> LoadSnapshot:
        return LoadSnapshot(wall_s=self.now, own_s=self.now, busy_s=self.now + self.others, cores=2)


def gate_for(channel: Channel, clock: Clock) -> Gate:
    return Gate(channel, lambda: None, clock, clock.snapshot)


def tick_for(gate: Gate, clock: Clock, seconds: float, images: int) -> None:
    """A loop whose every tick takes a quarter of a second."""
    for _ in range(round(4 * seconds)):
        clock.now += 0.25
        gate.tick(images)


def test_gate_leaves_the_lead_in_out_and_counts_what_follows() -> None:
    channel, clock = Channel(Visit(1.0), Visit(1.0)), Clock()
    gate = gate_for(channel, clock)
    gate.ready(Ready(2, "fused"))
    assert channel.sent == [Ready(2, "fused")]
    assert LEAD_IN_S == 0.25
    tick_for(gate, clock, 1.25, images=10)  # one tick of lead-in, four of the window
    assert channel.sent[1:] == [Window(images=40, seconds=1.0, foreign_share=0.0)]
    assert channel.sent[1].images_per_s == 40.0


def test_gate_does_not_count_the_time_between_windows() -> None:
    channel, clock = Channel(Visit(1.0), Visit(0.5)), Clock()
    gate = gate_for(channel, clock)
    gate.ready(Ready(1))
    tick_for(gate, clock, 1.25, images=10)
    clock.now += 0.05  # the loop went on for a little, having been held inside its last tick
    tick_for(gate, clock, 0.5, images=10)
    clock.others += 0.3  # of 2 cores x 0.5 s
    with pytest.raises(FinishedError):
        tick_for(gate, clock, 0.5, images=10)
    assert channel.sent[-1].images == 20
    assert channel.sent[-1].seconds == pytest.approx(0.5)
    assert channel.sent[-1].foreign_share == pytest.approx(0.3)


def test_gate_lead_in_has_as_many_ticks_as_asked_for() -> None:
    channel, clock = Channel(Visit(0.5, lead_in_s=0.0, lead_in_ticks=3, num_learners=4), Visit(1.0)), Clock()
    gate = gate_for(channel, clock)
    gate.ready(Ready(1))
    assert gate.num_learners == 4
    tick_for(gate, clock, 1.25, images=10)  # three ticks of lead-in, two of the window
    assert channel.sent[1:] == [Window(images=20, seconds=0.5, foreign_share=0.0)]
    assert gate.num_learners is None


@pytest.mark.parametrize("commands", [(None,), ()])
def test_gate_without_a_further_window_unwinds_the_loop(commands: tuple[None, ...]) -> None:
    with pytest.raises(FinishedError):
        gate_for(Channel(*commands), Clock()).ready(Ready(1))


STAT = """cpu  300 0 30 900 9 0 3 6 0 0
cpu0 100 1 10 300 3 2 1 4 0 0
cpu1 200 0 20 600 6 0 2 2 0 0
cpu10 7 0 0 0 0 0 0 0 0 0
intr 123
"""


def test_busy_ticks_sums_the_cores_asked_for_without_idle_and_iowait() -> None:
    assert busy_ticks(STAT, {0}) == 100 + 1 + 10 + 2 + 1 + 4
    assert busy_ticks(STAT, {0, 1}) == 118 + 224


def test_foreign_share_is_busy_time_less_our_own() -> None:
    before = LoadSnapshot(wall_s=10.0, own_s=1.0, busy_s=5.0, cores=2)
    after = LoadSnapshot(wall_s=12.0, own_s=3.0, busy_s=8.0, cores=2)
    assert foreign_share(before, after) == pytest.approx(0.25)  # (3 - 2) of 2 x 2 s


@pytest.mark.parametrize("busy", [(None, None), (5.0, 5.0)])
def test_foreign_share_the_kernel_does_not_tell_is_unknown(busy: tuple[float | None, float | None]) -> None:
    snapshots = (LoadSnapshot(float(i), float(i), busy[i], 2) for i in range(2))
    assert foreign_share(*snapshots) is None


@pytest.fixture
def load_unknown() -> None:
    """Here it is read."""


@pytest.mark.usefixtures("load_unknown")
def test_load_snapshot_on_this_machine_counts_own_time() -> None:
    before = LoadSnapshot.take()
    while (after := LoadSnapshot.take()).own_s - before.own_s < 0.1:
        pass
    share = foreign_share(before, after)
    assert share is None or 0 <= share <= 1.1


def test_window_says_what_its_last_round_ran_with() -> None:
    channel, clock = Channel(Visit(0.25)), Clock()
    gate = gate_for(channel, clock)
    gate.ready(Ready(2))
    paced = Paced(gate)
    with pytest.raises(FinishedError):
        for in_effect in ((), ("graphs",)):
            clock.now += 0.25
            paced(RoundEnd(10, clock.now, 0.0, 2, True, in_effect))
    assert channel.sent[1].in_effect == ("graphs",)
