"""The ladder on a device, with commands that are only pretended to run: what children are asked, what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.version import PACKAGE
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.trust import Outcome, RememberedOutcomes
from crossbow_py.train.ladder import ladder as ladders
from crossbow_py.train.ladder.children import Ended
from crossbow_py.train.ladder.ladder import Ladder, check_trusted, line, try_on_ranks, try_once
from crossbow_py.train.ladder.rungs import RUNGS
from tests.caches import use_cache
from tests.trainers import Recorder, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(RememberedOutcomes, "_OWN", {})
    monkeypatch.setattr(Ladder, "lacks", lambda ladder, rung: None)


class Commands:
    """End as they are told to by the name of a rung, else well; keep what was asked for."""

    def __init__(self, **ends: Ended) -> None:
        self.ends, self.tasks, self.environments = ends, dict[str, dict[str, object]](), dict[str, dict[str, str]]()
        self.commands: dict[str, list[str]] = {}

    def __call__(self, command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> Ended:
        task, result = command[-2:]
        name = Path(result).stem
        self.tasks[name], self.environments[name] = json.loads(task), environment
        self.commands[name] = list(command)
        if name in self.ends:
            return self.ends[name]
        Path(result).write_text(json.dumps({"reason": "", "may_change": False}))
        return Ended(0, 1.0)


def test_children_are_told_what_to_train_and_with_which_switches(tmp_path: Path) -> None:
    commands = Commands(graphs=Ended(-11, 1.0))
    found = Ladder(CUDA, tmp_path, run=commands).climb({}, lambda *_: None)
    assert found["graphs"].reason == "killed by signal 11 (SIGSEGV)"
    assert commands.tasks["layers"] == {
        "job": "train", "device": "cuda", "executor": "fused", "tolerance": {"fp32": 1e-4, "bf16": 4e-2},
        "dropout": False, "kernels": ["layers"], "kept": str(tmp_path / "cache"),
    }  # fmt: skip
    own = commands.environments["layers"]
    assert (own["CROSSBOW_KERNELS"], own["CROSSBOW_GRAPHS"]) == ("update,loss,batches,layers", "0")
    assert commands.environments["fused"]["CROSSBOW_KERNELS"] == "none"
    assert own["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert commands.commands["ranks"][1:3] == ["-m", "torch.distributed.run"]
    assert RememberedOutcomes().of(CUDA)["graphs"] == found["graphs"]


def test_skipped_step_names_what_it_builds_on_as_the_screen_does(tmp_path: Path) -> None:
    commands = Commands(sum=Ended(-11, 1.0))
    found = Ladder(CUDA, tmp_path, run=commands).climb({}, lambda *_: None)
    assert found["ranks"].reason == "it builds on 'NCCL of one rank', which failed"


def test_auto_tries_a_gpu_once_says_so_and_leaves_out_what_it_does_not_need() -> None:
    commands, said = Commands(layers=Ended(None, 300.0)), list[str]()
    first = try_once(CUDA, said.append, run=commands)
    assert list(first) == [rung.name for rung in RUNGS if rung.serves_auto and "cuda" in rung.devices]
    assert "streamed" not in commands.tasks and "ranks" not in commands.tasks
    assert "in 9 child processes:" in said[0]
    assert said[8].split(maxsplit=4) == ["FAIL", "+", "layer", "kernels", "300.0 s  timed out after 300 s"]
    said.clear()
    again = Commands()
    assert try_once(CUDA, said.append, run=again) == {**first, "convolutions": again_skipped(first)}
    assert (said, again.tasks) == ([], {})
    assert try_once(CPU, said.append, run=again) == {}


def again_skipped(first: dict[str, Outcome]) -> Outcome:
    assert first["convolutions"].status == "skipped"
    return first["convolutions"]


def test_what_failed_for_want_of_memory_is_tried_again() -> None:
    class Full(Commands):
        def __call__(self, command: Sequence[str], *own: object) -> Ended:
            ended = super().__call__(command, *own)  # type: ignore[arg-type]
            if Path(command[-1]).stem == "streams":
                Path(command[-1]).write_text(json.dumps({"reason": "CUDA out of memory", "may_change": True}))
                return Ended(1, 1.0)
            return ended

    found = try_once(CUDA, lambda _: None, run=Full())
    assert (found["streams"].status, found["streams"].reason) == ("failed", "CUDA out of memory")
    again = Commands()
    assert try_once(CUDA, lambda _: None, run=again)["streams"].passed
    assert list(again.tasks) == ["streams"]


@pytest.mark.parametrize(
    ("limit_s", "is_tried_again"), [(2.0, True), (None, False), (1000.0, False)], ids=["short", "own", "long"]
)
def test_time_out_under_a_limit_shorter_than_the_rungs_own_says_nothing(
    limit_s: float | None, is_tried_again: bool, tmp_path: Path
) -> None:
    commands = Commands(serial=Ended(None, 2.0))
    ladder = Ladder(CUDA, tmp_path, limit_s, run=commands)
    assert ladder.climb({}, lambda *_: None)["serial"].may_change is is_tried_again
    assert ("serial" not in RememberedOutcomes().of(CUDA)) is is_tried_again


def test_children_import_the_package_of_their_parent_and_no_words_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    commands = Commands()
    Ladder(CUDA, tmp_path, run=commands).climb({}, lambda *_: None)
    assert commands.environments["ranks"]["PYTHONPATH"] == f"{PACKAGE.parent}:/elsewhere"
    assert "--nnodes=1" in commands.commands["ranks"]


class OneOfThree(Ranks):
    """A rank of three, two of them on a host; texts are exchanged as in a file."""

    def __init__(self, rank: int, node: int, texts: list[list[str]]) -> None:
        super().__init__()
        self.rank, self.num_ranks, self.node, self._texts, self._turn = rank, 3, node, texts, 0

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_texts(self, text: str) -> list[str]:
        self._texts[self._turn][self.rank] = text
        self._turn += 1
        return self._texts[self._turn - 1]


def test_ranks_of_a_host_know_what_the_first_has_tried_although_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    commands, tried = Commands(streams=Ended(-11, 1.0)), list[int]()

    def once(device: torch.device, announce: object) -> dict[str, Outcome]:
        tried.append(rank)
        return try_once(device, said.append, run=commands)

    monkeypatch.setattr(ladders, "try_once", once)
    said, found, texts = list[str](), dict[int, dict[str, Outcome]](), [["", "", ""], ["", "", ""]]
    where = [f"{node} {ladders.digest(ladders.facts(CUDA))}" for node in (0, 0, 1)]
    for rank, node in enumerate((0, 0, 1)):  # one after another, as if each were a process
        monkeypatch.setattr(RememberedOutcomes, "_OWN", {})
        texts[0][:] = where
        found[rank] = try_on_ranks(CUDA, OneOfThree(rank, node, texts), said.append)
    assert tried == [0, 2]
    assert found[0] == found[1] and found[0]["fused"].passed and not found[0]["streams"].passed
    assert "/proc/none/crossbow_py/ladder.json cannot be written" in said[-1] and "set XDG_CACHE_HOME" in said[-1]


@pytest.mark.parametrize(
    ("outcomes", "precision", "said"),
    [
        ({"serial": Outcome("failed", "killed by signal 6.")}, FP32, r"by serial .* \(killed .* 6\); set device=cpu"),
        ({"bf16": Outcome("failed", "numbers differ")}, BF16, "set precision=fp32"),
        ({"bf16": Outcome("failed", "numbers differ")}, FP32, None),
        ({"serial": Outcome("failed", "out of memory", may_change=True)}, FP32, None),
        ({"serial": Outcome("passed"), "bf16": Outcome("skipped", "no bf16")}, BF16, None),
        ({}, FP32, None),
    ],
)
def test_device_that_fails_by_serial_is_refused_with_the_remedy(
    outcomes: dict[str, Outcome], precision: object, said: str | None
) -> None:
    if said is None:
        check_trusted(outcomes, precision)  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=said):
        check_trusted(outcomes, precision)  # type: ignore[arg-type]


def test_device_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(device: torch.device) -> dict[str, str]:
        raise RuntimeError("CUDA unknown error - this may be due to\nan incorrectly set up environment")

    monkeypatch.setattr(ladders, "facts", dead)
    with pytest.raises(UserError, match=r"does not answer \(RuntimeError: CUDA unknown error .*; set device=cpu"):
        Ladder(CUDA, tmp_path)


def test_run_with_auto_tries_its_device_and_one_with_a_named_executor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def recorded(device: torch.device, ranks: object, announce: object) -> dict[str, Outcome]:
        tried.append(device.type)
        announce("trying")  # type: ignore[operator]
        return {"serial": Outcome("failed", "numbers differ")} if len(tried) > 1 else {}

    monkeypatch.setattr("crossbow_py.train.build.try_on_ranks", recorded)
    listener = Recorder()
    make_trainer(executor="auto", callbacks=[listener])
    assert tried == ["cpu"] and "trying" in listener.of("message")
    make_trainer(executor="serial")
    assert tried == ["cpu"]
    with pytest.raises(UserError, match="set device=cpu"):
        make_trainer(executor="auto")


@pytest.mark.parametrize(
    ("outcome", "is_known", "expected"),
    [
        (Outcome("passed", seconds=3.14), False, "PASS  streams                        3.1 s"),
        (Outcome("failed", "slow", 120.0), True, "FAIL  streams                      120.0 s  remembered: slow"),
        (Outcome("skipped", "there is one GPU"), False, "SKIP  streams                               there is one GPU"),
    ],
)
def test_line_of_a_rung(outcome: Outcome, is_known: bool, expected: str) -> None:
    assert line("streams", outcome, is_known) == expected
