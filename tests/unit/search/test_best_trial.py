"""What a worker leaves of the best trial: its measurement on the test data, model and configuration."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.core.errors import DeviceLostError, UserError
from crossbow_py.core.files import locked
from crossbow_py.packs import trial_registry
from crossbow_py.packs.slots import Slot
from crossbow_py.search import outcome
from crossbow_py.search.events import BestTrial
from crossbow_py.search.hyperband import Segment
from crossbow_py.search.outcome import Leader, LeaderRun, find_leader, kept_best, lock_of
from crossbow_py.search.study.states import TrialStates
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator
from tests.thinned import thinned
from tests.unit.search.tiny_search import Setting, lost, never


def test_best_trial_is_measured_on_the_test_data_and_written(setting: Setting, tmp_path: Path) -> None:
    search = setting.search()
    assert search.run(never)
    best_folder = tmp_path / "best"

    def run_of(leader: Leader) -> LeaderRun:
        assert leader.is_at_end
        return LeaderRun(setting.trial(leader.trial, leader.params), "train it", "seed: 1\n")

    find = partial(find_leader, setting.rules(), setting.study())
    found, _ = kept_best(find, run_of, search.registry, search.states, best_folder)
    assert found is not None
    assert (found.trial, found.epochs, found.seed) == (setting.best(), 9, setting.best())
    assert found.command == "train it" and found.params.keys() == {"batch_size", "optimizer.learning_rate"}
    assert found.value == max(value for value in setting.study().results().values() if value is not None)
    assert found.test_accuracy is not None and math.isfinite(found.test_accuracy)
    assert found.model_path == str(best_folder / "model.safetensors") and Path(found.model_path).exists()
    assert (best_folder / "config.yaml").read_text() == "seed: 1\n"
    left = sorted(path.parent.name for path in setting.folder.glob("*/*.pt"))
    assert left == [f"{found.trial:05}"]  # the files of the others are gone


def test_best_trial_of_a_search_without_any_value_is_nobody(setting: Setting, tmp_path: Path) -> None:
    def run_of(_: Leader) -> LeaderRun:
        raise AssertionError("there is nothing to train")

    search = setting.search()
    assert kept_best(lambda: None, run_of, search.registry, search.states, tmp_path / "best") == (None, 0.0)
    assert not (tmp_path / "best").exists()
    search.close()


Keep = Callable[..., tuple[BestTrial, float]]


@pytest.fixture
def kept(setting: Setting, tmp_path: Path) -> Keep:
    """`kept_best` of a finished search, with a configuration, into `best`, where that of another trial is."""
    search = setting.search()
    assert search.run(never)
    leader = find_leader(setting.rules(), setting.study())
    assert leader is not None
    first = leader
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.yaml").write_text("seed: 0\n")
    (tmp_path / "best/model.safetensors").write_text("of another trial")

    def keep(
        config: str, states: TrialStates = search.states, find: Callable[[], Leader] = lambda: first
    ) -> tuple[BestTrial, float]:
        def run_of(leader: Leader) -> LeaderRun:
            return LeaderRun(setting.trial(leader.trial, leader.params), "train it", config.format(leader.value))

        found, seconds = kept_best(find, run_of, search.registry, states, tmp_path / "best")
        assert found is not None
        return found, seconds

    return keep


def test_best_trial_whose_files_are_elsewhere_leaves_no_model_of_another(kept: Keep, tmp_path: Path) -> None:
    elsewhere = TrialStates(tmp_path / "elsewhere")
    found, seconds = kept("seed: 1\n", elsewhere)
    assert (found.model_path, found.test_accuracy, seconds) == (None, None, 0)
    assert not list((tmp_path / "best").glob("[!.]*"))
    assert kept("seed: 1\n")[0].model_path == str(tmp_path / "best/model.safetensors")
    assert kept("seed: 1\n", elsewhere)[0].model_path == str(tmp_path / "best/model.safetensors")  # it is this trial's


def test_best_trial_whose_model_cannot_be_written_leaves_no_model_of_another(
    kept: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(outcome, "save_weights", full)
        with pytest.raises(UserError, match=r"cannot write to .*best \(.*No space left.*\); make room there"):
            kept("seed: 1\n")
    assert list((tmp_path / "best").iterdir()) == []  # nor a configuration, which would say that there is a model
    (tmp_path / "best/config.yaml").write_text("seed: 1\n")  # of an earlier version, without its model
    kept("seed: 1\n", TrialStates(tmp_path / "elsewhere"))
    assert list((tmp_path / "best").iterdir()) == []


@pytest.mark.slow
def test_best_trial_is_the_one_that_is_known_once_no_other_worker_writes(kept: Keep, tmp_path: Path) -> None:
    leader = Leader(0, Segment(0, 0), 1.0, 0.25, {"optimizer.learning_rate": 0.1}, False)
    known, found = [leader], []
    with locked(lock_of(tmp_path / "best"), lambda: None):
        other = threading.Thread(target=lambda: found.append(kept("value: {}\n", find=lambda: known[-1])))
        other.start()
        other.join(0.2)
        known.append(replace(leader, value=0.5))
    other.join(10)
    assert found[0][0].value == 0.5


@pytest.mark.parametrize(
    ("owner", "name"),
    thinned(
        [(trial_registry, "Evaluator"), (Evaluator, "module"), (Evaluator, "evaluate"), (outcome, "save_weights")],
        quick=[2],
        slow=[0, 1, 3],
    ),
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_while_the_best_trial_is_tested_says_so(
    kept: Keep, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.setattr(owner, name, lost)
    with pytest.raises(DeviceLostError, match="device-side assert"):
        kept("seed: 1\n")


def test_best_trial_has_its_files_when_the_only_one_that_was_left_fails(setting: Setting) -> None:
    search = setting.search()
    measure = search.packs.measure

    def diverging(healthy: Sequence[Slot]) -> list[Evaluation | str]:
        found = zip(healthy, measure(healthy), strict=True)
        return ["it diverged" if slot.segment.rung == 2 else evaluation for slot, evaluation in found]

    search.packs.measure = diverging  # type: ignore[method-assign]
    assert search.run(never)
    leader = find_leader(setting.rules(), setting.study())
    assert leader is not None and leader.last.rung == 1
    assert [path.relative_to(setting.folder) for path in setting.folder.glob("*/*")] == [
        Path(f"{leader.trial:05}", "rung_1.pt")
    ]
