"""The fastest of several calls, on a clock of the test's own."""

from __future__ import annotations

import itertools

from crossbow_py.predict.timing import fastest


def test_fastest_takes_the_least_median_and_leaves_the_first_call_out():
    now, costs = [0.0], {"a": itertools.chain([0.1], itertools.repeat(2.0)), "b": itertools.repeat(1.0)}
    costs["c"] = itertools.chain([0.0], itertools.cycle([0.1, 3.0, 3.0]))

    def run(name):
        now[0] += next(costs[name])

    assert fastest({name: lambda name=name: run(name) for name in costs}, clock=lambda: now[0]) == "b"
