"""Grids of parameters of which `make test` takes a few, CI those that hold each pair of values, and the rest all."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Any], quick: Collection[int], slow: Collection[int] = ()) -> list[Any]:
    """The cases, each a tuple or one value; those at `slow` are marked slow, those at neither also long."""
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert {*quick, *slow} <= set(range(len(every)))
    marks = {True: [pytest.mark.slow], False: [pytest.mark.slow, pytest.mark.long]}
    return [
        pytest.param(*case, marks=[] if place in quick else marks[place in slow]) for place, case in enumerate(every)
    ]


def pairs(*values: Sequence[Any], quick: int = 2) -> list[Any]:
    """All combinations: `quick` of them are quick, those that complete the pairs of values slow, the rest long too."""
    every = list(itertools.product(*(range(len(own)) for own in values)))

    def news(place: int) -> tuple[int, int]:
        seen = [set(each) for each in zip(*(every[each] for each in chosen), strict=True)]
        new_values = sum(value not in own for own, value in zip(seen, every[place], strict=False))
        return len(_pairs_of(every[place]) & missing), new_values

    missing, chosen = set[tuple[int, int, int, int]]().union(*map(_pairs_of, every)), list[int]()
    while missing:
        chosen.append(max(range(len(every)), key=news))
        missing -= _pairs_of(every[chosen[-1]])
    return thinned(itertools.product(*values), chosen[:quick], chosen)


def _pairs_of(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, j, case[i], case[j]) for i, j in itertools.combinations(range(len(case)), 2)}
