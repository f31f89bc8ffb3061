"""The command line of every entry point: flags, one job or a multirun, and errors turned into exit codes.

0 done · 2 the user's mistake · 143 after SIGTERM · 130 after Ctrl-C · 1 a non-finite loss, data that
cannot be loaded, too little memory, a search that cannot go on, or a bug of ours
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

from crossbow_py.cli.completion import completion_script
from crossbow_py.cli.config_files import added_config_dir
from crossbow_py.cli.configuration import C, check_plus, command_of, compose, filled_in, options_for
from crossbow_py.cli.flags import Flags, read_flags
from crossbow_py.cli.help_text import help_text, list_text
from crossbow_py.cli.hydra_app import config_text, info_text, launch
from crossbow_py.cli.hydra_words import BASIC, HydraWords, split_hydra
from crossbow_py.cli.launchers import LaunchError
from crossbow_py.cli.launchers.placement import RayLauncher
from crossbow_py.cli.launchers.ray_sweep import place_jobs
from crossbow_py.cli.launchers.words import split_launcher
from crossbow_py.cli.output_folder import RUNS, time_name
from crossbow_py.cli.overrides import as_override, expand_sweeps
from crossbow_py.core.errors import (
    CentralModelError,
    DataError,
    NonFiniteError,
    RankError,
    RankLostError,
    SearchError,
    UserError,
    one_line,
    raised_at,
)
from crossbow_py.core.files import given_path
from crossbow_py.core.printing import columns, print_line, standard_streams
from crossbow_py.core.settings import shown, suggestion
from crossbow_py.core.signals import EXIT_INTERRUPTED, StopSignal
from crossbow_py.core.switches import read_switches
from crossbow_py.engine.device.host import flushed_denormals
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.telemetry.figures import MOST_RUNS, RecordedRun, by_setting, figures, seed_means
from crossbow_py.telemetry.records import read_summary

_EXPECTED_ERRORS = (
    UserError, NonFiniteError, DataError, RankError, RankLostError, CentralModelError, SearchError, LaunchError,
)  # fmt: skip
_LONGEST_SHOWN = 200
# Errors of the machine and no bugs of ours, with the remedy.
_REFUSALS = {
    errno.EMFILE: "allow a process more open files (ulimit -n), or lower num_workers",
    errno.ENFILE: "end what else has files open on this machine",
    errno.EAGAIN: "allow more processes and threads (ulimit -u), or lower num_workers and num_learners",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "name another folder, or have this one made writable",
    errno.EIO: "look at that disk",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_SMALLER = (
    "lower batch_size, num_learners or max_learners, or end what else uses the device. python -m crossbow_py.estimate "
    "with the same keys says what fits."
)
_LONGEST_LINE = 800
_MANY = 20  # configurations
_SWEPT = re.compile(r"([\w.]+)=([^,)]*)")  # in the name of a run of a sweep
# The columns of the table at the end of a sweep.
_SWEEP_FIGURES = (
    "status", "test accuracy", "best validation accuracy", "time to accuracy", "time of training", "images/s",
)  # fmt: skip

Composing = Callable[[Sequence[str], type[C], str | None], C]
Placing = Callable[[C, RayLauncher, Sequence[str]], int]


@dataclass(frozen=True)
class _Command(Generic[C]):
    """The parts of a command; see `run`."""

    kind: type[C]
    job: Callable[[C], int]
    composed: Composing[C]
    placed: Placing[C] | None
    settled: Callable[[list[str]], list[str]]


def run(
    argv: Sequence[str] | None, kind: type[C], job: Callable[[C], int], composed: Composing[C] = compose,
    placed: Placing[C] | None = None, settled: Callable[[list[str]], list[str]] = list,
) -> int:  # fmt: skip
    """Run `job` once for every configuration that `argv` asks for, and return the worst exit code.

    Args:
        argv: the words of the command line; None for the process's own.
        kind: the command's configuration class, which defines the keys.
        job: runs the command with one configuration, and returns its exit code.
        composed: makes a configuration of words and the file to begin with.
        placed: runs one job by several processes that a launcher starts, of the same words; None if it cannot.
        settled: returns the words that are no flags as KEY=VALUE, where a command takes others too.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _Command(kind, job, composed, placed, settled)
    with standard_streams(), flushed_denormals():  # also in the threads that torch starts at its first operation
        return _guarded(lambda: _dispatch(arguments, command))


