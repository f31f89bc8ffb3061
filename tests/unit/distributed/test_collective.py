"""The all-reduce over devices, with gloo processes."""

from __future__ import annotations

import contextlib

import torch

from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.watch import Watch
from tests import rank_jobs
from tests.ranks import on_ranks


def test_collective_on_one_device_leaves_the_sum_alone():
    values, collective = torch.tensor([1.0, 2.0]), Collective()
    collective.all_reduce_sum(values)
    collective.mean_over_nodes(values)
    with collective.awaiting():
        assert values.tolist() == [1.0, 2.0]
    assert collective.is_alone


def test_collective_over_two_ranks_sums_alike_on_both():
    expected = (2, False, False, [3.0, 30.0], [3.0, 30.0], 1)
    assert on_ranks(rank_jobs.sums_of_collective, 2, False) == [expected] * 2


def test_collective_that_keeps_two_nodes_apart_sums_in_each_and_means_over_both():
    # Ranks have 1, 2 | 3, 4: sums of 3 | 7, and over nodes 5 in the mean.
    found = on_ranks(rank_jobs.sums_of_collective, 4, True, num_nodes=2)
    assert found[0] == found[1] == (2, True, False, [3.0, 30.0], [5.0, 50.0], 1)
    assert found[2] == found[3] == (2, True, False, [7.0, 70.0], [5.0, 50.0], 1)


def test_collective_of_one_rank_a_node_is_not_alone():
    found = on_ranks(rank_jobs.sums_of_collective, 2, True, num_nodes=2)
    assert found == [
        (1, True, False, [1.0, 10.0], [1.5, 15.0], 1),
        (1, True, False, [2.0, 20.0], [1.5, 15.0], 1),
    ]


class Counting(Watch):
    """Counts who waits now, and for a device."""

    waits = on_device = 0

    @contextlib.contextmanager
    def waiting(self, on_device=False):
        self.waits += 1
        self.on_device += on_device
        yield
        self.waits -= 1
