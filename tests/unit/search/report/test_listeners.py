"""All listeners of a search together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossbow_py.search.report.listeners import search_listeners


def test_listeners_leave_a_whole_folder_and_are_closed(tmp_path: Path, searched: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    listeners = search_listeners(tmp_path)
    for listener in listeners:
        listener.on_start(searched.info())
        listener.on_trials(searched.trials())
        listener.on_progress(searched.progress())
        listener.on_message("packs of 4")
    for listener in listeners:
        listener.on_end(searched.summary())
        listener.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"console.log", "search.json", "tensorboard", "parallel_coordinates.png", "learning_curves.png"}
    assert capsys.readouterr().out == (tmp_path / "console.log").read_text()


def test_listeners_that_do_not_speak_leave_terminal_and_pictures_to_others(
    tmp_path: Path, searched: Any, capsys: Any
) -> None:
    for listener in search_listeners(tmp_path, speaks=False):
        listener.on_start(searched.info())
        listener.on_trials(searched.trials())
        listener.on_progress(searched.progress())
        listener.on_message("packs of 4")
        listener.on_end(searched.summary())
        listener.close()
    assert {path.name for path in tmp_path.iterdir()} == {"console.log", "search.json", "tensorboard"}
    assert capsys.readouterr() == ("", "")
    log = (tmp_path / "console.log").read_text()
    assert "packs of 4" in log and "search_digits finished" in log
