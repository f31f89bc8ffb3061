"""What a child does: it trains, compares, and does not take a run for one that it was not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.update.optimizers import Muon, Place
from crossbow_py.train.ladder import child
from crossbow_py.train.ladder.child import difference, main, tried
from crossbow_py.train.ladder.rungs import RUNGS, Task

TOLERANCE = RUNGS[-1].tolerance
TASK = Task("train", "cpu", "fused", {"fp32": TOLERANCE["fp32"]})


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "without_tf32", lambda: None)  # which is for the whole process


def test_difference_is_relative_to_how_far_the_weights_went() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0])}
    end = {"w": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0])}  # 5 away
    found = {"w": torch.tensor([4.0, 1.3]), "b": torch.tensor([4.4])}  # 0.5 away from there
    assert difference(found, end, start) == pytest.approx(0.1)
    assert math.isnan(difference({**end, "b": torch.tensor([math.nan])}, end, start))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "fused", "threads"])
def test_executors_on_a_cpu_pass(executor: str) -> None:
    assert tried(dataclasses.replace(TASK, executor=executor)) == ""


def test_gradient_lost_once_by_one_learner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = RoundTasks.correct

    def loses(tasks: RoundTasks, learner: int, *own: object) -> None:
        if (learner, own[0].plan.index) == (1, 8):  # type: ignore[attr-defined]  the last round
            for gradient in tasks.bank.gradients.flat(1):
                gradient.zero_()
        correct(tasks, learner, *own)  # type: ignore[arg-type]

    expected = child._train("serial", "cpu", "fp32")
    monkeypatch.setattr(RoundTasks, "correct", loses)
    reason = child._compare(child._train("serial", "cpu", "fp32"), expected, "fp32", TOLERANCE["fp32"])
    assert reason.startswith("numbers in fp32 differ by 1.6e-02 of how far the weights went (1e-04 are allowed)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "message"), [(None, ""), (9, "numbers in fp32 differ by"), (36, "numbers in fp32 differ by")]
)
def test_step_of_muon_that_is_another_is_found(at: int | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four runs of nine rounds: serial on the device and on the CPU, serial again, and fused."""
    orthogonalize, calls = Muon.orthogonalize, itertools.count(1)

    def differs(optimizer: Muon, places: Sequence[Place]) -> None:
        orthogonalize(optimizer, places)
        if next(calls) == at:
            for matrix, _, out in places:
                matrix.of(out).mul_(1.1)

    monkeypatch.setattr(Muon, "orthogonalize", differs)
    found = tried(dataclasses.replace(TASK, job="muon"))
    assert found.startswith(message) and bool(found) == bool(message)


def test_loss_that_is_another_is_found() -> None:
    expected = child._train("serial", "cpu", "fp32")
    found = dataclasses.replace(expected, losses=[*expected.losses[:-1], 2 * expected.losses[-1]])
    assert child._compare(found, expected, "fp32", 1e-4).startswith("the loss of epoch 2 in fp32 is ")


def test_run_that_did_not_do_as_it_was_told_has_not_passed() -> None:
    serial = child._train("serial", "cpu", "fp32")
    fell_back = dataclasses.replace(serial, messages=[*serial.messages, "Kernels for updates are not used: X."])
    assert child._fell_back(fell_back, serial, []) == "X"
    assert child._fell_back(serial, serial, []) == ""
    told = dataclasses.replace(serial, messages=["executor=fused runs eagerly, because CROSSBOW_GRAPHS is 0."])
    assert child._fell_back(told, serial, ["CROSSBOW_GRAPHS is 0"]) == ""  # as it was told


@pytest.mark.parametrize(
    ("error", "may_change"),
    [(torch.OutOfMemoryError("CUDA out of memory."), True), (RuntimeError("CUDA error:\nillegal"), False)],
)
def test_error_is_one_line_in_the_result(
    error: Exception, may_change: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(task: Task) -> str:
        raise error

    monkeypatch.setattr(child, "tried", fails)
    assert main([json.dumps(dataclasses.asdict(TASK)), str(tmp_path / "result")]) == 1
    said = json.loads((tmp_path / "result").read_text())
    assert said["may_change"] is may_change and "\n" not in said["reason"] and said["reason"]


def test_result_of_a_child_that_passes_gives_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "tried", lambda task: "")
    assert main([json.dumps(dataclasses.asdict(TASK)), str(tmp_path / "result")]) == 0
    assert json.loads((tmp_path / "result").read_text()) == {"reason": "", "may_change": False}


@pytest.mark.slow
def test_what_serial_gives_is_computed_once_for_all_rungs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(TASK, executor="serial", kept=str(tmp_path), dropout=False)
    trained: list[str] = []
    train = child._train

    def counted(executor: str, *own: Any, **options: Any) -> child._Trained:
        trained.append(executor)
        return train(executor, *own, **options)

    monkeypatch.setattr(child, "_train", counted)
    assert tried(task) == "" and trained == ["serial"]  # on a CPU the two are one
    assert tried(dataclasses.replace(task, executor="fused")) == "" and trained == ["serial", "fused"]
    kept = child._serial(task, "fp32")
    assert trained == ["serial", "fused"]
    again = child._serial(dataclasses.replace(task, kept=""), "fp32")
    assert child._compare(again, kept, "fp32", 0.0) == "" and again.messages == kept.messages


@pytest.mark.slow
def test_child_without_arguments_takes_them_with_its_environment_and_log_from_stdin(tmp_path: Path) -> None:
    result, log = tmp_path / "result", tmp_path / "log"
    bad = dataclasses.asdict(dataclasses.replace(TASK, executor="nonsense"))
    call = {"arguments": [json.dumps(bad), str(result)], "environment": {"CROSSBOW_GRAPHS": "0"}, "log": str(log)}
    words = [sys.executable, "-m", child.__name__]
    line = json.dumps(call) + "\n"
    ended = subprocess.run(words, input=line, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Traceback" in log.read_text() and json.loads(result.read_text())["reason"]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
