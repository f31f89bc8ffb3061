"""Checkpoints with a right hash whose values no run has written: resumed from, or refused in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from crossbow_py.train.__main__ import main
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from tests.said import called
from tests.unit.fuzz.examining import depths, examine

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
ARGUMENTS = ["+debug=fast", "device=cpu", "precision=fp32", "executor=serial", "num_learners=2", "model.hidden=[8]",
             "max_evaluation_batches=1", "output_dir=run"]  # fmt: skip
RESUMED = [*ARGUMENTS, "max_rounds=3", "resume=auto"]
LEFT_OUT = object()
VALUES = [LEFT_OUT, None, True, -5, 10**30, 2.5, float("nan"), "os.system", [1], {"a": 1}, {1: 2}, torch.zeros(2)]
Place = tuple[Any, ...]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(ARGUMENTS) == 0
    return folder / "run"


def part_of(run: Path) -> Path:
    return checkpoints(run)[0] / "rank-0.pt"


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where the values of a part are: the first few of a mapping, the first of a list."""
    if at[:1] != ("identity",) or len(at) < 3:
        yield at
        keys = list(value)[:6] if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
        for key in keys:
            yield from places(value[key], (*at, key))


def changed(part: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    part = copy.deepcopy(part)
    inner = part
    for key in place[:-1]:
        inner = inner[key]
    if value is LEFT_OUT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return part


def resume(whole_run: Path, part: Any) -> tuple[int, str]:
    """From such a part with its hash in the manifest: the exit code, and what is said of it."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree(whole_run, "run")
    path = part_of(Path("run"))
    torch.save(part, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    return called(main, RESUMED)


@depths(15, 150)
def test_part_of_other_values_is_resumed_from_or_refused_in_one_line(whole_run: Path, examples: int) -> None:
    part = torch.load(part_of(whole_run), weights_only=True)

    def check(change: tuple[Place, int]) -> None:
        place, index = change
        code, said = resume(whole_run, changed(part, place, VALUES[index] if place or index else None))
        assert code in (0, 1, 2), code  # 1: weights that are no numbers
        assert "Traceback" not in said
        assert said.count("error: ") == (code != 0), said  # torch may warn of how a tensor was indexed

    indices = st.integers(0, len(VALUES) - 1)
    examine(st.tuples(st.sampled_from(list(places(part))), indices), check, examples)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((), [1], "rank-0.pt holds a list"),
        (("bank",), None, "does not hold what a run"),
        (("bank", "num_learners"), 3, "3 learners with the step counts"),
        (("bank", "num_learners"), -5, "-5 learners with the step counts"),
        (("bank", "step_counts"), [0, 2.5], "2 learners with the step counts"),
        (("bank", "z", "1.bias"), torch.zeros(1), "1.bias is of the shape [1] instead of [8]"),
        (("state", "samples_seen"), -5, "samples_seen is -5"),
        (("state", "samples_seen"), 10**30, "samples_seen is 1000"),
        (("state", "last_loss"), "low", "last_loss is 'low'"),
        (("state", "sick_learners"), [1], "non_finite_learners is [1]"),
        (("choices",), LEFT_OUT, "does not hold what a run"),
        (("identity",), {1: 2}, "is of another run"),
    ],
)  # fmt: skip
def test_part_of_a_wrong_value_is_refused_with_what_is_wrong(
    whole_run: Path, place: Place, value: Any, said: str
) -> None:
    part = torch.load(part_of(whole_run), weights_only=True)
    code, line = resume(whole_run, changed(part, place, value))
    assert (code, line.count("\n")) == (2, 1), line
    assert said in line


def test_part_as_it_was_is_resumed_from(whole_run: Path) -> None:
    assert resume(whole_run, torch.load(part_of(whole_run), weights_only=True)) == (0, "")
