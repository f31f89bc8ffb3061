"""Chooses the folder that a run writes to and what it resumes from, and locks the folder.

A folder *holds a run* once it has a metrics line, a summary or a checkpoint. From then on only a resumed run may write
there, and it may change only stops, logging and paths.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.output_folder import make_folder, new_folder, recorded_folders
from crossbow_py.core.errors import RankError, UserError, unwritable
from crossbow_py.core.files import check_own, given_path, is_locked, locked
from crossbow_py.core.plain_values import differences, filled, without
from crossbow_py.distributed.launch import LAUNCH_FILE, Launch, is_of_launch, this_launch, write_launch
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.profile import PROFILE_FILE, TABLE_FILE
from crossbow_py.telemetry.records import (
    CONFIG_FILE,
    CONFUSION_FILES,
    METRICS_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    read_summary,
    write_atomically,
)
from crossbow_py.telemetry.timeline import TRACE_FILE
from crossbow_py.train.checkpoints.checkpoint import FOLDER as CHECKPOINTS_FOLDER
from crossbow_py.train.checkpoints.checkpoint import checkpoints, holds_run, upgraded
from crossbow_py.train.checkpoints.weights import ADAPTER_FOLDER, MODEL_FILE
from crossbow_py.train.config import TrainConfig, config_to_mapping

LOCK_FILE = ".lock"
_FILES = (
    CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, MODEL_FILE, CONSOLE_LOG, LOCK_FILE, LAUNCH_FILE, TRACE_FILE, PROFILE_FILE,
    TABLE_FILE, *CONFUSION_FILES.values(),
)  # fmt: skip
DONE = ("finished", "target_reached")
MAY_CHANGE = frozenset(
    {"max_epochs", "max_samples", "max_rounds", "max_time_s", "target_accuracy", "target_loss"}
    | {"patience", "restore_best"}
    | {"checkpoint_every_epochs", "checkpoint_every_s", "keep_checkpoints"}
    | {"resume", "output_dir", "data.root", "on_nonfinite", "max_learners", "trace", "profile", "compile_model"}
    | {"num_workers", "data.folder", "data.cache_dir", "data.max_bad_images", "data.worker_timeout_s"}
    | {"distributed.timeout_s", "distributed.check_every_rounds", "auto_tuner.objective", "learning_statistics"}
    | {"metrics", "evaluations_per_epoch", "logger", "listeners", "cache_features"}
)

_NOTHING_TO_RESUME = "There is no checkpoint of an unfinished run configured like this to resume from: starting afresh."


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, the run folder or checkpoint that it resumes from (None: a fresh start), and a message."""

    path: Path
    resume: Path | None
    note: str | None


@contextmanager
def open_run(config: TrainConfig, ranks: Ranks = ALONE) -> Iterator[RunFolder]:
    """Choose and lock the run's folder and write its config.yaml; the lock is held until the block is left.

    The first rank does so for all ranks. A folder made here is removed again if the block ends with a UserError before
    anything was trained.

    Raises:
        UserError: the folder holds a run and `resume` is not set, it cannot be written, or another process is writing
            to it; the checkpoint asked for does not exist; the configuration differs in more than stops, logging and
            paths; or another host does not see the folder.
    """
    launch = this_launch(ranks)
    with ExitStack() as stack:

        def enter() -> str:
            folder = stack.enter_context(_opened(config, launch))
            return json.dumps([str(folder.path), str(folder.resume) if folder.resume else None, folder.note])

        path, resume, note = json.loads(ranks.from_first(enter))
        with ranks.together():
            if not (Path(path) / CONFIG_FILE).is_file():
                raise UserError(
                    f"output_dir {path}, which rank 0 writes to, is not seen from this host; set output_dir to a "
                    "folder of a file system that all hosts share."
                )
        yield RunFolder(Path(path), Path(resume) if resume else None, note)


