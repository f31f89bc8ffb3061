"""Which folder a search writes to, which it goes on in, and what it takes back."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.configuration import compose
from crossbow_py.cli.output_folder import new_folder
from crossbow_py.core.errors import SearchError, UserError
from crossbow_py.search import folder
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import TRIALS_FOLDER, SearchFolder, kept_unless_refused, open_search_folder
from crossbow_py.search.identity import identity
from crossbow_py.train.config import TrainConfig, config_to_mapping

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
BASE = compose(["+experiment=search_digits"], SearchConfig)


def config(**changes: Any) -> SearchConfig:
    return dataclasses.replace(BASE, **changes)


def begun(age: int = 0, status: str | None = None, **changes: Any) -> Path:
    """A search that was begun so many seconds ago, and how it ended."""
    path = open_search_folder(config(resume=None, **changes)).path
    if status is not None:
        (path / "search.json").write_text(json.dumps({"status": status}))
    seconds = 1e9 - age
    os.utime(path / "config.yaml", (seconds, seconds))
    return path


def test_folder_of_a_new_search_is_under_runs_and_holds_its_configuration() -> None:
    folder = open_search_folder(config())
    assert folder.path.parent == Path("runs/search_digits")
    assert not folder.is_known
    assert read_yaml(folder.path / "config.yaml") == config_to_mapping(config())
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]


def test_folder_of_auto_is_the_newest_unfinished_of_an_equal_configuration() -> None:
    begun(age=40)
    wanted = begun(age=30, status="terminated")
    begun(age=20, status="finished")
    begun(age=10, seed=1)
    assert open_search_folder(config()) == SearchFolder(wanted, is_known=True)


def test_folder_is_begun_once_by_workers_that_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks for a search while the first has a folder, which does not say yet whose it is."""
    is_made, found = threading.Event(), []

    def slowly(experiment: str) -> Path:
        path = new_folder(experiment)
        is_made.set()
        second.join(0.2)
        return path

    def join() -> None:
        assert is_made.wait(10)
        found.append(open_search_folder(config()))

    monkeypatch.setattr(folder, "new_folder", slowly)
    second = threading.Thread(target=join)
    second.start()
    first = open_search_folder(config())
    second.join(10)
    assert (first.is_known, first.is_made) == (False, True)
    assert found == [SearchFolder(first.path, is_known=True)]


def test_folder_that_cannot_be_locked_is_refused() -> None:
    Path("runs/search_digits/.search.lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"runs/search_digits cannot be written \(Is a directory\); set output_dir"):
        open_search_folder(config())


def test_folder_of_auto_is_new_when_all_are_finished_or_other_searches() -> None:
    old = {begun(status="finished"), begun(num_trials=9), begun(space={"batch_size": [8]}), begun(metric="loss")}
    folder = open_search_folder(config())
    assert folder.path not in old
    assert not folder.is_known


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [({}, True), ({"storage": "journal:other.journal"}, False), ({"study": None}, False), ({"storage": None}, False)],
)
def test_finished_search_in_a_storage_of_its_own_is_gone_back_to(changes: dict[str, Any], is_known: bool) -> None:
    kept: dict[str, Any] = {"storage": "journal:own.journal", "study": "mine"}
    path = begun(status="finished", **kept)
    found = open_search_folder(config(**{**kept, **changes}))
    assert (found.is_known, found.path == path) == (is_known, is_known)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_time_s": 5.0}, {"lease_s": 9.0}, {"max_pack_size": 2}, {"packing": "none"}, {"target_accuracy": 0.5},
        {"storage": "sqlite:///x.db"}, {"study": "other"}, {"num_workers": 1}, {"resume": None, "output_dir": None},
    ],
)  # fmt: skip
def test_identity_is_the_same_with_other_stops_and_packing(changes: dict[str, Any]) -> None:
    assert identity(config(**changes)) == identity(config())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_epochs": 9.0}, {"eta": 2}, {"seed": 1}, {"batch_size": 8}, {"sampler": "tpe"}, {"min_epochs": 3.0},
        {"order_seed": 1}, {"precision": "bf16"}, {"space": {"optimizer.momentum": [0.5]}},
    ],
)  # fmt: skip
def test_identity_is_another_with_other_trials(changes: dict[str, Any]) -> None:
    assert identity(config(**changes)) != identity(config())


def test_named_folder_is_begun_and_then_shared_with_those_that_resume() -> None:
    first = open_search_folder(config(output_dir="deep/search"))
    assert first == SearchFolder(Path("deep/search"), is_known=False, is_made=True)
    assert open_search_folder(config(output_dir="deep/search")) == SearchFolder(first.path, is_known=True)
    assert open_search_folder(config(resume="deep/search")) == SearchFolder(first.path, is_known=True)
    with pytest.raises(UserError, match=r"output_dir=deep/search already holds a search .* resume=auto"):
        open_search_folder(config(output_dir="deep/search", resume=None))


@pytest.mark.parametrize("key", ["output_dir", "resume"])
def test_named_folder_of_another_search_is_refused_with_what_differs(key: str) -> None:
    path = begun(seed=4, eta=2)
    with pytest.raises(UserError, match=r"holds another search \(eta: 2 → 3; seed: 4 → 0\)"):
        open_search_folder(config(**{key: str(path)}))


