"""Which rounds are shown: usual ones."""

from __future__ import annotations

from crossbow_py.report.reading import Span
from crossbow_py.report.timeline_strip import typical_rounds


def rounds(*lengths: float, first: int = 0) -> list[Span]:
    """One stream, rounds one behind the other."""
    spans, begin = [], 0.0
    for index, length in enumerate(lengths, start=first):
        spans.append(Span("learning", "learner 0", begin, begin + length, index))
        begin += length
    return spans


def test_typical_rounds_are_those_of_the_median_length() -> None:
    # By threes: 120, 30, 30, 30, 70, ... from each first round on: the first of those with the median is round 1.
    strip = typical_rounds(rounds(100, 10, 10, 10, 10, 50, 10, 10, 10, 10))
    assert strip is not None
    assert (strip.first_round, strip.start_us, len(strip.spans)) == (1, 100.0, 3)


def test_typical_rounds_of_a_short_trace_are_what_there_is() -> None:
    strip = typical_rounds(rounds(5, 6, first=7))
    assert strip is not None
    assert (strip.first_round, len(strip.spans)) == (7, 2)
    assert typical_rounds([]) is None
    assert typical_rounds([Span("evaluation", "host", 0, 1, None)]) is None


def test_streams_stand_in_their_order_with_averaging_last() -> None:
    spans = [
        Span("averaging", "averaging", 2, 3, 0), Span("learning", "learner 10", 0, 1, 0),
        Span("learning", "learner 2", 0, 1, 0),
    ]  # fmt: skip
    strip = typical_rounds(spans)
    assert strip is not None
    assert strip.streams == ("learner 2", "learner 10", "averaging")
