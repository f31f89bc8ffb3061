"""The auto-tuner's experiment: its tables and picture from a made-up course, and a short one for real."""

from __future__ import annotations

from typing import Any

from experiments.auto_tuner import run


def course() -> dict[str, Any]:
    """Ten seconds at 400 images/s with 2 learners, ten at 100 with 1, ten at 400 with 2."""
    states = [(400.0, 2), (100.0, 1), (400.0, 2)]
    return {
        "neighbour": {"begins_s": 10.0, "ends_s": 20.0, "priority": -20},
        "throughput": [[second, *states[(second - 1) // 10]] for second in range(1, 31)],
        "decisions": [
            {"action": "shrink", "num_learners": 1, "reason": "2 → 1.", "samples_seen": 1, "elapsed_s": 12.0},
            {"action": "grow", "num_learners": 2, "reason": "1 → 2.", "samples_seen": 2, "elapsed_s": 23.0},
        ],
    }


def test_phases_give_the_learners_and_the_throughput_at_the_end_of_each() -> None:
    table = run.phases_table(course()).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]] == [
        ["before the neighbour", "10", "0", "2", "400"],
        ["with the neighbour", "10", "1", "1", "100"],
        ["after the neighbour", "10", "1", "2", "400"],
    ]
    assert run.decisions_list(course()) == "- 12.0 s: 2 → 1.\n- 23.0 s: 1 → 2."
