"""Hydra's own side of a command: its configuration, what it knows, and its launchers.

A launcher is a plugin of Hydra that starts jobs elsewhere: joblib in processes, submitit on a cluster. It gets a job
for each run of a sweep. Such a job is the run's own command line and nothing else. So a run does there what it does
alone, and no configuration has to travel.

What Hydra does not promise to keep is used here alone: `hydra._internal.callbacks`, and of the initialized Hydra its
`config_loader` and `show_info`. Tried with hydra-core 1.3.8, hydra-joblib-launcher 1.2.0 and hydra-submitit-launcher
1.2.0.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from crossbow_py.cli.commands import run_command
from crossbow_py.cli.config_files import one_line_of, write_yaml
from crossbow_py.cli.configuration import (
    COMPOSITION_ERRORS,
    CommandConfig,
    command_of,
    searched,
    settled_words,
    to_plain,
    with_interpolations,
)
from crossbow_py.cli.flags import Flags
from crossbow_py.cli.hydra_words import HydraWords
from crossbow_py.cli.launchers import LaunchError
from crossbow_py.cli.output_folder import RUNS
from crossbow_py.cli.overrides import as_override, escaped
from crossbow_py.core.errors import UserError
from crossbow_py.core.printing import print_line
from crossbow_py.core.settings import shown, suggestion, written
from crossbow_py.core.signals import EXIT_TERMINATED
from crossbow_py.distributed.launch import end_with_parent

Job = tuple[str, list[str]]  # the name of a run of a sweep, and its command line

# Runs log by themselves, write their own files, and stay in the current folder.
_OURS = (
    "hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null", "hydra.job.chdir=false",
)  # fmt: skip
_GROUP = "hydra/launcher"
_NUMBER = "job_of_the_sweep"
_ONE_PROCESS = ("nodes", "tasks_per_node")  # settings of submitit by which a job becomes several processes


def config_text(
    flags: Flags, kind: type[CommandConfig], config: CommandConfig, words: Sequence[str], given: HydraWords
) -> str:
    """Return what --cfg shows: the whole configuration of a run, Hydra's own, or both, as YAML. Raises UserError."""
    parts: dict[str, Any] = {}
    if flags.cfg != "job":
        parts["hydra"] = _hydra_mapping(flags, kind, config, words, given)
    if flags.cfg != "hydra":
        job = to_plain(config)
        if not flags.resolve:
            own = [word for word in words if not word.startswith("config=")]  # recorded values are no interpolations
            job = _as_written(job, with_interpolations(own, kind, flags.config_name))
        parts |= job
    if flags.package in (None, "_global_"):
        return write_yaml(parts).rstrip("\n")
    part = _beneath(str(flags.package), parts)
    if not isinstance(part, Mapping | list):
        return written(part)
    return f"# @package {flags.package}\n{write_yaml(part)}".rstrip("\n")


def info_text(flags: Flags, kind: type[CommandConfig], words: Sequence[str], given: HydraWords) -> str:
    """Return what Hydra's own --info shows. Raises UserError."""
    text, root = io.StringIO(), logging.getLogger()
    level, handlers, config = root.level, list(root.handlers), HydraConfig.instance().cfg
    own = settled_words([word for word in words if not word.startswith("config=")], kind)
    try:
        with searched(kind, flags.config_name) as (name, folders), contextlib.redirect_stdout(text):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None, "it has just been initialized"
            hydra.show_info(str(flags.info), config_name=name, overrides=[*own, *given.of_launcher, *folders])
    except COMPOSITION_ERRORS as error:
        raise UserError(f"{one_line_of(error).rstrip('.')}; --help explains the keys.") from error
    finally:  # it logs, by handlers that it adds
        root.setLevel(level)
        root.handlers[:] = handlers
        HydraConfig.instance().cfg = config
    return text.getvalue().strip("\n")


