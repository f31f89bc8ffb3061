"""What errors of a command become: a line on stderr and an exit code."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossbow_py.cli import command_line
from crossbow_py.cli.command_line import run_with_text, sweep_lines
from crossbow_py.cli.flags import Flags
from crossbow_py.train.config import TrainConfig


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "allow a process more open files (ulimit -n), or lower num_workers"),
        (errno.ENOSPC, "make room there"),
        (errno.EFBIG, "allow larger files (ulimit -f)"),
    ],
)
def test_what_the_machine_refuses_is_one_line_with_the_remedy(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(_: list[str]) -> int:
        raise OSError(number, os.strerror(number), "here")

    assert run_with_text([], "usage", job) == 1
    said = capsys.readouterr().err
    shown = f"OSError: [Errno {int(number)}] {os.strerror(number)}: 'here'"
    assert said == f"error: the system refuses this ({shown}); {remedy}.\n"


def test_mistake_of_ours_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def job(_: list[str]) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    assert run_with_text([], "usage", job) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def ended(folder: Path, **summary: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "train_time_s": 1.5, **summary}))
    return folder


def test_sweep_has_a_line_for_each_run_that_ended_and_says_how_to_compare_them(tmp_path: Path) -> None:
    runs = {
        ended(tmp_path / "0", test_accuracy=0.5, images_per_s=1234.5): "0 (seed=1)",
        tmp_path / "1": "1 (seed=2)",
        ended(tmp_path / "2", test_accuracy=0.75, status="failed"): "2 (seed=3)",
    }
    assert sweep_lines(runs) == [
        "",
        "  run           status  test accuracy  time of training  images/s",
        "  0 (seed=1)  finished         0.5000             1.5 s     1,234",
        "  2 (seed=3)    failed         0.7500             1.5 s          ",
        "",
        f"compare them: python -m crossbow_py.report {tmp_path}",
    ]


def test_seeds_of_a_sweep_have_a_line_with_their_mean(tmp_path: Path) -> None:
    names = {"seed=1,averaging=sma": 0.5, "seed=2,averaging=sma": 0.7, "0 (seed=1,averaging=papa)": 0.9}
    lines = sweep_lines({ended(tmp_path / name, test_accuracy=value): name for name, value in names.items()})
    assert lines[5].split() == ["mean", "of", "averaging=sma", *["0.6000", "±", "1.2706", "1.5", "s", "±", "0.0", "s"]]
    assert lines[6].startswith("  mean of averaging=papa") and "0.9000 " in lines[6]
    unclear = [ended(tmp_path / f"seed={seed},widths=[{seed},2]", test_accuracy=0.5) for seed in (1, 2)]
    assert not any("mean" in line for line in sweep_lines({folder: folder.name for folder in unclear}))


def test_sweep_of_more_runs_than_a_report_compares_says_how_to_choose(tmp_path: Path) -> None:
    folders = [ended(tmp_path / f"seed={seed}", test_accuracy=0.5) for seed in range(13)]
    lines = sweep_lines({folder: folder.name for folder in folders})
    assert len(lines) == 1 + 1 + 13 + 1 + 1 + 1 + 1 and lines[-2] == "± is a 95 % confidence interval over seeds."
    assert lines[-1] == f"compare up to 12 of them: python -m crossbow_py.report {folders[0]} {folders[1]}"


@pytest.mark.parametrize(("runs", "beside"), [(("a/1", "a/2"), "a/3"), (("a/1", "b/2"), "c")])
def test_sweep_whose_folder_does_not_hold_it_alone_names_its_runs(
    runs: Sequence[str], beside: str, tmp_path: Path
) -> None:
    folders = [ended(tmp_path / name, test_accuracy=0.5) for name in runs]
    ended(tmp_path / beside)
    said = sweep_lines({folder: folder.name for folder in folders})[-1]
    assert said == f"compare them: python -m crossbow_py.report {folders[0]} {folders[1]}"


@pytest.mark.parametrize(("code", "shown"), [(0, "0"), (None, ""), ("done", "'done'")])
def test_exit_in_a_users_function_is_a_failure_with_its_line(
    code: Any, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    exec(compile("import sys\ndef ends(code):\n    sys.exit(code)\n", str(own), "exec"), functions := {})

    def job(_: list[str]) -> int:
        functions["ends"](code)
        return 0

    assert run_with_text([], "usage", job) == 2
    said = f"error: sys.exit({shown}) at {own}:3 is no way to end a run; raise an error there instead.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("count", "lines"), [(20, []), (21, ["checks the configurations of 21 runs"])])
def test_many_configurations_are_said_before_they_are_checked(
    count: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command: Any = SimpleNamespace(kind=TrainConfig, composed=lambda words, kind, name: words[0])
    assert command_line._all_composed(Flags(), [["a"]] * count, command) == ["a"] * count
    assert capsys.readouterr().out.splitlines() == lines


def test_sweep_goes_on_after_a_run_that_has_exited(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def job(config: Any) -> int:
        seen.append(config)
        if len(seen) == 1:
            raise SystemExit
        return 0

    assert command_line._one_after_another(["a", "b"], ["", ""], job) == 2
    assert seen == ["a", "b"]
