"""What measuring packs may cost: a share of what the search takes, for all kinds of trials together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD
from crossbow_py.data.build import make_feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.packs import trial_registry as module
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.trial_registry import TrialData, TrialRegistry
from crossbow_py.packs.width import BUDGET_S, Width
from crossbow_py.schedules import Constant
from crossbow_py.search.space import Space
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.calibration import Effort
from tests.trainers import blobs

SPACE = Space.from_mapping({"model.width": [1, 2, 3]})


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """What each kind may cost; measuring one takes 0.75 s and finds 100 images/s."""
    asked: list[Effort] = []
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def measured(*args: Any) -> tuple[Width, list[str]]:
        asked.append(args[-1])
        clock.now += 0.75
        return Width(1, {("serial", 1): 100.0}, "one at a time"), []

    monkeypatch.setattr(module, "measured_width", measured)
    return asked


def new_registry(total_samples: int | None) -> TrialRegistry:
    feed = make_feed(blobs(40), 1, 0)
    assert isinstance(feed, ResidentFeed)
    data = TrialData(feed.with_batch_size, 40, make_feed(blobs(30), 1), None, (3, True))

    def trial(number: int, params: Any) -> TrialSettings:
        width = params["model.width"]

        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))

        return TrialSettings(number, model, f"{width}", 4, SGD(), Constant())

    choices = Choices(torch.device("cpu"), FP32, "auto")
    return TrialRegistry(trial, data, RunSettings(device="cpu"), choices, 8, lambda _: None, total_samples)


def describe_all(registry: TrialRegistry) -> None:
    for trial, width in enumerate((1, 2, 3, 1)):
        assert not isinstance(registry.of(trial, {"model.width": width}), str)


def test_kinds_share_a_quarter_of_the_time_of_the_search(efforts: list[Effort]) -> None:
    describe_all(new_registry(400))  # a second
    assert [(each.budget_s, each.spent_s) for each in efforts] == [(BUDGET_S, 0.0), (BUDGET_S, 0.75), (0.0, 1.5)]
    assert {each.total_samples for each in efforts} == {400}
    assert {each.share for each in efforts} == {0.25}


@pytest.mark.slow
def test_time_of_measuring_that_ran_out_of_memory_counts(
    efforts: list[Effort], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = module.measured_width

    def short(*args: Any) -> Any:
        found = measured(*args)
        if len(efforts) == 1:
            raise MemoryError
        return found

    monkeypatch.setattr(module, "measured_width", short)
    registry = new_registry(10_000_000)
    registry.make_room = lambda: True
    assert not isinstance(registry.of(0, {"model.width": 1}), str)
    assert [each.spent_s for each in efforts] == [0.0, 0.75]


def test_packs_are_measured_beside_other_workers_of_the_search_as_a_part_of_it(efforts: list[Effort]) -> None:
    registry = new_registry(10_000_000)
    registry.of(0, {"model.width": 1})
    registry.is_alone = False
    registry.of(1, {"model.width": 2})
    assert [each.is_alone for each in efforts] == [True, False]


def test_kinds_of_a_long_search_are_all_measured(efforts: list[Effort]) -> None:
    describe_all(new_registry(10_000_000))
    assert [each.budget_s for each in efforts] == [BUDGET_S] * 3
