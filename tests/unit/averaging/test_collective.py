"""The all-reduce over devices, with two gloo processes."""

from __future__ import annotations

import torch
import torch.distributed
import torch.multiprocessing

from crossbow_py.averaging.collective import Collective, ProcessGroupCollective


def test_collective_on_one_device_leaves_the_sum_alone():
    values = torch.tensor([1.0, 2.0])
    Collective().all_reduce_sum(values)
    assert values.tolist() == [1.0, 2.0]


def _rank(rank: int, store: str, out: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    collective = ProcessGroupCollective()
    values = torch.tensor([1.0, 10.0]) * (rank + 1)
    collective.all_reduce_sum(values)
    torch.save((collective.num_devices, values), f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def test_collective_over_two_ranks_sums_alike_on_both(tmp_path):
    out = str(tmp_path / "out")
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path / "store"), out), nprocs=2)
    for rank in range(2):
        num_devices, values = torch.load(f"{out}.{rank}")
        assert (num_devices, values.tolist()) == (2, [3.0, 30.0])
