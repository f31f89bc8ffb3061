"""The streaming feed: what a batch holds follows from its position, whoever makes it and when."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossbow_py.core.errors import BadSampleError, DataError, UserError
from crossbow_py.data.augmentation import Augmentation, Flip
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.streaming import streaming_feed
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from crossbow_py.engine.sizing.memory import staged_batches
from tests.unit.data.streams import Images, N, closed, same, until

SEED = 7


class Items:
    """Map-style items that draw from every generator there is."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.failing:
            raise ValueError("torn")
        drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        return torch.tensor([float(index), *drawn]), index


@pytest.fixture
def made() -> Iterator[Callable[..., StreamingFeed]]:
    feeds: list[Feed] = []

    def make(
        data: Any, workers: int, batch_size: int = 4, flip: Flip = False, random_erasing: float = 0,
        crop_padding: int = 0, **settings: Any,
    ) -> StreamingFeed:  # fmt: skip
        augmentation = Augmentation(crop_padding, flip, random_erasing)
        feed = make_feed(data, batch_size, SEED, augmentation=augmentation, num_workers=workers, **settings)
        feeds.append(feed)
        assert isinstance(feed, StreamingFeed)
        return feed

    yield make
    closed(feeds)


def ids_at(start: int, count: int) -> list[int]:
    return [int(epoch_order(SEED, p // N, N)[p % N]) for p in range(start, start + count)]


def rounds(feed: Feed, starts: Sequence[Sequence[int]]) -> list[Batch]:
    """As the training loop asks: announced, waited for, then taken."""
    found = []
    for each in starts:
        if not feed.announce(each):
            feed.wait(each)
        assert feed.announce(each)
        found.append(feed.batches(each))
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_hold_the_stream_across_epochs_whatever_the_number_of_workers(made: Any, workers: int) -> None:
    feed = made(Images(), workers)
    found = rounds(feed, [(p, p + 4) for p in range(0, 64, 8)])
    targets = torch.cat([batch.targets.flatten() for batch in found]).tolist()
    assert targets == ids_at(0, 64)
    pixels = torch.cat([batch.inputs[..., 1:].amax((2, 3, 4)).flatten() for batch in found])
    expected = [i + p // N for p, i in enumerate(ids_at(0, 64))]
    torch.testing.assert_close(pixels, torch.tensor(expected) / 255)


class StillImages(Images):
    """The same in every epoch, so that tensors can hold them too."""

    image_shape = (3, 9, 7)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 9, 7), dtype=torch.uint8, generator=generator), index

    def fetch(self, keys: Sequence[Key], **options: Any) -> Loaded:
        return super().fetch([Key(0, key.sample) for key in keys], **options)


@pytest.mark.parametrize(("crop_padding", "workers", "channels_last"), [(0, 0, True), (2, 0, False), (2, 2, True)])
def test_streamed_images_are_augmented_like_resident_ones_to_the_bit(
    made: Any, crop_padding: int, workers: int, channels_last: bool
) -> None:
    held = torch.stack([StillImages()[i][0] for i in range(N)]), torch.arange(N)
    settings: dict[str, Any] = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "channels_last": channels_last}
    augmentation = Augmentation(crop_padding, "alternating", 0.6)
    resident = make_feed(held, 4, SEED, augmentation=augmentation, **settings)
    settings |= {"flip": "alternating", "random_erasing": 0.6, "crop_padding": crop_padding}
    streamed = made(StillImages(), workers, **settings)
    starts = [(p, p + 4) for p in range(0, 72, 8)]  # three epochs, across their ends
    assert same(rounds(streamed, starts), [resident.batches(each) for each in starts])
    assert same([streamed.batch(N - 2)], [resident.batch(N - 2)])
    (whole,) = streamed.evaluation_batches(N)
    assert torch.equal(whole.inputs, next(iter(resident.evaluation_batches(N))).inputs)


@pytest.mark.parametrize("workers", [1, 2])
def test_items_drawing_at_random_are_the_same_with_any_number_of_workers(made: Any, workers: int) -> None:
    starts = [(p,) for p in range(0, 48, 4)]
    assert same(rounds(made(Items(), 0), starts), rounds(made(Items(), workers), starts))


def test_items_of_another_epoch_draw_other_numbers(made: Any) -> None:
    feed = made(Items(), 0, batch_size=N)
    first, second = (feed.batch(start).inputs for start in (0, N))
    by_sample = [rows[rows[:, 0].argsort()] for rows in (first, second)]
    assert torch.equal(by_sample[0][:, 0], by_sample[1][:, 0])
    assert not (by_sample[0][:, 1:] == by_sample[1][:, 1:]).any()


def test_loading_in_the_caller_leaves_the_generators_alone(made: Any) -> None:
    feed = made(Items(), 0)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    feed.batch(0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_aside_are_those_of_the_stream_and_what_was_announced_stays_there(made: Any, workers: int) -> None:
    starts = [4 * (n % 7) for n in range(10)]
    expected = [made(Images(), 0, flip=True).batch(start) for start in starts]
    feed = made(Images(), workers, flip=True)
    rounds(feed, [(60, 64)])
    loaded = feed.loading_times.num_batches
    producer, buffered = feed._producer, feed._buffer.starts()
    assert same(list(feed.aside(starts)), expected)
    assert feed.announce((60, 64)) and feed._producer is producer and feed._buffer.starts() >= buffered
    assert feed.loading_times.num_batches - loaded <= 2  # the next round's


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_aside_have_others_in_place_of_bad_samples_which_do_not_count(made: Any, workers: int) -> None:
    feed = made(Images(bad=[3]), workers)
    targets = torch.cat([batch.targets for batch in feed.aside(range(0, 20, 4))]).tolist()
    assert targets == [4 if i == 3 else i for i in ids_at(0, 20)]
    assert feed.take_notes() == []


def test_batches_aside_that_are_not_taken_leave_no_process(made: Any) -> None:
    batches = made(Images(), 1).aside(range(0, 20, 4))
    next(batches)
    batches.close()
    assert not multiprocessing.active_children()


def test_stream_goes_on_unchanged_when_the_number_of_workers_changes(made: Any) -> None:
    starts = [(p, p + 4) for p in range(0, 96, 8)]
    feed = made(Items(), 1)
    found = rounds(feed, starts[:4])
    feed.use_workers(2)
    found += rounds(feed, starts[4:8])
    feed.use_workers(0)
    found += rounds(feed, starts[8:])
    assert same(found, rounds(made(Items(), 0), starts))


def test_stream_goes_back_and_forth_where_it_is_asked_to(made: Any) -> None:
    starts = [(0, 4), (8, 12), (400,), (404,), (0,), (4,), (12, 16, 20), (40, 3, 93), (97, 101, 105)]
    assert same(rounds(made(Items(), 1), starts), rounds(made(Items(), 0), starts))


def test_shared_batch_is_made_once_for_all_learners(made: Any) -> None:
    feed = made(Images(), 0)
    rounds(feed, [(0, 0, 0), (4, 4, 4)])
    assert feed.loading_times.num_batches == 2


def test_prefetch_buffer_holds_two_rounds_and_what_is_made_ahead(made: Any) -> None:
    feed = made(Images(), 1)
    rounds(feed, [(p, p + 4) for p in range(0, 80, 8)])
    until(lambda: len(feed._buffer.starts()) >= 6)
    time.sleep(0.1)
    assert sorted(feed._buffer.starts()) == [64, 68, 72, 76, 80, 84]
    assert staged_batches(2) == 6  # what an estimate counts


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_gives_every_sample_once_in_order_without_augmentation(made: Any, workers: int) -> None:
    batches = list(made(Images(), workers, flip=True).evaluation_batches(18))
    assert [len(batch.targets) for batch in batches] == [18, 5]
    assert torch.cat([batch.targets for batch in batches]).tolist() == list(range(N))
    assert (torch.cat([batch.inputs for batch in batches])[:, 0, 0, 0] * 255).round().tolist() == [100] * N


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_within_the_limit_are_skipped_and_named(made: Any, workers: int) -> None:
    feed = made(Images(bad=[3, 5], max_bad=2), workers)
    found = rounds(feed, [(p,) for p in range(0, 20, 4)] + [(20,)])
    expected = [i + 1 if i in (3, 5) else i for i in ids_at(0, 24)]
    assert torch.cat([batch.targets[0] for batch in found]).tolist() == expected
    notes = feed.take_notes()
    assert len(notes) == 2 and feed.take_notes() == []
    assert any("image 3" in note and "torn" in note and "of at most 2" in note for note in notes)


def test_bad_samples_are_left_out_of_evaluation(made: Any) -> None:
    batches = list(made(Images(bad=[0, 1, 2, 3, 9], max_bad=5), 0).evaluation_batches(4))
    assert torch.cat([batch.targets for batch in batches]).tolist() == [4, 5, 6, 7, 8, *range(10, N)]


@pytest.mark.parametrize("workers", [0, 1])
def test_one_bad_sample_too_many_fails_its_own_round_and_not_an_earlier_one(made: Any, workers: int) -> None:
    order = ids_at(0, N)
    feed = made(Images(bad=[order[9]]), workers)
    assert len(rounds(feed, [(0,), (4,)])) == 2
    feed.announce((8,))
    with pytest.raises(BadSampleError, match=rf"image {order[9]} cannot be read \(torn\); remove it"):
        feed.wait((8,))


def test_failure_ahead_of_a_slow_consumer_is_kept_for_its_round(made: Any) -> None:
    order = ids_at(0, N)
    feed = made(Images(bad=[order[9]]), 1)
    rounds(feed, [(0,)])
    assert until(lambda: feed._buffer._failure is not None)
    rounds(feed, [(4,)])
    for _ in range(2):
        assert not feed.announce((8,))
        with pytest.raises(BadSampleError, match=f"image {order[9]}"):
            feed.wait((8,))


@pytest.mark.parametrize("workers", [0, 1])
def test_item_that_raises_is_named_with_its_error(made: Any, workers: int) -> None:
    feed = made(Items(failing=ids_at(0, 1)[0]), workers)
    feed.announce((0,))
    expected = rf"item {ids_at(0, 1)[0]} of the data set cannot be read \(ValueError: torn at .*\)"
    with pytest.raises(UserError, match=expected):
        feed.wait((0,))


@pytest.mark.parametrize("workers", [0, 1])
def test_items_of_different_shapes_are_refused_in_one_sentence(made: Any, workers: int) -> None:
    feed = made([(torch.zeros(1 + i % 2), 0) for i in range(N)], workers)
    feed.announce((0,))
    with pytest.raises(UserError, match="cannot be stacked into a batch") as caught:
        feed.wait((0,))
    assert "\n" not in str(caught.value)


def test_worker_that_is_killed_is_laid_to_a_sample(made: Any) -> None:
    feed = made(Images(slow=dict.fromkeys(range(N), 0.02)), 1)
    rounds(feed, [(0,)])
    (child,) = multiprocessing.active_children()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(
        DataError, match=rf"data worker {child.pid} died \(killed by signal SIGKILL\) and was last on image"
    ):
        rounds(feed, [(p,) for p in range(4, 400, 4)])


def test_worker_that_hangs_is_laid_to_its_sample_and_ended(made: Any) -> None:
    order = ids_at(0, N)
    data = Images(slow={order[5]: 60.0})
    data.timeout_s = 0.5
    feed = made(data, 1)
    rounds(feed, [(0,)])
    with pytest.raises(DataError, match=rf"has hung for 0.5 s on image {order[5]}"):
        rounds(feed, [(4,)])


class NoSharedMemory(Images):
    """No file of a worker process may grow, those in /dev/shm neither; its batches are in memory of its own."""

    image_shape = None

    def fetch(self, *args: Any, **kwargs: Any) -> Loaded:
        forbid_files()
        return super().fetch(*args, **kwargs)


def forbid_files() -> None:
    if multiprocessing.parent_process() is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.timeout(60)
def test_batch_for_which_shared_memory_has_no_room_is_told_with_what_helps(made: Any) -> None:
    feed = made(NoSharedMemory(), 1)
    said = r"^a batch could not be made .*unable to .*File too large.*give it more room .* set num_workers=0\.$"
    with pytest.raises(DataError, match=said) as caught:
        rounds(feed, [(0,)])
    assert caught.value.exit_code == 1


class Unpicklable(Images):
    """Batches that the queue of a worker process cannot send."""

    timeout_s = 0.5

    def fetch(self, *args: Any, **kwargs: Any) -> Loaded:
        return super().fetch(*args, **kwargs)._replace(bad=(BadSample(0, "image 0", threading.Lock()),))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_batch_that_is_lost_on_its_way_ends_the_wait_for_it(made: Any) -> None:
    feed = made(Unpicklable(), 1)
    with pytest.raises(DataError, match=r"from a data worker: it did not arrive for 0\.5 s, .* set num_workers=0\.$"):
        rounds(feed, [(0,)])


@pytest.mark.slow
def test_workers_that_cannot_all_be_started_are_told_and_none_is_left(made: Any, capfd: Any) -> None:
    feed, limits = made(Items(), 8), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 16, limits[1]))
    try:
        with pytest.raises(DataError, match=r"^data workers cannot be started \(OSError: .*Too many open files\);"):
            feed.announce((0,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not multiprocessing.active_children()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_feed_goes_on_after_it_was_closed(made: Any) -> None:
    feed = made(Items(), 1)
    before = rounds(feed, [(0,)])
    feed.close()
    assert same(before, rounds(feed, [(0,)]))


def test_feed_for_measuring_gives_batches_alike_and_starts_nothing(made: Any) -> None:
    feed = made(Images(), 2, batch_size=5)
    still = feed.for_measuring()
    assert still.batch(400).inputs.shape == feed.batch(0).inputs.shape and still.batch(400).targets.tolist() == [0] * 5
    assert still.batches((0, 5)).inputs.shape == (2, 5, 3, 2, 4)


class OutOfMemory(Images):
    def fetch(self, *args: Any, **kwargs: Any) -> Loaded:
        raise MemoryError("no.")


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_that_fails_for_another_reason_says_the_last_line_and_what_to_look_at(made: Any, workers: int) -> None:
    said = r"^a batch could not be made \(MemoryError: no\); lower num_workers or batch_size"
    with pytest.raises(DataError, match=said) as caught:
        made(OutOfMemory(), workers).batch(0)
    assert "in fetch" in str(caught.value.__cause__)


def test_feeds_on_cuda_copy_on_one_stream_of_a_priority_that_no_learner_has(
    made: Callable[..., StreamingFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: priorities.append(priority))
    streaming_feed._copy_stream.cache_clear()
    for _ in range(2):
        made(Items(), 0, device="cuda:0")
    streaming_feed._copy_stream.cache_clear()
    assert priorities == [-1]
