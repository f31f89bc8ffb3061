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
    first = found[0]
    for each in found[1:]:
        assert each.z.tobytes() == first.z.tobytes()
        assert each.z_prev.tobytes() == first.z_prev.tobytes()
        assert each.checksum == first.checksum
        assert (each.samples_seen, each.rounds, each.num_learners) == (
            first.samples_seen, first.rounds, first.num_learners,
        )  # fmt: skip
        assert (each.status, each.reason, each.num_reseeded) == (first.status, first.reason, first.num_reseeded)
        assert (each.test_accuracy, each.test_loss, each.epochs) == (
            first.test_accuracy, first.test_loss, first.epochs,
        )  # fmt: skip
