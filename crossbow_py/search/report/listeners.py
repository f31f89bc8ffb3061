"""All that records a search: on the terminal and in its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from crossbow_py.search.events import SearchListener, SearchSummary
from crossbow_py.search.report.console import SearchConsole
from crossbow_py.search.report.search_file import SearchFile
from crossbow_py.search.report.standing import ranked
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD, trackers
from crossbow_py.telemetry.pictures.files import INSTALL_MATPLOTLIB, has_matplotlib, save_picture
from crossbow_py.telemetry.records import TENSORBOARD_FOLDER
from crossbow_py.telemetry.screen import Screen

PARALLEL_FILE = "parallel_coordinates.png"
CURVES_FILE = "learning_curves.png"


def search_listeners(
    folder: Path, logger: Sequence[str] = (TENSORBOARD,), *, speaks: bool = True
) -> list[SearchListener]:
    """Return all that records a search in its folder, which exists, and in the services that `logger` names.

    The console is told after what writes to the folder, and says what was drawn. Of several ranks the first `speaks`:
    the others leave terminal and pictures to it, and talk to console.log alone.

    Raises UserError when console.log cannot be opened, and when a service is not installed.
    """
    services = trackers(logger)
    console = SearchConsole(screen=Screen(folder / CONSOLE_LOG, speaks=speaks))
    listeners: list[SearchListener] = [SearchFile(folder, console.on_message)]
    if TENSORBOARD in logger:
        # TensorBoard's modules take a fifth of a second, which whoever asks for --help need not wait for.
        from crossbow_py.search.report.tensorboard import SearchTensorBoard  # noqa: PLC0415

        listeners.append(SearchTensorBoard(folder / TENSORBOARD_FOLDER, console.on_message))
    listeners += [*([SearchPictures(folder, console.on_message)] if speaks else []), console]
    if services:
        from crossbow_py.search.report.search_logger import SearchLogger  # noqa: PLC0415  likewise

        listeners += [SearchLogger(tracker, console.on_message) for tracker in services]
    return listeners


class SearchPictures(SearchListener):
    """Draws the pictures where matplotlib is there and a trial has a value, and says what it did."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say

    def on_end(self, summary: SearchSummary) -> None:
        if not ranked(summary.trials, maximize=summary.info.maximize):
            return
        if not has_matplotlib():
            self._say(f"No pictures: {INSTALL_MATPLOTLIB}")
            return
        from crossbow_py.search.report.pictures import draw_curves, draw_parallel  # noqa: PLC0415  matplotlib is an extra

        try:
            for name, draw in ((PARALLEL_FILE, draw_parallel), (CURVES_FILE, draw_curves)):
                save_picture(draw(summary.info, summary.trials), self._folder / name)
        except OSError as error:
            self._say(f"No pictures were written to {self._folder} ({error.strerror or error}).")
            return
        self._say(f"Pictures: {PARALLEL_FILE} and {CURVES_FILE} in {self._folder}.")
