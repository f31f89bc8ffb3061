"""What a training run holds: learners by turns, searches, and rounds that are worked out by hand or run for real."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.normalisation import BatchFormat
from crossbow_py.data.streaming.streamed_data import Loaded, StreamedData
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from experiments.bench.rounds import Rounds, Setup
from experiments.estimate.truth import (
    Subject,
    TrainingRun,
    doubling_search,
    largest,
    run_in_step,
    staged_batches,
)
from experiments.memory.measure import peak_on_host

MLP = Subject("mlp", (1, 28, 28), 10)  # 784-256-256-10
LENET = Subject("lenet", (1, 28, 28), 10)


def test_runners_take_turns_after_every_operator() -> None:
    heard: list[str] = []

    def body(name: str, count: int, hand_on: Callable[[], None]) -> None:
        for number in range(count):
            heard.append(f"{name}{number}")
            hand_on()

    run_in_step([partial(body, "a", 2), partial(body, "b", 3), partial(body, "c", 1)])
    assert heard == ["a0", "b0", "c0", "a1", "b1", "b2"]


def test_runner_that_fails_stops_the_others() -> None:
    heard: list[int] = []

    def fail(hand_on: Callable[[], None]) -> None:
        hand_on()
        raise ValueError("no room")

    def go_on(hand_on: Callable[[], None]) -> None:
        for number in range(100):
            heard.append(number)
            hand_on()

    with pytest.raises(ValueError, match="no room"):
        run_in_step([go_on, fail, go_on])
    assert heard == [0, 0, 1]


@pytest.mark.parametrize("guess", [1, 2, 99, 100, 101, 5000])
@pytest.mark.parametrize("true", [0, 1, 2, 100, 1000])
def test_largest_is_found_from_any_guess(true: int, guess: int) -> None:
    assert largest(lambda size: size <= true, guess) == true


def test_largest_asks_twice_when_the_guess_is_right() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 100

    assert largest(fits, 100) == 100
    assert asked == [100, 101]


@pytest.mark.parametrize(("true", "tried"), [(0, [1]), (1, [1, 2]), (5, [1, 2, 4, 8, 6, 5])])
def test_doubling_search_asks_as_finders_do(true: int, tried: list[int]) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= true

    assert doubling_search(fits) == true
    assert asked == tried


def test_run_holds_the_bank_and_the_template() -> None:
    values = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    padded = values + 54  # the last bias has 10 values, and takes 64
    rows = 4 * (padded + 64)  # float32; room to align the first value
    assert TrainingRun(MLP, 1, 1).held_bytes == 4 * values + 7 * rows + 4 * 64  # z, z_prev, total; no float buffers


def test_learners_at_once_all_hold_their_passes_and_in_turn_one_does() -> None:
    def beside(num_learners: int, at_once: int, staged: int) -> int:
        run = TrainingRun(LENET, num_learners, at_once)
        return run.peak_bytes(64) - run.held_bytes - staged * 64 * (28 * 28 + 8)

    alone = beside(1, 1, staged=4)
    assert beside(4, 4, staged=12) == 4 * alone
    assert beside(4, 1, staged=12) == alone


def test_what_fits_has_its_peak_within_the_limit_and_nothing_stays_behind() -> None:
    run = TrainingRun(MLP, 2, 2)
    limit = 32 * 2**20
    found = run.largest_batch_size(limit)
    assert run.peak_bytes(found) <= limit < run.peak_bytes(found + 1)
    assert run.fits(limit, found)
    assert not run.fits(limit, found + 1)
    assert not run.fits(run.held_bytes - 1, 1)
    assert run.largest_batch_size(run.held_bytes) == 0


@pytest.mark.parametrize(("subject", "setup"), [(MLP, Setup("mlp", 64, 1, "serial", "cpu", "fp32"))])
def test_round_holds_what_a_real_one_takes_of_the_allocator(
    subject: Subject, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "6")
    with Rounds(setup) as rounds:
        rounds.learn()
        real = peak_on_host(rounds.learn)
    run = TrainingRun(subject, 1, 1)
    staged = staged_batches(1) * 64 * (subject.sample_bytes + 8)
    assert run.peak_bytes(64) - run.held_bytes - staged == pytest.approx(real, rel=0.01)


class Blank(StreamedData):
    remedy = "repair them"

    def __len__(self) -> int:
        return 64

    def fetch(
        self,
        keys: Sequence[object],
        *,
        seed: int,
        training: bool,
        on_sample: Callable[[int], None],
        out: torch.Tensor | None = None,
    ) -> Loaded:
        return Loaded(torch.zeros(len(keys), 3, 8, 8, dtype=torch.uint8), torch.zeros(len(keys), dtype=torch.int64))

    def name_of(self, sample: int) -> str:
        return str(sample)

    def subset(self, ids: object) -> Blank:
        return self


@pytest.mark.parametrize("num_learners", [1, 2, 4])
def test_staged_batches_are_as_many_as_a_streaming_feed_may_hold(num_learners: int) -> None:
    device = torch.device("cpu")
    feed = StreamingFeed(Blank(), 1, 0, BatchFormat(device, channels_last=True), Augmentation(), 1)
    try:
        for index in range(3):
            starts = [index * num_learners + learner for learner in range(num_learners)]
            feed.announce(starts)
            feed.wait(starts)
        last = starts[-1]
        ahead = range(last + 1, last + 1 + max(2, num_learners))
        feed.wait(ahead)
        assert len(feed._buffer.starts()) == staged_batches(num_learners)
    finally:
        feed.close()
