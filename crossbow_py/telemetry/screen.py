"""The screen that lines for the user go to, a terminal or a pipe, and its log; a terminal has live pictures too.

`ScreenConsole` is what the consoles of runs and searches share.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crossbow_py.core.errors import unwritable
from crossbow_py.core.files import own_file


class Screen:
    """Prints to a stream and to a log file, which has every line but no redrawn picture.

    If the terminal goes away (a closed pipe), the log goes on.

    Args:
        log_path: the log, appended to, as several processes may share it; None for none.
        stream: the stream to print to, by default the process's stdout.
        console: draws to the stream; None makes one that follows the terminal's size.
        speaks: whether to print at all; the log has all in any case.

    Raises:
        UserError: the log cannot be written.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        stream: TextIO | None = None,
        console: Console | None = None,
        speaks: bool = True,
    ) -> None:
        self._stream: TextIO | None = (stream or sys.stdout) if speaks else None
        self._log: TextIO | None = None
        if log_path:
            try:
                self._log = open(log_path, "a", encoding="utf-8", opener=own_file)  # noqa: SIM115
            except OSError as error:
                raise unwritable(log_path.parent, error) from error
        file = self._stream or io.StringIO()
        self._console = console or Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    @property
    def is_terminal(self) -> bool:
        """Return whether pictures may be redrawn in place."""
        return self._console.is_terminal

    @property
    def is_live(self) -> bool:
        """Return whether a live picture is shown."""
        return self._live is not None

    @property
    def width(self) -> int:
        """Return the width in columns."""
        return self._console.width

    @property
    def height(self) -> int:
        """Return the height in lines."""
        return self._console.height

    def say(self, line: str) -> None:
        """Print a line that stays, above the live picture if there is one."""
        self.note(line)
        if self.is_terminal:
            self._guard(lambda: self._console.print(line, soft_wrap=True))
        else:
            self._guard(lambda: print(line, file=self._stream, flush=True))

    def note(self, line: str) -> None:
        """Write a line to the log only."""
        try:
            if self._log is not None:
                self._log.write(line + "\n")
                self._log.flush()
        except OSError:  # a full disk ends the log, not the run
            self._log = None

    def start_live(self) -> None:
        """Let `show` draw from now on. Without a terminal this does nothing."""
        if self.is_terminal:
            # Redrawn by the caller's own calls: no refresh thread to race the learners or to outlive an error.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._guard(self._live.start)

    def show(self, picture: RenderableType) -> None:
        """Redraw the live picture."""
        if self._live is not None:
            live = self._live
            self._guard(lambda: live.update(picture, refresh=True))

    def stop_live(self) -> None:
        """Remove the live picture and show the cursor again."""
        if self._live is not None:
            live, self._live = self._live, None
            self._guard(live.stop)

    def close(self) -> None:
        """Restore the terminal and close the log. May be called twice."""
        self.stop_live()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _guard(self, write: Callable[[], object]) -> None:
        if self._stream is None:
            return
        try:
            write()
        except (OSError, ValueError):  # a broken pipe, a full disk behind a redirection; a stream closed under us
            self._stream = self._live = None


class ScreenConsole:
    """Lines that stay on a screen, above a live picture of the progress.

    Args:
        screen: where to talk.
        clock: monotonic seconds; the spacing of plain progress lines depends on it.
    """

    WIDTH_FOR_A_BAR: ClassVar[int]  # columns that a bar, which takes 21, and the line beside it need

    def __init__(self, screen: Screen, clock: Callable[[], float]) -> None:
        self._screen, self._clock = screen, clock

    def on_message(self, message: str) -> None:
        """A sentence that stays."""
        self._say(message)

    def close(self) -> None:
        """Give the terminal back (cursor shown, live picture gone) and close the log."""
        self._screen.close()

    def _say(self, line: str) -> None:
        self._screen.say(line)

    def _begin(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)
        self._screen.start_live()

    def _end(self, lines: Iterable[str]) -> None:
        self._screen.stop_live()
        for line in lines:
            self._say(line)

    def _with_bar(self, line: str, done: int, total: int | None) -> Table | Text:
        """A line of progress behind a bar, where a total is known and the terminal is wide enough for both."""
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if not total or self._screen.width < self.WIDTH_FOR_A_BAR:
            return text
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=total, completed=done, width=20), text)
        return row


def fact(name: str, what: object) -> str:
    """A line of the last block: what something is, behind its name."""
    return f"  {name:<14} {what}"


def counted(number: float, thing: str) -> str:
    """A number of things, as in `1 learner` and `2 learners`."""
    return f"{number:g} {thing}" if number == 1 else f"{number:g} {thing}s"


def clock_time(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
