"""The choice of a search's folder: the one it goes on in, the one its workers share, or a new one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.output_folder import RUNS, make_folder, new_folder
from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.file_locks import locked
from crossbow_py.core.files import check_own, given_path
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import SEARCH_FILE
from crossbow_py.search.identity import changes, identity
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.records import BEST_FOLDER, CONFIG_FILE, TENSORBOARD_FOLDER, read_json, write_atomically
from crossbow_py.train.config import config_to_mapping

JOURNAL_FILE = "search.journal"
TRIALS_FOLDER = "trials"
_LOCK_FILE = ".search.lock"  # no run's, which is held as long as it trains
_JOINED_FILE = ".joined"  # in a folder that other workers than the one that began there go on in
_FILES = (CONFIG_FILE, SEARCH_FILE, JOURNAL_FILE, CONSOLE_LOG, _LOCK_FILE, _JOINED_FILE, f".{BEST_FOLDER}.lock")
_FOLDERS = (TRIALS_FOLDER, TENSORBOARD_FOLDER, BEST_FOLDER)
_WHERE = ("storage", "study")


@dataclass(frozen=True)
class SearchFolder:
    """The folder that a search is recorded in.

    Attributes:
        is_known: whether it was begun before, here or by another worker.
        is_made: whether there was no such folder before.
    """

    path: Path
    is_known: bool
    is_made: bool = False


def open_search_folder(config: SearchConfig) -> SearchFolder:
    """Choose the folder, and write config.yaml into one that is new. Several workers may have one folder.

    Of workers that are started at once with `resume=auto`, one begins a search and the others join it, which keeps
    it from being taken back.

    Raises:
        UserError: the folder holds another search or a run, or a search and `resume` is null; or it cannot be written.
    """
    ours = identity(config)
    text = write_yaml(config_to_mapping(config))  # what cannot be written leaves no folder behind
    if config.resume not in (None, "auto"):
        return _named(given_path("resume", config.resume or ""), ours, config, text, asked="resume")
    if config.output_dir:
        return _named(given_path("output_dir", config.output_dir), ours, config, text, asked="output_dir")
    with _one_at_a_time(make_folder(RUNS / config.experiment) / _LOCK_FILE):
        found = _newest_to_go_on(config, ours) if config.resume == "auto" else None
        if found is not None:
            return _joined(found)
        return SearchFolder(_begun(new_folder(config.experiment), text), False, is_made=True)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Make others that choose a folder there wait until this one has its configuration or is removed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, lambda: None))
        except OSError as error:
            problem = f"{lock.parent} cannot be written ({error.strerror})"
            raise UserError(f"{problem}; set output_dir to a folder.") from error
        yield


@contextmanager
def kept_unless_refused(folder: SearchFolder) -> Iterator[None]:
    """Remove what was begun here if the block ends with the user's mistake before others joined.

    A folder in which a trial was measured stays.
    """
    try:
        yield
    except UserError:
        if not folder.is_known:
            with suppress(UserError), _one_at_a_time(_lock_of(folder.path)):
                _take_back(folder)
        raise


def _take_back(folder: SearchFolder) -> None:
    """Remove what was begun, unless another worker needs it. Workers that may join wait meanwhile."""
    if any((folder.path / name).exists() for name in (_JOINED_FILE, TRIALS_FOLDER)):
        return
    if folder.is_made:
        shutil.rmtree(folder.path, ignore_errors=True)
        return
    for name in (CONFIG_FILE, CONSOLE_LOG, _LOCK_FILE):  # the rest is somebody's
        with suppress(OSError):
            (folder.path / name).unlink()


def _lock_of(path: Path) -> Path:
    """Return the lock file: beside an experiment's folders, else in the folder, as what is around it is not ours."""
    beside = path.parent / _LOCK_FILE
    return beside if beside.exists() else path / _LOCK_FILE


def _named(path: Path, ours: Mapping[str, Any], config: SearchConfig, text: str, asked: str) -> SearchFolder:
    is_made = not path.exists()
    _has_search(path, ours, config, asked)  # before anything is written there
    with _one_at_a_time(_lock_of(make_folder(path))):
        if _has_search(path, ours, config, asked):  # others may have begun one meanwhile, or have taken it back
            return _joined(path)
        return SearchFolder(_begun(make_folder(path), text), False, is_made)


def _has_search(path: Path, ours: Mapping[str, Any], config: SearchConfig, asked: str) -> bool:
    """Return whether the folder has a search to go on with. Raises UserError if no search may begin there either."""
    with _writing(path):
        check_own(path, _FILES, _FOLDERS)
    if not (path / CONFIG_FILE).is_file():
        if asked == "resume":
            raise UserError(f"resume={path} is not the folder of a search; give one, or resume=auto for the newest.")
        return False
    if config.resume is None:
        raise UserError(f"{asked}={path} already holds a search or a run; set resume=auto or take another.")
    found = read_yaml(path / CONFIG_FILE)
    if "space" not in found:
        raise UserError(f"{asked}={path} holds a run that is no search; choose another folder.")
    changed = changes(found, ours)
    if changed:
        shown = "; ".join(changed[:4])
        raise UserError(f"{asked}={path} holds another search ({shown}); put these back, or choose another folder.")
    return True


def _newest_to_go_on(config: SearchConfig, ours: Mapping[str, Any]) -> Path | None:
    folders = [path for path in (RUNS / config.experiment).glob("*") if (path / CONFIG_FILE).is_file()]
    for path in sorted(folders, key=lambda each: (each / CONFIG_FILE).stat().st_mtime_ns, reverse=True):
        found = read_yaml(path / CONFIG_FILE)
        is_over = read_json(path / SEARCH_FILE).get("status") == "finished"
        # A finished search begins anew in another folder; in a storage of its own it would be finished there too.
        is_kept = config.storage is not None and all(found.get(key) == getattr(config, key) for key in _WHERE)
        if (is_kept or not is_over) and not changes(found, ours):
            return path
    return None


def _begun(path: Path, text: str) -> Path:
    with _writing(path):
        (path / _JOINED_FILE).unlink(missing_ok=True)
        write_atomically(path / CONFIG_FILE, text)
    return path


def _joined(path: Path) -> SearchFolder:
    with _writing(path):
        check_own(path, _FILES, _FOLDERS)
        (path / _JOINED_FILE).touch()
    return SearchFolder(path, True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error
