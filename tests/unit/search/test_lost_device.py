"""A worker's loop on a device that is lost: the search ends and says so, and no trial has failed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from crossbow_py.core.errors import DataError, DeviceLostError, UserError
from crossbow_py.packs import slots, trial_registry
from crossbow_py.packs.pack import Pack
from crossbow_py.search import loop as search_module
from crossbow_py.train.evaluation import evaluator
from crossbow_py.train.evaluation.evaluator import Evaluator
from tests.unit.search.study.shared_studies import why_failed
from tests.unit.search.tiny_search import LOST, ONE_SIZE, Setting, lost, never, one_round, watch


def lost_in_a_loss(*_: Any, **__: Any) -> Any:
    raise UserError("the model cannot take the training data") from RuntimeError(LOST)


def short(*_: Any) -> Any:
    raise MemoryError


def lost_samples(*_: Any, **__: Any) -> Any:
    raise DataError("samples cannot be made") from RuntimeError(LOST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "raises"),
    [
        (trial_registry, "probe", lost_in_a_loss),
        (trial_registry, "measured_width", lost),
        (Pack, "assign", lost),
        (Pack, "step", lost),
        (Pack, "step", lost_samples),
        (Pack, "drain", lost),
        (Pack, "evaluate", lost),
        (Pack, "checkpoint", lost),
        (Pack, "evaluate", lost_samples),
        (trial_registry, "Evaluator", lost),
    ],
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_ends_the_search_and_fails_no_trial(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, raises: Callable[..., Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, raises)
        with pytest.raises(DeviceLostError, match="device-side assert"):
            setting.search().run(never)
    assert setting.study().results() == {}
    assert setting.search().run(never)


@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_when_a_stop_keeps_segments_says_so(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "advance", one_round)
    monkeypatch.setattr(Pack, "checkpoint", lost)
    search = setting.search()
    with pytest.raises(DeviceLostError, match="device-side assert"):
        search.run(lambda: search.spent.samples > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name"), [(slots, "free_memory"), (slots, "evaluate_in_memory"), (evaluator, "free_memory")]
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_while_packs_make_room_for_evaluation_ends_the_search(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "evaluate", short)
        patched.setattr(owner, name, lost)
        with pytest.raises(DeviceLostError, match="device-side assert"):
            setting.search().run(never)
    assert setting.study().results() == {}


@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_as_a_pack_has_failed_ends_the_search(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pack, "step", short)
    monkeypatch.setattr(search_module, "free_memory", lost)
    with pytest.raises(DeviceLostError, match="device-side assert"):
        setting.search().run(never)


@pytest.mark.slow
def test_trial_on_a_cpu_whose_model_says_what_cuda_says_fails_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE

    def fail(pack: Pack) -> None:
        if any(member.trial == 1 for member in pack.members):
            raise RuntimeError("misaligned address")

    watch(monkeypatch, Pack, "step", fail)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {1: "RuntimeError: misaligned address"}