@contextmanager
def _opened(config: TrainConfig, launch: Launch | None) -> Iterator[RunFolder]:
    config = _relaunched(config, launch)
    plain = config_to_mapping(config)
    text = write_yaml(plain)  # first, so that an error leaves no folder behind
    resume, source = _resume_from(config, plain)
    chosen = given_path("output_dir", config.output_dir) if config.output_dir else source
    made = chosen is None or not chosen.exists()
    path = new_folder(config.experiment) if chosen is None else make_folder(chosen)
    _check_own(path)
    # A search could not resume without its own configuration.
    if (path / CONFIG_FILE).is_file() and "space" in read_yaml(path / CONFIG_FILE):
        raise UserError(f"output_dir {path} holds a search, not a run; choose another folder.")
    with _locked(path):
        continues = config.resume == "auto" or (source is not None and path.resolve() == source.resolve())
        if holds_run(path) and not continues:
            raise UserError(
                f"output_dir {path} already holds a run; continue it with resume=auto or choose another folder."
            )
        if resume is None:  # a run killed before its first checkpoint starts afresh
            for name in (METRICS_FILE, SUMMARY_FILE):
                (path / name).unlink(missing_ok=True)
        try:
            write_atomically(path / CONFIG_FILE, text)
            if launch is not None:
                write_launch(path, launch)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            yield RunFolder(path, resume, _NOTHING_TO_RESUME if config.resume and resume is None else None)
        except (UserError, RankError) as error:
            if made and error.exit_code == UserError.exit_code and not holds_run(path):
                shutil.rmtree(path, ignore_errors=True)
            raise


def _check_own(run: Path) -> None:
    """Raise UserError for a folder in which a file of the run is a link or a pipe."""
    try:
        check_own(run, _FILES, (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER, ADAPTER_FOLDER))
    except OSError as error:
        raise unwritable(run, error) from error


def _relaunched(config: TrainConfig, launch: Launch | None) -> TrainConfig:
    """Return the configuration, with resume=auto if torchrun restarted the ranks of a run that it had begun."""
    if launch is None or config.resume is not None:
        return config
    named = [given_path("output_dir", config.output_dir)] if config.output_dir else []
    for path in named or recorded_folders(config.experiment):
        # Also a finished run's folder if it was named, as in a sweep: then nothing is left to train.
        if is_of_launch(path, launch) and (named or read_summary(path).get("status") not in DONE):
            return dataclasses.replace(config, resume="auto", output_dir=str(path))
    return config


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return `key: old → new` for every key that differs and that a resume may not change; see `upgraded`."""
    kept = without(new, MAY_CHANGE)
    return differences(filled(upgraded(without(old, MAY_CHANGE), kept), kept), kept)


def run_of(asked: Path) -> Path:
    """Return a run's folder, given that, its checkpoints folder, or one checkpoint. Raises UserError."""
    for folder in (asked / CHECKPOINTS_FOLDER, asked, asked.parent):
        if asked.exists() and folder.name == CHECKPOINTS_FOLDER and checkpoints(folder.parent):
            return folder.parent
    raise UserError(
        f"resume={asked} is not a run folder with checkpoints, nor a checkpoint in one; "
        "give such a path, or resume=auto for the newest."
    )


def _resume_from(config: TrainConfig, plain: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
    """Return the path to resume from and the folder of its run; both None for a fresh start."""
    if config.resume is None:
        return None, None
    if config.resume == "auto":
        asked = given_path("output_dir", config.output_dir) if config.output_dir else None
        run = asked or _newest_unfinished(config.experiment, plain)
        if run is None or not checkpoints(run):
            return None, None
        asked = run
    else:
        asked = given_path("resume", config.resume)
        run = run_of(asked)
    _check_own(run)
    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"cannot resume {run}: it has no {CONFIG_FILE}; restore it or start in another output_dir.")
    if changed := changes(read_yaml(run / CONFIG_FILE), plain):
        raise UserError(
            f"resuming {run} may change only stops, logging and paths, got {', '.join(changed)}; "
            "put these back, or start a new run with another output_dir."
        )
    return asked, run


def _newest_unfinished(experiment: str, plain: Mapping[str, Any]) -> Path | None:
    """Return the experiment's newest unfinished run with this configuration that no other process is writing."""
    for run in filter(checkpoints, recorded_folders(experiment)):
        if read_summary(run).get("status") in DONE or is_locked(run / LOCK_FILE):
            continue
        if not changes(read_yaml(run / CONFIG_FILE), plain):
            return run
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:

    def busy() -> None:
        raise UserError(f"{path} is being written by another process; wait for it or set output_dir.")

    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path / LOCK_FILE, busy))
        except OSError as error:
            raise unwritable(path, error) from error
        yield
