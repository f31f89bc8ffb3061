"""ThroughputMeter on a clock that is moved by hand."""

from __future__ import annotations

from crossbow_py.telemetry.throughput import ThroughputMeter
from tests.unit.telemetry.conftest import FakeClock


def test_whole_after_two_updates_is_samples_over_time(clock: FakeClock) -> None:
    meter = ThroughputMeter(clock)
    meter.start()
    clock.advance(2)
    meter.update(100)
    clock.advance(2)
    meter.update(300)
    assert meter.elapsed_s == 4
    assert meter.whole.images_per_s == 100
    assert meter.recent.images_per_s == 100


def test_elapsed_with_pauses_leaves_them_out(clock: FakeClock) -> None:
    meter = ThroughputMeter(clock)
    meter.start()
    clock.advance(3)
    meter.update(30)
    meter.pause()
    clock.advance(100)
    assert meter.elapsed_s == 3
    meter.pause()
    meter.resume()
    clock.advance(1)
    meter.resume()
    clock.advance(1)
    meter.update(20)
    assert meter.elapsed_s == 5
    assert meter.whole.images_per_s == 10
    assert meter.recent.images_per_s == 10


def test_recent_after_a_slowdown_forgets_what_left_the_window(clock: FakeClock) -> None:
    meter = ThroughputMeter(clock, window_s=2)
    meter.start()
    for samples in (100, 100, 10, 10):
        clock.advance(1)
        meter.update(samples)
    assert meter.recent.images_per_s == 10
    assert meter.whole.images_per_s == 55


def test_start_with_earlier_time_counts_it_as_elapsed_but_in_no_rate(clock: FakeClock) -> None:
    meter = ThroughputMeter(clock)
    meter.start(elapsed_s=60)
    clock.advance(2)
    meter.update(10)
    assert meter.elapsed_s == 62
    assert meter.whole.images_per_s == meter.recent.images_per_s == meter.lap().images_per_s == 5


def test_lap_twice_covers_only_what_came_in_between(clock: FakeClock) -> None:
    meter = ThroughputMeter(clock)
    meter.start()
    clock.advance(1)
    meter.update(10)
    assert meter.lap().images_per_s == 10
    clock.advance(2)
    meter.update(60)
    assert meter.lap().images_per_s == 30
    assert meter.lap().images_per_s == 0


def test_waits_for_ranks_count_in_training_and_not_in_pauses(clock: FakeClock) -> None:
    waited = FakeClock(50)
    meter = ThroughputMeter(clock, waited_for_ranks_s=waited)
    waited.advance(5)
    meter.start()
    waited.advance(2)
    assert meter.rank_wait_s == 2
    meter.pause()
    waited.advance(100)  # as in an evaluation
    meter.pause()
    assert meter.rank_wait_s == 2
    meter.resume()
    meter.resume()
    waited.advance(1)
    assert meter.rank_wait_s == 3
    meter.start()
    assert (meter.rank_wait_s, meter.samples) == (0, 0)
    meter.update(7)
    assert meter.samples == 7
