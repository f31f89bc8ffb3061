"""Searches of tiny models with a storage in a folder, for tests of one worker's loop, and what they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD
from crossbow_py.core.errors import UserError
from crossbow_py.data.build import make_feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.packs.policies import Policy
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.trial_registry import TrialData, TrialRegistry
from crossbow_py.schedules import Constant
from crossbow_py.search.hyperband import Segment, best, make_brackets
from crossbow_py.search.loop import SearchHooks, SearchLoop, SearchRules
from crossbow_py.search.space import Space
from crossbow_py.search.study.states import TrialStates
from crossbow_py.search.study.study import SharedStudy
from crossbow_py.train.run_settings import Choices, RunSettings
from tests.trainers import blobs

SPACE = Space.from_mapping({"optimizer.learning_rate": {"low": 1e-4, "high": 1.0, "log": True}, "batch_size": [4, 8]})
ONE_SIZE = Space.from_mapping({"optimizer.learning_rate": {"low": 1e-4, "high": 1.0, "log": True}})
CHOICES = Choices(torch.device("cpu"), FP32, "serial")


@dataclass
class Setting:
    """What a search of tiny models needs; every call of `search` is a new worker process, so to say."""

    folder: Path
    space: Space = SPACE
    method: str = "successive_halving"
    num_trials: int = 9
    policy: Policy = "signature"
    width: int = 4
    checkpoint_every_s: float | None = None
    streams: bool = False
    make: Callable[[int], Callable[[], nn.Module]] = lambda trial: partial(nn.Linear, 4, 3)
    rates: Mapping[int, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    finished: list[Segment] = field(default_factory=list)

    def rules(self) -> SearchRules:
        brackets = make_brackets(self.method, num_trials=self.num_trials, min_epochs=1, max_epochs=9, eta=3)
        return SearchRules(brackets, "accuracy", self.policy, 0, self.width, self.checkpoint_every_s)

    def study(self, worker: str = "worker") -> SharedStudy:
        self.folder.parent.mkdir(exist_ok=True)
        study = SharedStudy(
            f"journal:{self.folder.parent / 'search.journal'}", "tiny", sampler="random", space=self.space, seed=1,
            maximize=True, worker=worker, lease_s=30,
        )  # fmt: skip
        study.open({"tiny": 1})
        return study

    def registry(self, told: Callable[[str], None]) -> TrialRegistry:
        feed = make_feed(blobs(40), 1, 0)
        assert isinstance(feed, ResidentFeed)
        validation, test = make_feed(blobs(30), 1), make_feed(blobs(21), 1)
        data = TrialData(feed.with_batch_size, 40, validation, test, (3, True), self.streams)
        return TrialRegistry(self.trial, data, RunSettings(device="cpu"), CHOICES, self.width, told)

    def trial(self, trial: int, params: Mapping[str, Any]) -> TrialSettings:
        rate = self.rates.get(trial, params["optimizer.learning_rate"])
        if rate < 0:
            raise UserError("a learning rate below 0 goes uphill")
        model = self.make(trial)
        batch = params.get("batch_size", 4)
        return TrialSettings(trial, model, repr(model), batch, SGD(learning_rate=rate, momentum=0.5), Constant())

    def search(self, study: SharedStudy | None = None) -> SearchLoop:
        noted = lambda _, segment: self.finished.append(segment)  # noqa: E731
        hooks = SearchHooks(message=self.messages.append, finished=noted, sleep=lambda _: None)
        registry = self.registry(self.messages.append)
        return SearchLoop(self.rules(), study or self.study(), registry, TrialStates(self.folder), hooks)

    def best(self) -> int | None:
        return best(self.rules().brackets, self.study().results(), maximize=True)


def never() -> bool:
    return False


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., Any]) -> None:
    """Have `look` see the arguments of every call before it is made; what it raises is raised instead."""
    inner = getattr(owner, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        look(*args)
        return inner(*args, **kwargs)

    patch.setattr(owner, name, seen)


def finished(folder: Path, **own: Any) -> Setting:
    """A search that was run to its end by one worker."""
    setting = Setting(folder / "trials", **own)
    assert setting.search().run(never)
    return setting


def let_leases_end(search: SearchLoop) -> None:
    """What the end of a process does; this one lives on."""
    search.study.close()
    for segment in search.study.held:
        search.study.release(segment)


def one_round(packs: Any, *args: Any, **kwargs: Any) -> dict[int, Exception]:
    assert packs, "there is something to train"
    for pack in packs:
        pack.step()
        pack.drain()
    return {}


LOST = "CUDA error: device-side assert triggered"


def lost(*_: Any, **__: Any) -> Any:
    raise RuntimeError(LOST)


def values_of(setting: Setting) -> dict[Segment, Any]:
    return {each: (result.value, result.attrs) for each, result in setting.study().segment_results().items()}