def run_with_text(argv: Sequence[str] | None, usage: str, job: Callable[[list[str]], int]) -> int:
    """Run `job` of a command without a configuration on the arguments themselves. Return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def dispatch() -> int:
        if "--help" in arguments or "-h" in arguments:
            return say(usage)
        option = next((argument for argument in arguments if argument.startswith("-")), None)
        if option:
            raise UserError(f"unknown option {option}{suggestion(option, ('--help', '-h'))}")
        return job(arguments)

    with standard_streams():
        return _guarded(dispatch)


def _dispatch(arguments: list[str], command: _Command[C]) -> int:
    kind = command.kind
    if "--help" in arguments or "-h" in arguments:
        return say(help_text(kind))
    flags, words = read_flags(arguments, [field.name for field in dataclasses.fields(kind)])
    if flags.completion is not None:
        return say(completion_script(flags.completion))
    with added_config_dir(flags.config_dir):
        if flags.list:
            return say(list_text(kind))
        read_switches()  # so that a mistake in them is found at once
        asked, rest = split_hydra(command.settled(words))
        launcher, own = split_launcher(rest)
        if flags.multirun:
            return _multirun(flags, asked, launcher, own, command)
        return _one_run(flags, asked, launcher, own, command)


def _one_run(
    flags: Flags, asked: HydraWords, launcher: RayLauncher | None, words: list[str], command: _Command[C]
) -> int:
    """Run one job, here or by processes that a launcher starts, or show what a flag asks for."""
    shows = flags.cfg is not None or flags.info is not None
    if not shows:
        asked.check_one_run()
        if launcher is not None and command.placed is None:
            raise UserError(f"launcher={launcher.NAME} is for the jobs of a sweep; add -m, also to start a single one.")
    own = asked.with_run_dir(words)
    config = command.composed(own, command.kind, flags.config_name)
    if flags.cfg is not None:
        return say(config_text(flags, command.kind, config, own, asked))
    if flags.info is not None:
        return say(info_text(flags, command.kind, own, asked))
    if launcher is not None and command.placed is not None:
        return command.placed(config, launcher, [*flags.of_every_job, *own])
    return command.job(config)


def _multirun(
    flags: Flags, asked: HydraWords, launcher: RayLauncher | None, words: list[str], command: _Command[C]
) -> int:
    """Run every combination of what `words` list. All are composed first, so that a mistake in the last is found."""
    asked.check_sweep(words)
    if launcher is not None and asked.launcher != BASIC:
        raise UserError(f"launcher={launcher.NAME} and hydra/launcher={asked.launcher} exclude each other; choose one.")
    for word in words:
        check_plus(word, command.kind)
    jobs = expand_sweeps(words, partial(options_for, kind=command.kind))
    configs = _in_own_folders(_all_composed(flags, [each for each, _ in jobs], command), jobs, asked)
    names = [_run_name(config.output_dir, swept) for config, (_, swept) in zip(configs, jobs, strict=True)]
    titles = [f": {name}" if name else "" for name in names]
    if asked.launcher == BASIC and launcher is None:
        code = _one_after_another(configs, titles, command.job)
    else:
        code = _guarded(partial(_launched, flags, asked, launcher, [each for each, _ in jobs], configs, titles))
    folders = {
        given_path("output_dir", each.output_dir): name
        for each, name in zip(configs, names, strict=True)
        if each.output_dir
    }
    for line in sweep_lines(folders) if _is_first("RANK") else ():
        print_line(line, sys.stdout)
    return code


def _run_name(folder: str | Path | None, swept: str) -> str:
    """Return the name of a run of a sweep: its folder's, and what is swept if that does not say it."""
    name = Path(folder).name if folder else ""
    if not name or not swept or swept in name:
        return name or swept
    return f"{name} ({swept})"