@pytest.mark.parametrize("key", ["output_dir", "resume"])
def test_folder_of_a_search_that_an_earlier_version_began_is_gone_on_with(key: str) -> None:
    path = begun()
    plain = read_yaml(path / "config.yaml")
    del plain["label_smoothing"], plain["data"]["random_erasing"]
    (path / "config.yaml").write_text(write_yaml(plain))
    assert open_search_folder(config(**{key: str(path)})).is_known
    with pytest.raises(UserError, match=r"holds another search \(data.random_erasing: 0.0 → 0.5\)"):
        erasing = dataclasses.replace(BASE.data, random_erasing=0.5)
        open_search_folder(config(**{key: str(path)}, data=erasing))
    plain["space"].popitem()
    (path / "config.yaml").write_text(write_yaml(plain))
    with pytest.raises(UserError, match=r"holds another search \(space"):
        open_search_folder(config(**{key: str(path)}))


@pytest.mark.parametrize("key", ["output_dir", "resume"])
def test_named_folder_of_a_training_run_is_refused(key: str) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(write_yaml(config_to_mapping(compose(["+experiment=digits"], TrainConfig))))
    with pytest.raises(UserError, match=f"{key}=run holds a run that is no search"):
        open_search_folder(config(**{key: "run"}))


def test_resume_of_a_path_that_is_no_search_is_refused() -> None:
    Path("empty").mkdir()
    for path in ("empty", "nowhere"):
        with pytest.raises(UserError, match=f"resume={path} is not the folder of a search"):
            open_search_folder(config(resume=path))
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("changes", [{"output_dir": "a/${b"}, {"study": "${b"}])
def test_configuration_that_cannot_be_written_leaves_no_folder_behind(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        open_search_folder(config(**changes))
    assert list(Path().iterdir()) == []


def test_output_dir_that_cannot_be_written_is_refused() -> None:
    Path("file").write_text("mine")
    with pytest.raises(UserError, match="output_dir file/search cannot be written"):
        open_search_folder(config(output_dir="file/search"))


def refuse(folder: SearchFolder, error: Exception) -> None:
    with pytest.raises(type(error)), kept_unless_refused(folder):
        (folder.path / "console.log").write_text("begun")
        raise error


def test_refused_search_takes_back_the_folder_it_made() -> None:
    refuse(open_search_folder(config(output_dir="new")), UserError("a mistake"))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("changes", [{}, {"output_dir": "new"}])
def test_refused_search_leaves_the_folder_to_those_that_joined(changes: dict[str, Any]) -> None:
    first = open_search_folder(config(**changes))
    joined = open_search_folder(config(**changes))
    assert joined == SearchFolder(first.path, is_known=True)
    refuse(first, UserError("a mistake"))
    assert (first.path / "config.yaml").exists() and (first.path / "console.log").exists()
    assert open_search_folder(config(**changes)) == joined


@pytest.mark.parametrize("changes", [{}, {"output_dir": "new"}])
def test_search_that_is_taken_back_while_another_would_join_begins_anew(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, found = open_search_folder(config(**changes)), []
    take_back = folder._take_back
    other = threading.Thread(target=lambda: found.append(open_search_folder(config(**changes))))

    def slowly(folder: SearchFolder) -> None:
        other.start()
        other.join(0.2)
        take_back(folder)

    monkeypatch.setattr(folder, "_take_back", slowly)
    refuse(first, UserError("a mistake"))
    other.join(10)
    assert not found[0].is_known and (found[0].path / "config.yaml").exists()


def test_refused_search_leaves_what_was_in_a_folder_before_but_not_that_another_joined() -> None:
    open_search_folder(config(output_dir="mine"))
    joined = open_search_folder(config(output_dir="mine"))
    (joined.path / "config.yaml").unlink()
    (joined.path / "notes.txt").write_text("mine")
    refuse(open_search_folder(config(output_dir="mine")), UserError("a mistake"))
    assert [path.name for path in joined.path.iterdir()] == ["notes.txt"]


def test_search_of_others_or_with_measured_trials_or_without_a_mistake_is_kept() -> None:
    begun_by_others = begun()
    refuse(SearchFolder(begun_by_others, is_known=True), UserError("a mistake"))
    assert (begun_by_others / "config.yaml").exists()
    measured = open_search_folder(config(output_dir="measured"))
    (measured.path / TRIALS_FOLDER).mkdir()
    refuse(measured, UserError("the disk is full"))
    assert (measured.path / "config.yaml").exists()
    ended = open_search_folder(config(output_dir="new"))
    refuse(ended, SearchError("the storage is gone"))  # no mistake
    assert (ended.path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("storage", "mode"),
    [
        ("postgresql://me:secret@host/x", 0o600),
        ("redis://host/0?password=secret", 0o600),
        ("postgresql://host/x", 0o644),
        (None, 0o644),
    ],
)
def test_configuration_with_a_password_is_readable_for_its_owner_alone(storage: str | None, mode: int) -> None:
    before = os.umask(0o022)
    try:
        path = begun(storage=storage)
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / "config.yaml").stat().st_mode) == mode
