"""What errors of a command become: a line on stderr and an exit code."""

from __future__ import annotations

import errno
import os

import pytest

from crossbow_py.cli.command_line import run_with_text


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