def _all_composed(flags: Flags, jobs: Sequence[list[str]], command: _Command[C]) -> list[C]:
    """Return the configurations of jobs, of which each takes a tenth of a second."""
    if len(jobs) > _MANY and _is_first("RANK"):
        print_line(f"checks the configurations of {len(jobs)} runs", sys.stdout)
    return [command.composed(words, command.kind, flags.config_name) for words in jobs]


def _one_after_another(configs: Sequence[C], names: Sequence[str], job: Callable[[C], int]) -> int:
    """Run jobs until one is stopped from outside. Return the worst exit code."""
    worst = 0
    for number, (config, name) in enumerate(zip(configs, names, strict=True), start=1):
        if _is_first("RANK"):
            print_line(f"run {number} of {len(configs)}{name}", sys.stdout)
        code = _guarded(partial(job, config))
        worst = max(worst, code)
        if code in StopSignal.EXIT_CODES.values():
            break
    return worst


def _launched(
    flags: Flags, asked: HydraWords, launcher: RayLauncher | None, jobs: Sequence[list[str]], configs: Sequence[C],
    names: Sequence[str],
) -> int:  # fmt: skip
    """Hand jobs to a launcher, ours or Hydra's, each as a command line with its folder. Return the worst exit code."""
    kind, folders = type(configs[0]), [each.output_dir for each in configs]
    lines = [
        [*flags.of_every_job, *words, *([f"output_dir={as_override(folder)}"] if folder else [])]
        for words, folder in zip(jobs, folders, strict=True)
    ]
    named = list(zip(names, lines, strict=True))
    if launcher is not None:
        devices = [getattr(config, "device", "cpu") for config in configs]
        resumes = kind.NEEDS_FOLDER and "resume" in (field.name for field in dataclasses.fields(kind))
        return max(place_jobs(launcher, command_of(kind), devices, named, resumes=resumes))
    parents = [given_path("output_dir", folder).absolute().parent for folder in folders if folder]
    parent = Path(os.path.commonpath(parents) if parents else RUNS / configs[0].experiment / time_name())
    return max(launch(kind, asked, named, parent.absolute()))


def _in_own_folders(configs: Sequence[C], jobs: Sequence[tuple[list[str], str]], asked: HydraWords) -> list[C]:
    """Return the configurations with a folder each, named after the job's swept values or by hydra.sweep."""
    now = time_name()
    given = {"dir": asked.sweep_dir, "subdir": asked.sweep_subdir}
    texts = {key: text for key, text in given.items() if text is not None}
    if not texts:
        return [_in_own_folder(config, swept, now) for config, (_, swept) in zip(configs, jobs, strict=True)]
    command = command_of(type(configs[0]))
    if "output_dir" not in (field.name for field in dataclasses.fields(configs[0])):
        raise UserError(f"hydra.sweep names folders of results, and {command} writes none; leave it out.")
    filled = filled_in(texts, [(config, words) for config, (words, _) in zip(configs, jobs, strict=True)], command)
    found = []
    for config, (_, swept), own in zip(configs, jobs, filled, strict=True):
        parent = own.get("dir", config.output_dir)
        if "subdir" in own:
            path = Path(parent or RUNS / config.experiment / now) / own["subdir"]
            found.append(dataclasses.replace(config, output_dir=str(path)))
        else:
            found.append(_in_own_folder(dataclasses.replace(config, output_dir=parent), swept, now))
    folders = [config.output_dir for config in found]
    if "subdir" in texts and len(set(folders)) < len(folders):
        twice = shown(next(folder for folder in folders if folders.count(folder) > 1))
        raise UserError(f"hydra.sweep.subdir must name each run, got {twice} twice; add ${{hydra.job.num}} to it.")
    return found


def _in_own_folder(config: C, swept: str, now: str) -> C:
    """Return the configuration with a folder named after the job's swept values; `resume=auto` finds its own."""
    if not swept or (config.output_dir is None and (config.resume is not None or not config.NEEDS_FOLDER)):
        return config
    parent = Path(config.output_dir) if config.output_dir else RUNS / config.experiment / now
    return dataclasses.replace(config, output_dir=str(parent / swept))


