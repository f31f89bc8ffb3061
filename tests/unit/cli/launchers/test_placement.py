"""The share of a cluster that each job gets, by hand-worked numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from crossbow_py.cli.launchers.placement import Machine, RayLauncher, Share, share_of
from crossbow_py.core.errors import UserError


def shared(machines: Sequence[tuple[float, float]], devices: Sequence[str] = ("auto",), **settings: int) -> Share:
    return share_of([Machine(*each) for each in machines], RayLauncher(**settings), devices)


@pytest.mark.parametrize(
    ("machines", "settings", "share"),
    [
        ([(64, 8)], {}, Share(8, 1, 8)),  # a worker a GPU, each with its eighth of the cores
        ([(64, 8), (32, 8)], {}, Share(4, 1, 16)),  # as many cores as the poorest GPU has
        ([(64, 8), (16, 0)], {}, Share(8, 1, 8)),  # a machine without a GPU has none of these jobs
        ([(4, 8)], {}, Share(0, 1, 8)),
        ([(64, 8)], {"cpus_per_worker": 16}, Share(16, 1, 4)),  # then cores are what is short
        ([(64, 8)], {"num_workers": 3}, Share(8, 1, 8)),
        ([(16, 0)], {}, Share(16, 0, 1)),  # one worker with packs is better than two that compete
        ([(16, 0), (0, 0), (8, 0)], {}, Share(8, 0, 3)),
        ([(16, 0)], {"num_workers": 3}, Share(5, 0, 3)),
        ([(16, 0), (8, 0)], {"num_workers": 3}, Share(8, 0, 3)),
        ([(16, 0), (8, 0)], {"cpus_per_worker": 3}, Share(3, 0, 7)),
    ],
)
def test_share_is_a_gpu_and_cores_or_cores(
    machines: list[tuple[float, float]], settings: dict[str, int], share: Share
) -> None:
    assert shared(machines, **settings) == share


@pytest.mark.parametrize(
    ("machines", "devices", "settings", "said"),
    [
        ([(16, 0)], ["cuda"], {}, "device=cuda needs a GPU, and the Ray cluster has none"),
        ([(0, 0)], ["auto"], {}, "no machine of the Ray cluster has a core for jobs"),
        ([], ["auto"], {}, "no machine of the Ray cluster has a core for jobs"),
        ([(4, 0), (6, 0)], ["auto"], {"cpus_per_worker": 8}, "must be at most 6, as the largest machine in"),
        ([(4, 1), (64, 0)], ["auto"], {"cpus_per_worker": 8}, "at most 4, as the largest machine with a GPU"),
        ([(2, 0)], ["auto"], {"num_workers": 5}, "num_workers must be at most 2, .* 1 core of .* 5; lower it.$"),
        ([(8, 2)], ["auto"], {"num_workers": 3}, "must be at most 2, as each takes a GPU and 4 cores of"),
        ([(8, 0)], ["auto"], {"num_workers": 3, "cpus_per_worker": 4}, "most 2.* lower it, or launcher.cpus_per"),
    ],
)
def test_jobs_that_would_never_have_a_place_are_refused(
    machines: list[tuple[float, float]], devices: list[str], settings: dict[str, int], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        shared(machines, devices, **settings)