def launch(kind: type[CommandConfig], given: HydraWords, jobs: Sequence[Job], folder: Path) -> list[int]:
    """Start the runs of a sweep by a launcher of Hydra, and wait for them. Return their exit codes.

    Args:
        kind: the command's configuration class.
        given: the launcher, and the words that set its keys.
        jobs: the runs.
        folder: for what the launcher itself writes; made here, and removed if nothing is in it.

    Raises:
        UserError: the launcher is not there, or it has no such setting.
        LaunchError: the launcher failed.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"{_GROUP}={given.launcher} starts processes, and so does torchrun; leave one of them out.")
    words = [f"hydra.sweep.dir={as_override(str(folder))}", "hydra.sweep.subdir=.", "hydra.mode=MULTIRUN"]
    config, loader = _compose(kind, None, given, words, RunMode.MULTIRUN)
    for key in _ONE_PROCESS:
        if (number := config.hydra.launcher.get(key)) not in (None, 1):
            raise UserError(
                f"hydra.launcher.{key} must be 1, got {shown(number)}: a run of a sweep is one process; leave it out, "
                "and start runs of several processes by torchrun."
            )
    task = partial(run_job, command_of(kind), str(Path.cwd()), os.getpid(), list(jobs))
    print_line(f"{_GROUP}={given.launcher} starts {len(jobs)} run{'s' * (len(jobs) > 1)}", sys.stdout)
    try:
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(loader, Callbacks()), task_function=task, config=config
        )
        with _stopped_by_sigterm():
            returned = launcher.launch([[f"+{_NUMBER}={number}"] for number in range(len(jobs))], initial_job_idx=0)
            codes = [int(each.return_value) for each in returned]
        if len(codes) < len(jobs):
            raise RuntimeError(f"it has ended {len(codes)} of {len(jobs)} runs")
        return codes
    except _Terminated:
        return [EXIT_TERMINATED]
    except Exception as error:
        raise LaunchError(f"{_GROUP}={given.launcher}", error) from error
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def run_job(command: str, folder: str, sweep: int, jobs: Sequence[Job], config: DictConfig) -> int:
    """Run one job of a sweep, wherever the launcher has put it. Return its exit code.

    Args:
        command: the command, such as train.
        folder: the current folder of the sweep.
        sweep: the number of its process.
        jobs: all jobs of the sweep.
        config: what Hydra composed for this job, of which only its number counts.
    """
    end_with_sweep(sweep)
    number = int(config[_NUMBER])
    name, words = jobs[number]
    print_line(f"run {number + 1} of {len(jobs)}{name}", sys.stdout)
    with contextlib.chdir(folder):
        return run_command(command, words)


def end_with_sweep(sweep: int) -> None:
    """End this process with that of the sweep, even if that is killed, if it has started this one, as joblib does."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != sweep:  # a cluster's jobs go on
        return
    end_with_parent(signal.SIGKILL)  # after SIGTERM it would begin with the next run
    if os.getppid() != sweep:
        signal.raise_signal(signal.SIGKILL)


class _Terminated(BaseException):
    """SIGTERM has arrived while a launcher was at work."""


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Raise _Terminated at SIGTERM, so that a launcher ends its processes, as it does at Ctrl-C."""

    def stop(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _compose(
    kind: type[CommandConfig], config_name: str | None, given: HydraWords, overrides: Sequence[str], mode: RunMode
) -> tuple[DictConfig, ConfigLoader]:
    """Return a configuration with Hydra's own in it, and what loads such configurations. Raises UserError."""
    try:
        with searched(kind, config_name) as (name, folders):
            loader = GlobalHydra.instance().config_loader()
            _check_launcher(given.launcher, loader.get_group_options(_GROUP, config_name=name, overrides=folders))
            words = [*_OURS, *given.of_launcher, *overrides, *folders]
            return loader.load_configuration(name, words, mode, from_shell=False), loader
    except COMPOSITION_ERRORS as error:
        remedy = f"--cfg hydra -p hydra.launcher with {_GROUP}=NAME shows its settings"
        raise UserError(f"{one_line_of(error).rstrip('.')}; {remedy}.") from error


def _check_launcher(name: str, known: Sequence[str]) -> None:
    if name not in known:
        others = "Others are plugins, such as hydra-joblib-launcher and hydra-submitit-launcher; launcher=ray is ours."
        raise UserError(f"unknown {_GROUP} {shown(name)}{suggestion(name, set(known))} {others}")


def _hydra_mapping(
    flags: Flags, kind: type[CommandConfig], config: CommandConfig, words: Sequence[str], given: HydraWords
) -> dict[str, Any]:
    """Return Hydra's own configuration as it is here, without its texts of help."""
    own = [word for word in words if not word.startswith("config=")]
    composed, _ = _compose(kind, flags.config_name, given, settled_words(own, kind), RunMode.RUN)
    plain: Any = OmegaConf.to_container(composed.hydra, resolve=False, enum_to_str=True)
    del plain["help"], plain["hydra_help"]
    plain["overrides"]["task"] = list(words)
    plain["job"]["override_dirname"] = ",".join(sorted(words))
    folder = with_interpolations(own, kind, flags.config_name).get("output_dir")
    folder = folder or f"{RUNS}/{escaped(config.experiment)}/${{now:%Y-%m-%d_%H-%M-%S}}"
    plain["run"]["dir"] = folder
    plain["sweep"] = {"dir": given.sweep_dir or folder, "subdir": given.sweep_subdir}  # null: what is swept
    if not flags.resolve:
        return dict(plain)
    try:
        root = OmegaConf.create({**escaped(to_plain(config)), "hydra": plain})
        resolved: Any = OmegaConf.to_container(root["hydra"], resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{one_line_of(error).rstrip('.')}, before a job runs; leave --resolve out.") from error
    return dict(resolved)


def _as_written(values: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with interpolations where `texts`, the same before they are resolved, have any."""

    def one(value: Any, text: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(text, Mapping):
            return _as_written(value, text)
        return text if not isinstance(text, Mapping) and "${" in str(text) else value

    return {key: one(value, texts.get(key)) for key, value in values.items()}


def _beneath(package: str, parts: Mapping[str, Any]) -> Any:
    """Return what is beneath a dotted key. Raises UserError."""
    part: Any = parts
    for name in package.split("."):
        if not isinstance(part, Mapping) or name not in part:
            known = part if isinstance(part, Mapping) else ()
            raise UserError(f"--package {shown(package)} is no key of this configuration{suggestion(name, known)}")
        part = part[name]
    return part
