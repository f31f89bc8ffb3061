"""The learning curves of a search: the value of each trial over the epochs it was trained for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from crossbow_py.search.events import SearchInfo, TrialRecord
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.standing import last_epochs, ranked, value_range

_LOG_FROM = 6.0  # ratio of the last rung to the first from which epochs are spread by their logarithm
_BRACKET_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
_FEW_RUNGS, _FEW_SIZE, _MANY_SIZE = 6, 10, 8  # points, of their labels
_PRUNED, _BEST = "0.7", "crimson"


def draw_curves(info: SearchInfo, trials: Sequence[TrialRecord]) -> Figure:
    """The figure; one trial at least has a value. Dotted lines are the rungs where trials are compared."""
    order = ranked(trials, maximize=info.maximize)
    low, high = value_range(trials, maximize=info.maximize) or (0.0, 1.0)
    figure = Figure(figsize=(8.5, 5.4), layout="constrained")
    axes = figure.add_subplot()
    for trial in order[::-1]:
        _draw_trial(axes, trial, bracket_colour(info, trial), is_best=trial is order[0])
    _draw_rungs(axes, rung_labels(info, order))
    margin = 0.04 * (high - low)
    values = [value for trial in order for value in trial.values.values()]
    metric = info.metric.replace("_", " ")
    cut = min(values) < low if info.maximize else max(values) > high
    left_out = f" (those {'below' if info.maximize else 'above'} {low if info.maximize else high:.3g} are cut off)"
    axes.set(ylim=(low - margin, high + margin), ylabel=metric + (left_out if cut else ""))
    axes.set_title(f"{info.experiment}: how {len(order)} trials learned")
    figure.legend(handles=_legend(info, order), loc="outside lower center", ncols=3, frameon=False)
    return figure


def rung_labels(info: SearchInfo, trials: Sequence[TrialRecord]) -> dict[float, str]:
    """By epochs at which trials are measured: how many were, of each bracket that is measured there."""
    measured = Counter((epochs, trial.bracket) for trial in trials for epochs in trial.values)
    labels: dict[float, list[str]] = defaultdict(list)
    for bracket in info.brackets:
        for epochs in bracket.epochs:
            count = measured[epochs, bracket.index]
            alone = f"{count} trial{'' if count == 1 else 's'}"
            labels[epochs].append(f"{count} in bracket {bracket.index}" if len(info.brackets) > 1 else alone)
    return {epochs: "\n".join([f"{epochs:.3g}", *labels[epochs]]) for epochs in sorted(labels)}


def bracket_colour(info: SearchInfo, trial: TrialRecord) -> str:
    """Of a trial that was trained to the end."""
    return _BRACKET_COLOURS[trial.bracket % len(_BRACKET_COLOURS)] if info.num_brackets > 1 else _BRACKET_COLOURS[0]


def _draw_trial(axes: Axes, trial: TrialRecord, colour: str, *, is_best: bool) -> None:
    epochs = sorted(trial.values)
    values = [trial.values[each] for each in epochs]
    if is_best:
        axes.plot(epochs, values, color=_BEST, linewidth=3.5, marker="o", markersize=7, zorder=4)
    elif trial.state is TrialState.COMPLETE:
        axes.plot(epochs, values, color=colour, linewidth=1.6, marker="o", markersize=4, zorder=3)
    else:
        axes.plot(epochs, values, color=_PRUNED, linewidth=1.0, marker="o", markersize=3, alpha=0.7, zorder=2)
    if trial.state is TrialState.FAILED:
        axes.plot(epochs[-1:], values[-1:], color="black", marker="x", markersize=8, zorder=5)


def _draw_rungs(axes: Axes, labels: Mapping[float, str]) -> None:
    """Mark the epochs at which trials are measured, ascending, with their labels; no other epochs are labelled."""
    rungs = list(labels)
    if rungs[-1] / rungs[0] >= _LOG_FROM:
        axes.set_xscale("log")
        margin = (rungs[-1] / rungs[0]) ** 0.04
        axes.set_xlim(rungs[0] / margin, rungs[-1] * margin)
    else:
        margin = 0.04 * (rungs[-1] - rungs[0]) or 0.5 * rungs[-1]
        axes.set_xlim(rungs[0] - margin, rungs[-1] + margin)
    axes.xaxis.set_major_locator(FixedLocator(rungs))
    axes.xaxis.set_major_formatter(FixedFormatter(list(labels.values())))
    axes.tick_params(axis="x", labelsize=_FEW_SIZE if len(rungs) <= _FEW_RUNGS else _MANY_SIZE)
    many = " (at the dotted lines trials are compared, and the best of them go on)" if len(rungs) > 1 else ""
    axes.set_xlabel(f"epochs trained{many}")
    axes.xaxis.set_minor_locator(NullLocator())
    for epochs in rungs:
        axes.axvline(epochs, color="0.75", linestyle=":", linewidth=1.0, zorder=1)


def _legend(info: SearchInfo, order: Sequence[TrialRecord]) -> list[Line2D]:
    best = order[0]
    of = f" (bracket {best.bracket})" if info.num_brackets > 1 else ""
    label = f"best: trial {best.trial}, {best.values[last_epochs(best)]:.4g}{of}"
    handles = [Line2D([], [], color=_BEST, linewidth=3.5, marker="o", markersize=7, label=label)]
    complete = {trial.bracket: trial for trial in order[1:] if trial.state is TrialState.COMPLETE}
    for bracket, trial in sorted(complete.items()):
        named = f" (bracket {bracket})" if info.num_brackets > 1 else ""
        label, colour = f"trained to the end{named}", bracket_colour(info, trial)
        handles.append(Line2D([], [], color=colour, marker="o", markersize=4, label=label))
    if any(trial.state is not TrialState.COMPLETE for trial in order):
        handles.append(Line2D([], [], color=_PRUNED, marker="o", markersize=3, label="stopped early"))
    if any(trial.state is TrialState.FAILED for trial in order):
        handles.append(Line2D([], [], color="black", marker="x", linestyle="", label="failed after this"))
    return handles
