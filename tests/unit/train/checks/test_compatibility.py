"""Settings that do not fit each other are refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, AdamW, Constant, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.train.checks.compatibility import check_compatible
from crossbow_py.train.run_settings import RunSettings
from tests.thread_ranks import ThreadRanks, on_threads

AUTO = RunSettings()


def check(ranks: Ranks = ALONE, settings: RunSettings = AUTO, **changed: Any) -> None:
    given: dict[str, Any] = {
        "optimizer": SGD(), "schedule": Constant(), "averaging": SMA(), "loss": nn.MSELoss(),
        "max_evaluation_batches": None, **changed,
    }  # fmt: skip
    check_compatible(settings, **given, ranks=ranks)


@pytest.mark.parametrize("changed", [{}, {"optimizer": AdamW()}, {"max_evaluation_batches": 1}])
def test_what_goes_together_passes(changed):
    check(**changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optimizer": nn.Linear}, "optimizer must be one of crossbow_py's, such as SGD()"),
        ({"schedule": None}, "schedule must be one of crossbow_py's, such as Constant(), got None"),
        ({"averaging": "sma"}, "averaging must be one of crossbow_py's, such as SMA(), got 'sma'; import one from"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "such as SGD(), got SGD ( Parameter Group 0"),
        ({"loss": 0.5}, "a function (outputs, targets) -> tensor, such as nn.MSELoss(), got 0.5; give one"),
        ({"averaging": Independent()}, "averaging=independent trains num_learners models, got auto"),
        ({"max_evaluation_batches": 0}, "max_evaluation_batches must be at least 1 or None, got 0; None evaluates"),
    ],
)
def test_what_does_not_go_together_is_refused(changed, said):
    with pytest.raises(UserError) as caught:
        check(**changed)
    assert said in str(caught.value)


def test_reseeding_a_learner_that_is_alone_is_refused():
    with pytest.raises(UserError, match=r"averaging=sma with num_learners=1 has none; set on_nonfinite=stop"):
        check(settings=RunSettings(num_learners=1, on_nonfinite="reseed"))


def test_label_smoothing_of_a_loss_other_than_cross_entropy_is_refused():
    with pytest.raises(UserError, match=r"label_smoothing=0\.1 is for cross-entropy, and another loss was given"):
        check(settings=RunSettings(label_smoothing=0.1))


def in_nodes(ranks: ThreadRanks, num_local: list[int], num_learners: int) -> None:
    ranks.num_local, ranks.num_nodes = num_local[ranks.rank], 2
    check(ranks, RunSettings(num_learners=num_learners), averaging=SMA(node_period=4))


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
    with pytest.warns(UserWarning, match="each of them trains a model of its own"):
        check()
    on_threads(check, 2)  # with ranks of theirs nothing is said
    monkeypatch.setenv("WORLD_SIZE", "1")
    check()
