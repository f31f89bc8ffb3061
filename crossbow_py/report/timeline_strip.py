"""Which few rounds of a timeline to show: three in a row, as long as rounds usually take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from crossbow_py.report.reading import Span
from crossbow_py.telemetry.timeline import ordered_rows

ROUNDS_SHOWN = 3
MOST_STREAMS = 64  # more rows than that nobody reads, nor tasks of more names


@dataclass(frozen=True)
class Strip:
    """Spans of rounds in a row; `streams` from top to bottom, `first_round` the first of them, `start_us` its begin."""

    spans: tuple[Span, ...]
    streams: tuple[str, ...]
    first_round: int
    start_us: float


def typical_rounds(spans: Sequence[Span]) -> Strip | None:
    """The strip in whose rounds begin at the most usual distance, so that no evaluation or first round is shown.

    None where no span has a round.
    """
    starts: dict[int, float] = {}
    for span in spans:
        if span.round_index is not None:
            starts[span.round_index] = min(span.start_us, starts.get(span.round_index, span.start_us))
    if not starts:
        return None
    count = min(ROUNDS_SHOWN, len(starts))
    firsts = [index for index in starts if all(index + later in starts for later in range(count))] or [min(starts)]
    lengths = {index: _length(starts, index, count) for index in firsts}
    usual = statistics.median(lengths.values())
    first = min(firsts, key=lambda index: (abs(lengths[index] - usual), index))
    shown = [each for each in spans if each.round_index in range(first, first + count)]
    streams = tuple(ordered_rows(each.stream for each in shown)[:MOST_STREAMS])
    tasks = list(dict.fromkeys(each.task for each in shown))[:MOST_STREAMS]
    kept = tuple(each for each in shown if each.stream in streams and each.task in tasks)
    return Strip(kept, streams, first, starts[first])


def _length(starts: dict[int, float], first: int, count: int) -> float:
    """From the first round's begin to that of the round behind the last; of the last itself where there is none."""
    end = starts.get(first + count, starts.get(first + count - 1, starts[first]))
    return end - starts[first]
