"""What ranks have returned, compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.rank_jobs import Ended, Values
from tests.ranks import Raised, on_ranks


def results(function: Any, num_ranks: int, *arguments: Any, **options: Any) -> list[Any]:
    """What all ranks return, none of which raises."""
    found = on_ranks(function, num_ranks, *arguments, **options)
    failed = [each for each in found if isinstance(each, Raised | int | type(None))]
    assert not failed, failed
    return found


def distance(one: Values, other: Values) -> float:
    """Relative norm; of zeros the norm."""
    return float(np.linalg.norm(one - other) / (np.linalg.norm(other) or 1.0))


def assert_alike(found: list[Ended]) -> None:
    """z to the bit, and all that is said about the run."""
    same = (
        "checksum", "samples_seen", "rounds", "num_learners", "status", "reason", "num_reseeded", "test_accuracy",
        "test_loss", "epochs",
    )  # fmt: skip
    first = found[0]
    for each in found[1:]:
        assert (each.z.tobytes(), each.z_prev.tobytes()) == (first.z.tobytes(), first.z_prev.tobytes())
        assert {name: getattr(each, name) for name in same} == {name: getattr(first, name) for name in same}
