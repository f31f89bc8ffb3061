"""The figures of runs side by side, as text, for the table of a report and of a sweep. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from crossbow_py.core.intervals import estimate
from crossbow_py.core.plain_values import told_apart, without
from crossbow_py.telemetry.screen import clock_time

MOST_VALUES = 4  # of a metric that are shown side by side; with more, as of a hundred classes, none of them is
MOST_RUNS = 12  # more curves cannot be told apart
_LARGEST = 1e30
_SECONDS_SPELLED_OUT = 120  # from there on minutes

T = TypeVar("T")
R = TypeVar("R", bound="RecordedRun")
Rows = list[tuple[str, list[str]]]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A recorded run.

    Attributes:
        status: that of summary.json, or `running` or `unfinished` where there is none.
        summary: summary.json; empty without one.
        config: the configuration, by dotted keys.
        epochs: lines of metrics.jsonl, in the order of samples seen.
    """

    folder: Path
    status: str
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, Any]] = ()


def figures(runs: Sequence[RecordedRun]) -> Rows:
    """Return each figure by its name with the value of every run: results, and settings in which runs differ.

    Figures that no run has are left out.
    """
    return [
        *_rows([*_MEASURED, *((name, _metric(name)) for name in metric_names(runs)), *_SPENT], runs),
        *((name, values) for name, values in _rows(_SETTINGS, runs) if len(set(values)) > 1),
    ]


def by_setting(runs: Sequence[R]) -> dict[str, list[R]]:
    """Return the runs that ended, by what their settings have apart from others'; those of one differ in their seeds.

    Empty where no setting has two seeds.
    """
    ended = [run for run in runs if run.status in ("finished", "target_reached") and run.config]
    found: dict[str, list[R]] = {}
    for run, label in zip(ended, told_apart([without(run.config, ("seed",)) for run in ended]), strict=True):
        found.setdefault(label or "all", []).append(run)
    found = {label: own for label, own in found.items() if len({run.config.get("seed") for run in own}) == len(own)}
    return found if any(len(own) > 1 for own in found.values()) else {}


def seed_means(groups: Mapping[str, Sequence[RecordedRun]]) -> Rows:
    """Return the mean of each figure over the runs of each group, with its 95 % confidence interval by Student's t."""

    def text(runs: Sequence[RecordedRun], key: str, form: str) -> str:
        values = [value for run in runs if (value := number(run.summary.get(key))) is not None]
        own = estimate(values) if len(values) == len(runs) else None
        return "" if own is None else " ± ".join(form.format(v) for v in (own.mean, own.half_width) if v is not None)

    rows = [(name, [text(own, key, form) for own in groups.values()]) for name, key, form in _MEANS]
    return [("seeds", [str(len(own)) for own in groups.values()]), *(row for row in rows if any(row[1]))]


