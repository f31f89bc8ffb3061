"""Settings that do not fit the ranks are refused; `test_trainer` has those that do not fit each other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.nn.functional import cross_entropy

from crossbow_py import SGD, SMA, Independent, Muon, UserError
from crossbow_py.averaging import Crossbow, Elastic, GroupedSMA, LocalSGD, SynchronousSGD
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.schedules import Constant
from crossbow_py.train.checks.compatibility import check_compatible
from crossbow_py.train.run_settings import RunSettings
from tests.thread_ranks import ThreadRanks, on_threads
from tests.trainers import make_trainer


def check(ranks: Ranks = ALONE, num_learners: int = 2, node_period: int = 1) -> None:
    settings, averaging = RunSettings(num_learners=num_learners), SMA(node_period=node_period)
    check_compatible(settings, SGD(), Constant(), averaging, cross_entropy, None, ranks)


@pytest.mark.parametrize(
    ("averaging", "num_learners", "refused"),
    [
        (SMA(), 2, True), (SMA(), "auto", True), (Crossbow(), 2, True), (Elastic(), 2, True),
        (GroupedSMA(group_size=2), 4, True), (SMA(), 1, False), (SynchronousSGD(), 4, False), (LocalSGD(), 4, False),
        (Independent(), 4, False),
    ],
)  # fmt: skip
def test_norm_that_a_pull_would_undo_is_refused(averaging, num_learners, refused):
    given = RunSettings(num_learners=num_learners), Muon(normalize_weights=True), Constant(), averaging, cross_entropy
    with pytest.raises(UserError, match="set averaging=synchronous_sgd") if refused else nullcontext():
        check_compatible(*given, None, ALONE)


def in_nodes(ranks: ThreadRanks, num_local: list[int], num_learners: int) -> None:
    ranks.num_local, ranks.num_nodes = num_local[ranks.rank], 2
    check(ranks, num_learners, node_period=4)


@pytest.mark.parametrize(
    ("num_local", "num_learners", "refused"),
    [([2, 2, 1], 1, True), ([1, 1], 1, True), ([2, 2, 1], 2, False), ([2, 2, 2, 2], 1, False)],
)
def test_node_with_one_learner_of_its_own_is_refused_on_all_ranks_wherever_it_is(num_local, num_learners, refused):
    found = on_threads(in_nodes, len(num_local), num_local, num_learners)
    if refused:
        assert all("needs two learners in each, got one" in str(each) for each in found)
    else:
        assert found == [None] * len(num_local)


def test_trainer_of_one_rank_where_torchrun_has_started_several_is_warned_of(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="each of them trains a model of its own") as warned:
        make_trainer()
    assert [Path(each.filename).name for each in warned] == ["trainers.py"]  # the line that makes the trainer
    on_threads(check, 2)  # with ranks of theirs nothing is said
    monkeypatch.setenv("WORLD_SIZE", "1")
    check()
