"""All that records a search: on the terminal and in its folder."""

from __future__ import annotations

from pathlib import Path

from crossbow_py.search.events import SearchListener
from crossbow_py.search.report.console import SearchConsole
from crossbow_py.search.report.pictures import SearchPictures
from crossbow_py.search.report.search_file import SearchFile
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.records import TENSORBOARD_FOLDER


def search_listeners(folder: Path) -> list[SearchListener]:
    """Everything that records a search in its folder, which exists; the console is told last, and says what was drawn.

    Raises UserError when console.log cannot be opened.
    """
    # TensorBoard's modules take a fifth of a second, which whoever asks for --help need not wait for.
    from crossbow_py.search.report.tensorboard import SearchTensorBoard  # noqa: PLC0415

    console = SearchConsole(folder / CONSOLE_LOG)
    return [
        SearchFile(folder, console.on_message),
        SearchTensorBoard(folder / TENSORBOARD_FOLDER, console.on_message),
        SearchPictures(folder, console.on_message),
        console,
    ]