def shown_range(values: Sequence[float], *, maximize: bool) -> tuple[float, float] | None:
    """Return the range of values that a picture shows, rising; None without any value.

    The far end of what is worse than the better three quarters is cut off, as one trial that learned nothing, or the
    first epoch, would press all others together: at most half as far again from the best as the quartile is.
    """
    values = sorted(value for value in values if math.isfinite(value))
    if not values:
        return None
    best, worst, quartile = values[-1], values[0], values[len(values) // 4]
    if not maximize:
        best, worst, quartile = values[0], values[-1], values[-1 - len(values) // 4]
    bound = best + 1.5 * (quartile - best)
    low, high = sorted((best, max(worst, bound) if maximize else min(worst, bound)))
    margin = 0.0 if high > low else abs(high) * 0.01 or 0.01
    return low - margin, high + margin


def few_values(metrics: Mapping[str, T]) -> dict[str, T]:
    """Return the values of metrics without those of a metric that has many, `name/...`."""
    groups = Counter(name.partition("/")[0] for name in metrics)
    return {name: value for name, value in metrics.items() if groups[name.partition("/")[0]] <= MOST_VALUES}


def metric_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the metrics that runs have, each once, without those of many values."""
    return list(few_values({name: None for run in runs for name in _metrics(run)}))


def same_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """Return the settings that are the same for all runs."""
    return [(name, values[0]) for name, values in _rows(_SETTINGS, runs) if len(set(values)) == 1]


def _rows(kinds: Sequence[_Kind], runs: Sequence[RecordedRun]) -> Rows:
    rows = [(name, [text(run) for run in runs]) for name, text in kinds]
    return [(name, values) for name, values in rows if any(values)]


def _newest(run: RecordedRun, key: str, key_of_epochs: str | None) -> float | None:
    """Return the summary's value; without a summary the newest epoch's, if epochs have it."""
    value = number(run.summary.get(key))
    if value is None and key_of_epochs and run.epochs:
        return number(run.epochs[-1].get(key_of_epochs))
    return value


def _metrics(run: RecordedRun) -> Mapping[str, Any]:
    """Return the summary's metrics; without a summary the newest epoch's."""
    found = run.summary.get("metrics") or (run.epochs[-1].get("metrics") if run.epochs else None)
    return found if isinstance(found, Mapping) else {}


def _metric(name: str) -> Callable[[RecordedRun], str]:
    def text(run: RecordedRun) -> str:
        value = number(_metrics(run).get(name))
        return "" if value is None else f"{value:,.4g}"

    return text


def _number(key: str, form: str, key_of_epochs: str | None = None) -> Callable[[RecordedRun], str]:
    def text(run: RecordedRun) -> str:
        value = _newest(run, key, key_of_epochs)
        return "" if value is None else format(value, form)

    return text


def _time(key: str, key_of_epochs: str | None = None) -> Callable[[RecordedRun], str]:
    def text(run: RecordedRun) -> str:
        value = _newest(run, key, key_of_epochs)
        if value is None:
            return ""
        return f"{value:.1f} s" if value < _SECONDS_SPELLED_OUT else clock_time(value)

    return text


def _setting(key: str) -> Callable[[RecordedRun], str]:
    """Return the setting that the run used; without a summary the configured one."""
    return lambda run: str(run.summary.get(key, run.config.get(key, "")))


def _images_per_s(run: RecordedRun) -> str:
    """Return nothing for a language model, which has tokens/s."""
    if _newest(run, "tokens_per_s", "tokens_per_s") is not None:
        return ""
    return _number("images_per_s", ",.0f", "images_per_s")(run)


def _slowest_rank(run: RecordedRun) -> str:
    """Return the slowest of several ranks, and by what share it takes longer than the median."""
    found = run.summary.get("ranks") or (run.epochs[-1].get("ranks") if run.epochs else None)
    spread = number(found.get("spread")) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or spread is None:
        return ""
    return f"{found.get('slowest_rank')} on {found.get('slowest_host')} (+{spread:.1%})"


def _hanging_ranks(run: RecordedRun) -> str:
    found = run.summary.get("hanging_ranks")
    ranks = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return ", ".join(f"{each.get('rank')} on {each.get('host')}" for each in ranks)


_Kind = tuple[str, Callable[[RecordedRun], str]]
_MEASURED: tuple[_Kind, ...] = (
    ("status", lambda run: run.status.replace("_", " ")),
    ("test accuracy", _number("test_accuracy", ".4f", "test_accuracy")),
    ("best test accuracy", _number("best_test_accuracy", ".4f")),
    ("best validation accuracy", _number("best_validation_accuracy", ".4f")),
)
_SPENT: tuple[_Kind, ...] = (
    ("time to accuracy", _time("time_to_accuracy_s")),
    ("time of training", _time("train_time_s", "elapsed_s")),
    ("time in all", _time("wall_time_s")),
    ("images/s", _images_per_s),
    ("tokens/s", _number("tokens_per_s", ",.0f", "tokens_per_s")),
    ("epochs", _number("epochs", ".4g", "epoch")),
    ("samples seen", _number("samples_seen", ",.0f", "samples_seen")),
    ("slowest rank", _slowest_rank),
    ("ranks that hung", _hanging_ranks),
)
_MEANS = (
    ("test accuracy", "test_accuracy", "{:.4f}"), ("test loss", "test_loss", "{:.4f}"),
    ("time to accuracy", "time_to_accuracy_s", "{:.1f} s"), ("time of training", "train_time_s", "{:.1f} s"),
    ("images/s", "images_per_s", "{:,.0f}"),
)  # fmt: skip
_SETTINGS: tuple[_Kind, ...] = (
    ("model", _setting("model")),
    ("data", _setting("data")),
    ("averaging", _setting("averaging")),
    ("learners a device", _number("num_learners", ".0f", "num_learners")),
    ("devices", _number("num_devices", ".0f")),
    ("batch size", _setting("batch_size")),
    ("executor", _setting("executor")),
    ("precision", _setting("precision")),
    ("device", _setting("device")),
    ("seed", _setting("seed")),
)


def number(value: Any) -> float | None:
    """Return a number that can be drawn; None for anything else, such as in a damaged file."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None  # of which NaN is no case either
