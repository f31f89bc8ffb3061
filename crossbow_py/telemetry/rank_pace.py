"""The pace of every rank: how long it takes for a round by itself, and how long it waits for data and for other ranks.

All ranks take the same time for a round, as they wait for each other. So a round's time without that waiting tells
which rank is slow. Ranks send what they have counted with the reports by which they synchronise.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_CURVES = 16  # ranks or GPUs that have a curve each; of more there are the slowest, the median and the fastest
WORTH_SAYING = 0.05  # from which share on it is said that a rank is slower than the others
_LEAST_OWN = 1e-3  # of an interval: what a rank needs by itself at least, as clocks are not exact


class RankCounts(NamedTuple):
    """The counts of a rank since its training began: its seconds, and those of waits for data and for other ranks."""

    elapsed_s: float
    data_wait_s: float
    rank_wait_s: float


@dataclass(frozen=True)
class RankPace:
    """The pace of a rank over an interval.

    Attributes:
        rank: its index.
        host: the name of its host.
        step_ms: milliseconds that a round takes it by itself, without waiting for other ranks.
        images_per_s: samples of any kind that it would train on at that pace.
        tokens_per_s: that times the tokens of a sample, for language models, else None.
        data_wait_share: the share of time spent waiting for data; None for data that live on the device.
        rank_wait_share: the share of time in which it only waited for other ranks.
    """

    rank: int
    host: str
    step_ms: float
    images_per_s: float
    tokens_per_s: float | None
    data_wait_share: float | None
    rank_wait_share: float


@dataclass(frozen=True)
class RankSpread:
    """The slowest rank, and how far ranks are apart.

    Attributes:
        slowest_rank, slowest_host: which one it is, and where.
        slowest_step_ms, median_step_ms, fastest_step_ms: `RankPace.step_ms` of these.
        spread: by what share the slowest rank takes longer than the median.
        most_data_wait_share: of the rank that waits most for data; None for data that live on the device.
        median_rank_wait_share: the median over ranks.
    """

    slowest_rank: int
    slowest_host: str
    slowest_step_ms: float
    median_step_ms: float
    fastest_step_ms: float
    spread: float
    most_data_wait_share: float | None
    median_rank_wait_share: float


def spread_of(paces: Sequence[RankPace]) -> RankSpread | None:
    """Return the spread of ranks; None if there are fewer than two."""
    if len(paces) < 2:
        return None
    steps = [each.step_ms for each in paces]
    waits = [each.data_wait_share for each in paces if each.data_wait_share is not None]
    slowest, median = max(paces, key=lambda each: each.step_ms), statistics.median(steps)
    return RankSpread(
        slowest_rank=slowest.rank,
        slowest_host=slowest.host,
        slowest_step_ms=slowest.step_ms,
        median_step_ms=median,
        fastest_step_ms=min(steps),
        spread=slowest.step_ms / median - 1,
        most_data_wait_share=max(waits, default=None),
        median_rank_wait_share=statistics.median(each.rank_wait_share for each in paces),
    )


def spread_text(spread: RankSpread) -> str:
    """Return the slowest rank in a few words."""
    return f"slowest rank {spread.slowest_rank} on {spread.slowest_host} (+{spread.spread:.0%})"


def rank_rows(paces: Sequence[RankPace]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table of ranks, the slowest first."""
    waits = any(each.data_wait_share is not None for each in paces)
    tokens = any(each.tokens_per_s is not None for each in paces)
    heads = ["rank", "host", "ms a round", "tokens/s" if tokens else "images/s", "waiting for ranks"]
    rows = []
    for each in sorted(paces, key=lambda each: -each.step_ms):
        rate = each.images_per_s if each.tokens_per_s is None else each.tokens_per_s
        row = [str(each.rank), each.host, f"{each.step_ms:.4g}", f"{rate:,.0f}", f"{each.rank_wait_share:.1%}"]
        rows.append([*row, *([f"{each.data_wait_share or 0.0:.1%}"] if waits else [])])
    return [*heads, *(["waiting for data"] if waits else [])], rows


