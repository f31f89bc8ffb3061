"""Files written whole or not at all, on the disk where that is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crossbow_py.core.files import replacing
from crossbow_py.core.measured import Remembered


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_file_replaced_is_the_new_one_whole_and_the_old_one_until_then(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old and long")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old and long"
        assert partial.name.startswith(".")  # hidden
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "new")]


def test_file_that_fails_to_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"), replacing(path) as partial:
        partial.write_text("half")
        full()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "old")]


@pytest.mark.parametrize("synced", [False, True])
def test_file_is_synced_before_it_has_its_name_and_its_folder_after_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    seen: list[tuple[Path, bool]] = []
    path = tmp_path / "a"

    def spied(descriptor: int) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))

    monkeypatch.setattr(os, "fsync", spied)
    with replacing(path, synced=synced) as partial:
        partial.write_text("new")
    assert seen == ([(partial, False), (tmp_path, True)] if synced else [])


def test_choice_that_the_disk_refuses_leaves_what_was_remembered_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Remembered("choices.json", tmp_path / "choices.json")
    known.remember("a", "first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        known.remember("a", "second")
    assert known.recall("a") == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["choices.json"]
