"""The estimate experiment's ways to search, and recommended pairs of batch size and workers beside all pairs."""

from __future__ import annotations

import json

import pytest

from crossbow_py.core.host import Host
from crossbow_py.engine.sizing.workers import Loading, recommend
from experiments.estimate import time_search

GIB = 2**30
CORES, BATCHES_A_WORKER = 16, 3  # two made ahead or in hand, one being copied


def best_pair(loading: Loading, largest_batch: int, usable_bytes: int) -> tuple[int, int]:
    """The largest B and, for it, the fewest workers W of all pairs that keep up: t_fetch ≤ t_step · W, and fit."""
    assert loading.fetch_s is not None and loading.step_s is not None
    pairs = [(b, -w) for w in range(1, CORES + 1) for b in range(1, largest_batch + 1)
             if loading.fetch_s <= loading.step_s * w * (1 + 1e-9)
             and w * BATCHES_A_WORKER * b * loading.sample_bytes <= usable_bytes]  # fmt: skip
    batch_size, workers = max(pairs)
    return batch_size, -workers


@pytest.mark.parametrize("memory_gib", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("sample_bytes", "fetch_s", "step_s"),
    [(3 * 224 * 224, 0.008, 0.002), (3 * 224 * 224, 0.008, 0.0035), (3 * 224 * 224, 0.008, 0.009),
     (3 * 224 * 224, 0.008, 0.0006), (3 * 16 * 112 * 112, 0.1, 0.008), (3 * 32 * 32, 0.0002, 0.0005)],
)  # fmt: skip
def test_recommended_pair_is_the_best_of_all(
    sample_bytes: int, fetch_s: float, step_s: float, memory_gib: int
) -> None:
    loading = Loading(sample_bytes, fetch_s=fetch_s, step_s=step_s, through_shared=True)
    found = recommend(700, loading, Host(CORES, memory_gib * GIB, shared_bytes=None))
    assert (found.batch_size, found.num_workers) == best_pair(loading, 700, memory_gib * GIB // 2)


@pytest.mark.slow
def test_both_ways_to_search_find_the_same_batch_size() -> None:
    asked = {"model": "vgg16", "num_learners": 1, "limit_bytes": GIB}
    estimate, doubling = (time_search.main(json.dumps(asked | {"way": way})) for way in ("estimate", "doubling"))
    assert doubling["batch_size"] - 1 <= estimate["batch_size"] <= doubling["batch_size"]
    assert (estimate["tries"], doubling["tries"] > 8) == (2, True)
