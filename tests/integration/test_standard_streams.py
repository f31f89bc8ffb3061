"""Commands whose standard streams are closed, full, or read by nobody: real processes, started by a shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from crossbow_py.telemetry.records import read_summary
from tests.training_processes import environment

RUN = ["+experiment=digits", "+debug=fast", "device=cpu", "executor=serial", "output_dir=run"]
FULL = "error: the output cannot be written (OSError: [Errno 28] No space left on device); send it elsewhere.\n"

pytestmark = pytest.mark.timeout(120)


def in_shell(folder: Path, command: str, arguments: list[str], streams: str) -> tuple[int, str]:
    """The exit code of a command of the package, and what it says on stderr; `streams` redirects in the shell."""
    line = f'set -o pipefail; "$0" -m crossbow_py.{command} {" ".join(arguments)} {streams}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable],
        cwd=folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "streams", "ended"),
    [
        (["--help"], ">/dev/full", (1, FULL)),
        (["--help"], ">&-", (0, "")),
        (["--list"], "| true", (0, "")),
        (["nosuch=1"], "2>/dev/full", (2, "")),
        (["nosuch=1"], ">&- 2>&- <&-", (2, "")),
    ],
)
def test_text_that_cannot_be_printed_is_told_in_one_line_where_anyone_listens(
    arguments: list[str], streams: str, ended: tuple[int, str], tmp_path: Path
) -> None:
    assert in_shell(tmp_path, "train", arguments, streams) == ended


@pytest.mark.slow
def test_help_is_shown_where_letters_of_equations_cannot_be() -> None:
    command = [sys.executable, "-m", "crossbow_py.train", "--help"]
    done = subprocess.run(command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"num_learners" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("streams", [">&- 2>&- <&-", ">/dev/full"])
def test_run_that_nobody_listens_to_is_trained_and_its_files_are_whole(streams: str, tmp_path: Path) -> None:
    assert in_shell(tmp_path, "train", RUN, streams) == (0, "")
    assert read_summary(tmp_path / "run")["status"] == "finished"
    lines = (tmp_path / "run" / "console.log").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("  run folder")] == ["  run folder     run"]
    assert in_shell(tmp_path, "report", ["run"], streams)[0] == (1 if "full" in streams else 0)
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    code, said = in_shell(tmp_path, "predict", ["run", "output_dir=answers"], streams)
    assert (code, said) == ((1, FULL) if "full" in streams else (0, ""))
    assert (tmp_path / "answers" / "predict.json").is_file()


@pytest.mark.slow
def test_sweep_whose_reader_has_seen_enough_goes_on_to_its_last_run(tmp_path: Path) -> None:
    arguments = ["-m", *RUN, "seed=1,2"]
    assert in_shell(tmp_path, "train", arguments, "| head -1") == (0, "")
    for folder in ("seed=1", "seed=2"):
        assert read_summary(tmp_path / "run" / folder)["status"] == "finished"
