"""What is said of a search in plain lines: its facts, a value, where it stands, and what came of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbow_py.core.signals import StopSignal
from crossbow_py.search.events import SEARCH_FILE, BestTrial, SearchInfo, SearchProgress, SearchSummary, TrialRecord
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.standing import as_text, last_epochs, leader, short_names
from crossbow_py.telemetry.console import clock_time
from crossbow_py.telemetry.records import TENSORBOARD_FOLDER

_INDENT = " " * 17


def header_lines(info: SearchInfo) -> list[str]:
    """The search's facts."""
    brackets = f"{info.num_brackets} bracket{'s' if info.num_brackets > 1 else ''}"
    rungs = sorted({epochs for bracket in info.brackets for epochs in bracket.epochs})
    lines = [
        f"{info.experiment}: {info.num_trials} trials on {info.data}, {info.sampler} sampling, {info.method} in "
        f"{brackets}, measured at {_listed(rungs)} epochs",
        f"{'greatest' if info.maximize else 'least'} {_metric(info)} wins · packing {info.policy} · {info.device} · "
        f"{info.precision} · seed {info.seed} · worker {info.worker}",
        f"storage {info.storage}",
    ]
    if info.output_dir:
        lines.append(f"writing to {info.output_dir}")
    if info.num_finished_segments:
        planned = sum(sum(bracket.sizes) for bracket in info.brackets)
        lines.append(f"going on: {info.num_finished_segments} of {planned} rungs are done")
    return lines


def value_line(info: SearchInfo, trial: TrialRecord, epochs: float, *, is_best: bool) -> str:
    """A trial at a rung; `is_best` when no trial got further, and none that got as far has a better value."""
    best = " (best so far at this rung)" if is_best else ""
    parts = [f"trial {trial.trial} at {_epochs(epochs)}: {_metric(info)} {trial.values[epochs]:.4f}{best}"]
    return " · ".join([*parts, *_parameters(trial.params or {})])


def progress_line(progress: SearchProgress, remaining_s: float | None) -> str:
    """Where the search stands, on one line."""
    parts = [f"{progress.num_finished} of {progress.num_segments} rungs"]
    if progress.best_trial is not None and progress.best_value is not None:
        parts.append(f"best {progress.best_value:.4f} by trial {progress.best_trial}")
    if remaining_s is not None:
        parts.append(f"about {clock_time(remaining_s)} left")
    return " · ".join([*parts, f"{clock_time(progress.elapsed_s)} so far", f"{progress.images_per_s:,.0f} images/s"])


def final_lines(summary: SearchSummary) -> list[str]:
    """How the search ended, the best trial, where the time went and where the files are."""
    info = summary.info
    counts = Counter(str(trial.state) for trial in summary.trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = ["", f"{info.experiment} {summary.status}: {len(summary.trials)} trials ({states})"]
    lines += _leader_lines(summary) if summary.best is None else _best_lines(info, summary.best)
    lines += [*_time_lines(summary), f"  throughput     {summary.images_per_s:,.0f} images/s while training"]
    if info.output_dir:
        lines.append(f"  folder         {info.output_dir}")
        lines.append(f"  curves         tensorboard --logdir {Path(info.output_dir) / TENSORBOARD_FOLDER}")
    if summary.status in StopSignal.REASONS:
        lines.append("  to go on       the same command: what is finished is kept")
    return lines


def _leader_lines(summary: SearchSummary) -> list[str]:
    """Of a search that did not come to choose its best."""
    info = summary.info
    best = leader(info.brackets, summary.trials, maximize=info.maximize)
    if best is None:
        return [f"  best           none: {_why_none(summary)}"]
    at = last_epochs(best)
    return [f"  best so far    trial {best.trial}: {_metric(info)} {best.values[at]:.4f} after {_epochs(at)}"]


def _why_none(summary: SearchSummary) -> str:
    failed = sum(trial.state is TrialState.FAILED for trial in summary.trials)
    if not failed:
        return "nothing was measured yet"
    others = "" if failed == len(summary.trials) else ", and no other was measured yet"
    return f"{failed} of {len(summary.trials)} trials failed{others}; {SEARCH_FILE} says why"


def _best_lines(info: SearchInfo, best: BestTrial) -> list[str]:
    lines = [f"  best           trial {best.trial}: {_metric(info)} {best.value:.4f} after {_epochs(best.epochs)}"]
    if best.test_accuracy is not None:
        lines.append(f"  test accuracy  {best.test_accuracy:.4f}")
    elif best.test_loss is not None:
        lines.append(f"  test loss      {best.test_loss:.4f}")
    params = [f"{key}={as_text(value)}" for key, value in best.params.items()]
    lines += [f"{_INDENT if n else '  parameters     '}{text}" for n, text in enumerate(params)]
    lines.append(f"  model          {best.model_path or 'its files are not in this folder'}")
    lines.append(f"  to train it    {best.command}")
    if best.epochs < info.max_epochs:
        lines.append(f"{_INDENT}as far as it came here; without max_rounds to its end, {_epochs(info.max_epochs)}")
    return lines


def _time_lines(summary: SearchSummary) -> list[str]:
    wall_s = summary.wall_time_s
    parts = {
        "loading": summary.loading_time_s,
        "training": summary.train_time_s,
        "measuring": summary.evaluation_time_s,
        "finding out how to pack": summary.tuning_time_s,
        "waiting for other workers": summary.waiting_time_s,
    }
    share = summary.overhead_time_s / wall_s if wall_s else 0.0
    said = [f"{seconds:.1f} s {what}" for what, seconds in parts.items() if seconds or what == "training"]
    said.append(f"{summary.overhead_time_s:.1f} s overhead ({share:.1%})")
    return [f"  time           {wall_s:.1f} s: {', '.join(said)}"]


def _epochs(number: float) -> str:
    return f"{number:.4g} epoch{'' if number == 1 else 's'}"


def _metric(info: SearchInfo) -> str:
    return info.metric.replace("_", " ")


def _parameters(params: Mapping[str, Any]) -> list[str]:
    return [f"{name} {as_text(params[key])}" for key, name in short_names(list(params)).items()]


def _listed(numbers: list[float]) -> str:
    texts = [f"{number:.4g}" for number in numbers]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
