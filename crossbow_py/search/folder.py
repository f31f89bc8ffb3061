"""The choice of a search's folder: the one it goes on in, the one its workers share, or a new one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.output_folder import RUNS, make_folder, new_folder, recorded_folders
from crossbow_py.core.errors import RankError, UserError, unwritable, without_secrets
from crossbow_py.core.files import check_own, given_path, locked
from crossbow_py.core.settings import written
from crossbow_py.distributed.launch import LAUNCH_FILE, Launch, is_of_launch, this_launch, write_launch
from crossbow_py.distributed.ranks import Ranks
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
_FILES = (
    CONFIG_FILE, SEARCH_FILE, JOURNAL_FILE, CONSOLE_LOG, LAUNCH_FILE, _LOCK_FILE, _JOINED_FILE, f".{BEST_FOLDER}.lock",
)  # fmt: skip
_FOLDERS = (TRIALS_FOLDER, TENSORBOARD_FOLDER, BEST_FOLDER)
_WHERE = ("storage", "study")
_FINISHED = "finished"
_SERVERS = ("postgresql", "mysql", "grpc", "redis", "rediss")  # storages that several hosts reach


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


def open_search_folder(config: SearchConfig, launch: Launch | None = None) -> SearchFolder:
    """Choose the folder, and write config.yaml into one that is new. Several workers may have one folder.

    Of workers that are started at once with `resume=auto`, one begins a search and the others join it, which keeps
    it from being taken back. Ranks that torchrun has started again go on in the folder of their `launch`.

    Raises:
        UserError: the folder holds another search or a run, or a search and `resume` is null; or it cannot be written.
    """
    config = _relaunched(config, launch)
    ours = identity(config)
    text = write_yaml(config_to_mapping(config))  # what cannot be written leaves no folder behind
    if config.resume not in (None, "auto"):
        return _named(given_path("resume", config.resume or ""), ours, config, text, launch, asked="resume")
    if config.output_dir:
        return _named(given_path("output_dir", config.output_dir), ours, config, text, launch, asked="output_dir")
    with _one_at_a_time(make_folder(RUNS / config.experiment) / _LOCK_FILE):
        found = _newest_to_go_on(config, ours) if config.resume == "auto" else None
        if found is not None:
            return _joined(found)
        return SearchFolder(_begun(new_folder(config.experiment), config, text, launch), False, is_made=True)


@contextmanager
def opened_folder(config: SearchConfig, ranks: Ranks) -> Iterator[SearchFolder]:
    """Choose the folder for all ranks, which call this together; what was begun for a mistake is removed in the end.

    The first rank chooses. A host that does not see its folder has one of its own, which its own first rank chooses.
    See `open_search_folder` and `kept_unless_refused`.

    Raises:
        UserError: as `open_search_folder`; or the ranks are on several hosts, and neither storage nor folder is theirs
            together.
    """
    launch = this_launch(ranks)
    with ExitStack() as stack:

        def opened() -> SearchFolder:
            folder = open_search_folder(config, launch)
            stack.enter_context(kept_unless_refused(folder))
            return folder

        folder: SearchFolder | None = None
        with ranks.together():
            if ranks.is_first:
                folder = opened()
        path = ranks.gather_texts("" if folder is None else str(folder.path))[0]
        seen = _seen_by(Path(path), ranks)
        with ranks.together():
            if ranks.is_first:
                check_hosts(config.storage, is_shared=all(seen), is_one=all(seen) and ranks.num_nodes == 1)
        with ranks.together():
            if ranks.local_rank == 0 and not seen[ranks.rank]:
                folder = opened()
        of_host = ranks.gather_texts("" if folder is None else str(folder.path))[ranks.nodes()[ranks.rank]]
        yield folder or SearchFolder(Path(of_host or path), is_known=True)


def _seen_by(path: Path, ranks: Ranks) -> list[bool]:
    """Return for each rank whether it sees the first rank's folder, and not one of its own host with the same name."""
    if ranks.num_ranks == 1:
        return [True]
    mark = path / f".seen_{ranks.token}"
    with ranks.together():
        if ranks.is_first:
            with _writing(path):
                mark.touch()
    seen = [bool(found) for (found,) in ranks.gather([float(mark.exists())])]
    if ranks.is_first:
        with suppress(OSError):
            mark.unlink()
    return seen