def rank_table(paces: Sequence[RankPace], most: int = MOST_CURVES) -> str:
    """Return the ranks as a table in Markdown, the slowest first; the slowest of more than `most`."""
    heads, rows = rank_rows(paces)
    lines = [heads, ["---:", "---", *["---:"] * (len(heads) - 2)], *rows[:most]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class _Moment(NamedTuple):
    """Seconds, rounds and samples of all ranks so far, and the counts of each rank, as they were sent."""

    elapsed_s: float
    rounds: int
    samples: int
    ranks: Sequence[Sequence[float]]


class RankMeter:
    """Turns what ranks have counted into paces. Not thread-safe: the training loop owns it.

    Args:
        hosts: the host of every rank.
        tokens_per_sample: tokens of a sample of a language model, else None.
        waits_for_data: whether data have to be waited for.
        window_s: seconds of training that `recent` looks back over, about.
    """

    def __init__(
        self, hosts: Sequence[str], tokens_per_sample: int | None, waits_for_data: bool, window_s: float = 5.0
    ) -> None:
        self._hosts, self._tokens, self._waits_for_data = hosts, tokens_per_sample, waits_for_data
        self._window_s = window_s
        self._moments: deque[_Moment] = deque()
        self._first: _Moment | None = None
        self._lap: _Moment | None = None

    def update(self, counts: Sequence[Sequence[float]], rounds: int, samples: int) -> None:
        """Note every rank's `RankCounts`, after so many rounds, and samples of all ranks.

        Many of them are never looked at, so they stay vectors.
        """
        now_s = counts[0][0]
        moment = _Moment(now_s, rounds, samples, counts)
        self._first, self._lap = self._first or moment, self._lap or moment
        moments = self._moments
        if moments and moments[-1].rounds == rounds:
            moments.pop()
        moments.append(moment)
        while len(moments) > 2 and moments[1].elapsed_s <= now_s - self._window_s:
            moments.popleft()

    @property
    def recent(self) -> tuple[RankPace, ...]:
        """Return the paces over the window, of every rank; empty before there are two synchronisations."""
        return self._between(self._moments[0], self._moments[-1]) if self._moments else ()

    @property
    def whole(self) -> tuple[RankPace, ...]:
        """Return the paces since training began."""
        return self._between(self._first, self._moments[-1]) if self._first else ()

    def lap(self) -> tuple[RankPace, ...]:
        """Return the paces since the last lap, up to the last synchronisation."""
        if self._lap is None:
            return ()
        since, self._lap = self._lap, self._moments[-1]
        return self._between(since, self._lap)

    def _between(self, start: _Moment, end: _Moment) -> tuple[RankPace, ...]:
        rounds, samples = end.rounds - start.rounds, (end.samples - start.samples) / len(self._hosts)
        ranks = [(RankCounts(*then), RankCounts(*now)) for then, now in zip(start.ranks, end.ranks, strict=True)]
        spans = [(then, now, now.elapsed_s - then.elapsed_s) for then, now in ranks]
        if rounds <= 0 or any(seconds <= 0 for *_, seconds in spans):
            return ()
        paces = []
        for rank, (then, now, seconds) in enumerate(spans):
            waited_s = now.rank_wait_s - then.rank_wait_s
            own_s = max(seconds - waited_s, _LEAST_OWN * seconds)
            rate = samples / own_s
            paces.append(
                RankPace(
                    rank=rank,
                    host=self._hosts[rank],
                    step_ms=own_s * 1000 / rounds,
                    images_per_s=rate,
                    tokens_per_s=None if self._tokens is None else rate * self._tokens,
                    data_wait_share=(now.data_wait_s - then.data_wait_s) / seconds if self._waits_for_data else None,
                    rank_wait_share=min(1.0, waited_s / seconds),
                )
            )
        return tuple(paces)
