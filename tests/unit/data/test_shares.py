"""What a rank's feed gives and makes: its own batches, and of an evaluation its own share."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.streaming.streamed_data import Key, Loaded
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from tests.unit.data.streams import Images, N, closed, counted_out, same, until

SEED, B = 5, 2
EPOCHS = 30


class Noted(Images):
    """How often a sample was made in an epoch is noted where all processes see it."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        super().__init__(bad, max_bad=N)
        self.made = torch.zeros(EPOCHS, N, dtype=torch.int64).share_memory_()

    def fetch(self, keys: Sequence[Key], **options: Any) -> Loaded:
        for key in keys:
            self.made[key.epoch, key.sample] += 1
        return super().fetch(keys, **options)

    def made_in_training(self) -> list[int]:
        """Stream positions that were made, one as often as it was."""
        orders = [epoch_order(SEED, epoch, N) for epoch in range(EPOCHS)]
        return [e * N + p for e in range(EPOCHS) for p in range(N) for _ in range(int(self.made[e, orders[e][p]]))]


@pytest.fixture
def feed_of() -> Iterator[Callable[..., StreamingFeed]]:
    feeds: list[Feed] = []

    def make(data: Any, workers: int = 0, num_ranks: int = 1) -> StreamingFeed:
        feed = make_feed(data, B, SEED, augmentation=Augmentation(flip=True), num_workers=workers, num_ranks=num_ranks)
        feeds.append(feed)
        assert isinstance(feed, StreamingFeed)
        return feed

    yield make
    closed(feeds)


def trained(feed: Feed, rounds: Sequence[Sequence[int]]) -> list[Batch]:
    """As the training loop asks: announced, waited for, then taken by one learner after the other."""
    found = []
    for starts in rounds:
        if not feed.announce(starts):
            deadline = time.monotonic() + 20
            feed.wait(starts, until=lambda deadline=deadline: time.monotonic() > deadline)
        assert feed.announce(starts), f"{starts} did not come"
        found += [feed.batch(start) for start in starts]
    return found


def settled(feed: StreamingFeed, num_batches: int) -> int:
    """How many batches were loaded once that many, or more, were and no more come."""
    until(lambda: feed.loading_times.num_batches >= num_batches)
    time.sleep(0.05)
    return feed.loading_times.num_batches


def flat(rounds: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(rounds))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_own"), [(1, 3), (2, 2), (3, 1)])
def test_ranks_take_the_batches_of_one_rank_and_make_no_others(feed_of: Any, num_ranks: int, num_own: int) -> None:
    num_rounds = -(-2 * N // (num_ranks * num_own * B)) + 1  # beyond the end of the second epoch
    alone = feed_of(Noted())
    seen: list[int] = []
    for rank in range(num_ranks):
        data = Noted()
        feed = feed_of(data, workers=1 + rank % 2, num_ranks=num_ranks)
        rounds = counted_out(rank, num_ranks, num_own, B, 0, num_rounds)
        batches = trained(feed, rounds)
        assert same(batches, [alone.batch(start) for start in flat(rounds)])

        num_ahead = max(2, num_own)
        assert settled(feed, len(batches) + num_ahead) == len(batches) + num_ahead
        feed.close()
        later = flat(counted_out(rank, num_ranks, num_own, B, 0, num_rounds + 20))
        own_positions = [p for start in later for p in range(start, start + B)]
        made = Counter(data.made_in_training())
        assert set(made) <= set(own_positions) and set(made.values()) == {1}
        seen += [p for start in flat(rounds) for p in range(start, start + B)]
        for start, batch in zip(flat(rounds), batches, strict=True):
            expected = [int(epoch_order(SEED, p // N, N)[p % N]) for p in range(start, start + B)]
            assert batch.targets.tolist() == expected
    for epoch in range(2):
        samples = [int(epoch_order(SEED, epoch, N)[p % N]) for p in seen if p // N == epoch]
        assert sorted(samples) == list(range(N))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_rank_goes_on_when_its_learners_change_and_the_cursor_jumps(feed_of: Any, workers: int) -> None:
    rank, num_ranks = 1, 2
    rounds: list[list[int]] = []
    for num_own, cursor in [(1, 0), (2, None), (3, None), (1, None), (2, 400), (2, 8)]:
        before = max(rounds[-1]) + B if rounds else 0  # rank 1 is the last of a round
        rounds += counted_out(rank, num_ranks, num_own, B, before if cursor is None else cursor, 3)
    feed, alone = feed_of(Noted(), workers, num_ranks), feed_of(Noted())
    assert same(trained(feed, rounds), [alone.batch(start) for start in flat(rounds)])


def test_rank_whose_learners_stay_keeps_its_processes(feed_of: Any) -> None:
    feed = feed_of(Noted(), workers=1, num_ranks=3)
    rounds = counted_out(2, 3, 2, B, 0, 12)
    trained(feed, rounds[:1])
    producer = feed._producer
    trained(feed, rounds[1:])
    assert feed._producer is producer


BAD = [0, 8, 9, 10, 11, 22]  # a whole batch of 4 among them
PAIR = torch.randint(0, 256, (N, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
FEEDS: dict[str, Callable[[], Feed]] = {
    "resident images": lambda: make_feed((PAIR, torch.arange(N)), B, SEED),
    "resident rows": lambda: make_feed((PAIR.flatten(1) / 255, torch.arange(N)), B, SEED),
    "streamed here": lambda: make_feed(Noted(), B, SEED),
    "streamed by workers": lambda: make_feed(Noted(), B, SEED, num_workers=2),
    "streamed with bad samples": lambda: make_feed(Noted(bad=BAD), B, SEED),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEEDS)
def test_shares_of_an_evaluation_make_up_the_whole_in_its_order(kind: str) -> None:
    for batch_size, step in [(4, 1), (4, 2), (4, 3), (18, 3), (N, 2)]:
        feed = FEEDS[kind]()
        whole = list(feed.evaluation_batches(batch_size))
        shares = [list(feed.evaluation_batches(batch_size, first, step)) for first in range(step)]
        feed.close()
        for first, share in enumerate(shares):
            own = [i for i in range(N) if i // batch_size % step == first and not ("bad" in kind and i in BAD)]
            assert [i for batch in share for i in batch.targets.tolist()] == own
        together = sorted(itertools.chain.from_iterable(shares), key=lambda batch: int(batch.targets[0]))
        assert same(together, whole)


def test_share_of_an_evaluation_is_all_that_workers_make(feed_of: Any) -> None:
    data = Noted()
    batches = list(feed_of(data, workers=2).evaluation_batches(4, 1, 3))
    assert [batch.targets.tolist() for batch in batches] == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert data.made[0].nonzero().flatten().tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_share_without_a_batch_is_empty_and_starts_no_process(feed_of: Any) -> None:
    feed = feed_of(Noted(), workers=2)
    assert list(feed.evaluation_batches(12, 2, 3)) == [] and feed._evaluating is None
    assert list(make_feed((PAIR, torch.arange(N)), B).evaluation_batches(12, 2, 3)) == []


def test_shares_of_a_feed_for_measuring_are_its_one_batch(feed_of: Any) -> None:
    still = feed_of(Noted()).for_measuring()
    assert [len(list(still.evaluation_batches(1, first, 2))) for first in range(2)] == [1, 0]