def check_hosts(storage: str | None, *, is_shared: bool, is_one: bool, who: str = "ranks") -> None:
    """Raise UserError if there are several hosts whose searchers would not share what they find."""
    kind = (storage or "").partition("://")[0].partition("+")[0]
    if is_one or kind in _SERVERS or (is_shared and storage is None):
        return
    folder = "share" if is_shared else "do not share"
    raise UserError(
        f"{who} on several hosts need a storage that all of them reach, got storage={written(storage)} and an "
        f"output_dir that they {folder}; set storage=postgresql://USER@HOST/NAME, or storage=null with an output_dir "
        "that they share."
    )


def mark_joined(folder: SearchFolder) -> None:
    """Keep the worker that began a search there from taking the folder back, as this one goes on in it."""
    _joined(folder.path)


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
    except (UserError, RankError) as error:
        if not folder.is_known and error.exit_code == UserError.exit_code:
            with suppress(UserError), _one_at_a_time(_lock_of(folder.path)):
                _take_back(folder)
        raise


@contextmanager
def told_how_to_go_on(config: SearchConfig, folder: SearchFolder) -> Iterator[None]:
    """Add to a second Ctrl-C, for which nothing else is said, how the search goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        again = "the same command" if config.resume else "the same command with resume=auto"
        interrupt.add_note(f"{again} goes on in {folder.path}, where every finished rung is kept")
        raise


def _take_back(folder: SearchFolder) -> None:
    """Remove what was begun, unless another worker needs it. Workers that may join wait meanwhile."""
    if any((folder.path / name).exists() for name in (_JOINED_FILE, TRIALS_FOLDER)):
        return
    if folder.is_made:
        shutil.rmtree(folder.path, ignore_errors=True)
        return
    for name in (CONFIG_FILE, CONSOLE_LOG, LAUNCH_FILE, _LOCK_FILE):  # the rest is somebody's
        with suppress(OSError):
            (folder.path / name).unlink()


def _lock_of(path: Path) -> Path:
    """Return the lock file: beside an experiment's folders, else in the folder, as what is around it is not ours."""
    beside = path.parent / _LOCK_FILE
    return beside if beside.exists() else path / _LOCK_FILE


def _named(
    path: Path, ours: Mapping[str, Any], config: SearchConfig, text: str, launch: Launch | None, asked: str
) -> SearchFolder:  # fmt: skip
    is_made = not path.exists()
    _has_search(path, ours, config, asked)  # before anything is written there
    with _one_at_a_time(_lock_of(make_folder(path))):
        if _has_search(path, ours, config, asked):  # others may have begun one meanwhile, or have taken it back
            return _joined(path)
        return SearchFolder(_begun(make_folder(path), config, text, launch), False, is_made)


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


def _relaunched(config: SearchConfig, launch: Launch | None) -> SearchConfig:
    """Return the configuration, with resume=auto if torchrun restarted the ranks of a search that they had begun."""
    if launch is None or config.resume is not None:
        return config
    named = [given_path("output_dir", config.output_dir)] if config.output_dir else []
    for path in named or recorded_folders(config.experiment):
        is_over = read_json(path / SEARCH_FILE).get("status") == _FINISHED
        if is_of_launch(path, launch) and (named or not is_over):
            return dataclasses.replace(config, resume="auto", output_dir=str(path))
    return config


def _newest_to_go_on(config: SearchConfig, ours: Mapping[str, Any]) -> Path | None:
    for path in recorded_folders(config.experiment):
        found = read_yaml(path / CONFIG_FILE)
        is_over = read_json(path / SEARCH_FILE).get("status") == _FINISHED
        # A finished search begins anew in another folder; in a storage of its own it would be finished there too.
        is_kept = config.storage is not None and all(found.get(key) == getattr(config, key) for key in _WHERE)
        if (is_kept or not is_over) and not changes(found, ours):
            return path
    return None


def _begun(path: Path, config: SearchConfig, text: str, launch: Launch | None) -> Path:
    storage = config.storage or ""
    with _writing(path):
        (path / _JOINED_FILE).unlink(missing_ok=True)
        write_atomically(path / CONFIG_FILE, text, private=without_secrets(storage) != storage)
        if launch is not None:
            write_launch(path, launch)
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
