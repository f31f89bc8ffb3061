"""Lines and live pictures on a terminal, without one, and in the log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from crossbow_py.telemetry.screen import Screen


class ClosedPipe(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_live_picture_is_on_the_terminal_and_not_in_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = Screen(tmp_path / "log", stream, Console(file=stream, force_terminal=True, width=40))
    screen.start_live()
    screen.show("half of it")
    screen.say("a line")
    screen.close()
    assert "half of it" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    assert (tmp_path / "log").read_text() == "a line\n"


def test_live_picture_without_a_terminal_is_not_drawn() -> None:
    stream = io.StringIO()
    screen = Screen(stream=stream)
    screen.start_live()
    screen.show("half of it")
    screen.say("a line")
    screen.close()
    assert not screen.is_live
    assert stream.getvalue() == "a line\n"


def test_log_goes_on_when_the_terminal_is_gone(tmp_path: Path) -> None:
    screen = Screen(tmp_path / "log", ClosedPipe())
    screen.say("first")
    screen.say("second")
    screen.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_screen_that_does_not_speak_writes_to_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(tmp_path / "log", speaks=False)
    screen.start_live()
    screen.show("half of it")
    screen.say("a line")
    screen.close()
    assert not screen.is_live and capsys.readouterr() == ("", "")
    assert (tmp_path / "log").read_text() == "a line\n"
