"""What a command may do with anything: the run it was asked for, or one line that says what is wrong with it."""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from crossbow_py.cli.config_files import write_yaml
from crossbow_py.cli.configuration import compose
from crossbow_py.predict.config import PredictConfig
from crossbow_py.predict.trained_models import common_data, find_models
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import SearchFolder
from crossbow_py.train.config import config_to_mapping
from crossbow_py.train.run_folder.folder import RunFolder
from tests.run_folders import write_run

SECONDS = 20  # of CPU time, for what takes a tenth of one; pytest's own clock ends what only waits
LONGEST_LINE = 1000


class Hang(BaseException):
    """A command took longer than it may."""


@dataclass
class Outcomes:
    """How many commands ran and how many were refused; what must not be, each with how it was called."""

    kind: str
    ran: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def __str__(self) -> str:
        total = self.ran + self.refused + len(self.failures)
        done = f"{self.ran:,} ran, {self.refused:,} refused, {len(self.failures)} failed"
        return f"{total:,} {self.kind}: {done}; the slowest took {self.slowest_s:.1f} s"


class Watched:
    """The current folder, with runs and a search in it, and what commands do there; home is beside it.

    Commands go as far as their folders and what they read of others', but train, measure and draw nothing.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._kept = folder / "watched", folder / "kept"
        here = self._kept / "between" / "here"
        here.mkdir(parents=True)
        _write_folders(here)
        shutil.copytree(self._kept, self._root)
        patch.chdir(self._root / "between" / "here")
        patch.setenv("HOME", str(self._root / "home"))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        self._written: list[Path] = []  # folders that a command's own work was given
        _stop_before_work(patch, self._written)
        self._before = self._files()

    def call(self, name: str, argv: Sequence[str], outcomes: Outcomes, place: str) -> None:
        """Call a command and sort what it does; afterwards the folder is as it was."""
        called = f"{place}: {name} {list(argv)!r}"[:2000]
        before, began = self._files(), time.process_time()
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as a terminal is: not every text can be printed
        stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _at_most(SECONDS):
                code = importlib.import_module(f"crossbow_py.{name}.__main__").main(list(argv))
        except BaseException:  # Hang, and SystemExit too, which is no way to refuse anything
            outcomes.failures.append(f"{called}\n{traceback.format_exc()[-4000:]}")
            return
        finally:
            outcomes.slowest_s = max(outcomes.slowest_s, time.process_time() - began)
            strange = self._put_back(before)
        stderr.seek(0)
        said = stderr.read()
        problem = _problem(code, said, is_swept="-m" in argv or "--multirun" in argv)
        if problem or strange:
            outcomes.failures.append(f"{called}\nexit code {code}, {problem}, wrote {strange}: {said}")
        elif code == 0:
            outcomes.ran += 1
        else:
            outcomes.refused += 1

    def _files(self) -> dict[Path, int]:
        """All files with when they were changed, and all folders."""
        return {path: 0 if path.is_dir() else path.lstat().st_mtime_ns for path in self._root.rglob("*")}

    def _put_back(self, before: Mapping[Path, int]) -> list[str]:
        """Undo what was done; returns what of it was outside the folders that were written to and `runs`' folders."""
        after, allowed = self._files(), [path.resolve() for path in self._written]
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        runs = Path.cwd() / "runs"
        strange = [
            str(path) for path in changed
            if not any(path.resolve().is_relative_to(own) or own.is_relative_to(path.resolve()) for own in allowed)
            and not (path.is_relative_to(runs) and (path.is_dir() or path.name == ".search.lock"))
        ]  # fmt: skip
        self._written.clear()
        if before != self._before or changed:
            for path in Path.cwd().iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for path in self._files().keys() - self._before.keys():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)  # its folder may be gone
            shutil.copytree(self._kept, self._root, dirs_exist_ok=True)
        return sorted(strange)


def _problem(code: int, said: str, is_swept: bool) -> str | None:
    """What is wrong with what was said, if anything."""
    if "Traceback" in said or code not in (0, 2):
        return "a fault of ours"
    lines = said.removesuffix("\n").split("\n") if said else []
    if code == 0:
        return "something is said of a success" if lines else None
    if not lines or (len(lines) > 1 and not is_swept):
        return f"{len(lines)} lines are said of a mistake"
    for line in lines:
        if not line.startswith("error: "):
            return "a line is no error"
        if not line.isprintable():
            return "a line would steer the terminal"
        if len(line) > LONGEST_LINE:
            return f"a line has {len(line)} characters"
        if line[-1] not in ".?":
            return "a line is no sentence"
    return None


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises Hang in what takes longer, by the process's own time: other processes do not make a hang of it."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Hang

    handler = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def _stop_before_work(patch: pytest.MonkeyPatch, written: list[Path]) -> None:

    def build_trainer(config: Any, folder: RunFolder, *others: Any) -> Any:
        written.append(folder.path)
        return SimpleNamespace(fit=lambda **stops: SimpleNamespace(status="finished"))

    class SearchRun:
        def __init__(self, config: SearchConfig, folder: SearchFolder, listeners: Any) -> None:
            written.append(folder.path)

        def run(self, stopped: Callable[[], str | None]) -> Any:
            return SimpleNamespace(status="finished", best="one")

        def close(self) -> None:
            pass

    def answer(config: PredictConfig) -> int:
        models = find_models(config.models, config.targets)
        if config.data is None:
            common_data(models, config.targets)
        return 0

    patch.setattr("crossbow_py.train.__main__.build_trainer", build_trainer)
    patch.setattr("crossbow_py.search.searcher.SearchRun", SearchRun)
    patch.setattr("crossbow_py.predict.__main__.answer", answer)
    patch.setattr("crossbow_py.estimate.__main__.answer", lambda config: 0)
    patch.setattr("crossbow_py.report.charts.all_charts", lambda runs: ())
    patch.setattr("crossbow_py.cli.command_line.launch", lambda kind, given, jobs, folder: [0 for _ in jobs])
    patch.setattr("crossbow_py.cli.command_line.place_jobs", lambda _, name, devices, jobs, resumes: [0 for _ in jobs])
    patch.setattr("crossbow_py.search.__main__.search_elsewhere", lambda config, launcher, words: 0)
    original = importlib.import_module("crossbow_py.report.__main__").make_folder

    def make_folder(path: Path) -> Path:
        written.append(path)
        return original(path)  # type: ignore[no-any-return]

    patch.setattr("crossbow_py.report.__main__.make_folder", make_folder)


def _write_folders(root: Path) -> None:
    """Runs that ended, with a model and a checkpoint, and a search with its best: see `command_lines.FOLDERS`."""
    for name, overrides in (("digits/a", []), ("digits/b", ["seed=1"]), ("lenet/a", ["model=lenet"])):
        run = write_run(root / "runs" / name, *overrides)
        _finish(run)
    search = root / "runs/search_digits/s"
    _finish(write_run(search / "best"))
    plain = config_to_mapping(compose(["+experiment=search_digits"], SearchConfig))
    (search / "config.yaml").write_text(write_yaml(plain), encoding="utf-8")


def _finish(run: Path) -> None:
    for name in ("model.safetensors", ".lock"):
        (run / name).touch()
    (run / "checkpoints" / "samples-000000001000").mkdir(parents=True)