def _guarded(action: Callable[[], int]) -> int:
    """Return the action's exit code, or that of the error it raised, which is printed on stderr."""
    try:
        return action()
    except _EXPECTED_ERRORS as error:
        # One rank prints it.
        is_said = error.is_said if isinstance(error, RankError) else error.after_joining or _is_first("LOCAL_RANK")
        if is_said:
            print_line(f"error: {_on_one_line(str(error))}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print_line("; ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as error:  # of a user's function, after which a run is not done
        said = f"sys.exit({'' if error.code is None else shown(error.code)})"
        print_line(f"error: {said}{raised_at(error)} is no way to end a run; raise an error there instead.", sys.stderr)
        return UserError.exit_code
    except Exception as error:
        if is_out_of_memory(error):
            cause = one_line(error.__cause__ or error)[:_LONGEST_SHOWN].rstrip(".")
            print_line(f"error: memory does not hold this ({cause}); {_SMALLER}", sys.stderr)
        elif isinstance(error, OSError) and error.errno in _REFUSALS:
            print_line(f"error: the system refuses this ({one_line(error)}); {_REFUSALS[error.errno]}.", sys.stderr)
        else:
            print_line(traceback.format_exc().rstrip(), sys.stderr)
        return 1


def _is_first(rank: str) -> bool:
    """Return whether this process is rank 0, by a variable that torchrun sets, or the only one."""
    return os.environ.get(rank, "0") == "0"


def _on_one_line(text: str) -> str:
    """Return text for a terminal: control characters are escaped, and the middle of a very long text is left out.

    The remedy is at the end, and stays.
    """
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(text.split()))
    half = _LONGEST_LINE // 2
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:half]} ... {shown[-half:]}"


def say(text: str) -> int:
    """Print text that was asked for, even if nobody reads it to the end. Return the exit code."""
    refusal = print_line(text, sys.stdout)
    if refusal is None or isinstance(refusal, BrokenPipeError):  # the reader has seen enough, as in `--list | head`
        return 0
    print_line(f"error: the output cannot be written ({one_line(refusal)}); send it elsewhere.", sys.stderr)
    return 1


def sweep_lines(folders: Mapping[Path, str]) -> list[str]:
    """Return a table of the runs in `folders`, with their names, that have ended; no lines for fewer than two."""
    ended = [(folder, summary) for folder in folders if (summary := read_summary(folder))]
    if len(ended) < 2:
        return []
    runs = [
        RecordedRun(folder=each, status=str(summary.get("status")), summary=summary, config=_swept(folders[each]))
        for each, summary in ended
    ]
    shown = [(name, values) for name, values in figures(runs) if name in _SWEEP_FIGURES]
    rows = [[folders[run.folder], *(values[index] for _, values in shown)] for index, run in enumerate(runs)]
    groups = by_setting(runs)
    means = dict(seed_means(groups))
    for index, (label, own) in enumerate(groups.items()):
        cells = (means[name][index] if name in means else "" for name, _ in shown)
        rows.append([f"mean of {label}" if label != "all" else f"mean of {len(own)}", *cells])
    table = columns(["run", *(name for name, _ in shown)], rows)
    said = ["± is a 95 % confidence interval over seeds."] if "±" in "".join(table) else []
    return ["", *table, "", *said, _report_line([each for each, _ in ended])]


def _swept(name: str) -> dict[str, str]:
    """Return the settings that a run of a sweep is named after; empty if commas in a value make them unclear."""
    found = dict(_SWEPT.findall(name))
    whole = ",".join(f"{key}={value}" for key, value in found.items())
    return found if name == whole or name.endswith(f"({whole})") else {}


def _report_line(folders: Sequence[Path]) -> str:
    """Return the command that compares runs: by the folder that holds these alone, else by their own."""
    command = "python -m crossbow_py.report"
    if len(folders) > MOST_RUNS:
        return f"compare up to {MOST_RUNS} of them: {command} {shlex.join(map(str, folders[:2]))}"
    parent = folders[0].parent
    beside = {path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")}
    given = [parent] if beside == set(folders) else folders
    return f"compare them: {command} {shlex.join(map(str, given))}"
