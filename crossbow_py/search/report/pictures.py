"""Two pictures of a search: which parameters led to which values, and how trials learned."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import AbstractPathEffect, Normal, Stroke
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator

from crossbow_py.search.events import SearchInfo, TrialRecord
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.standing import as_text, last_epochs, ranked, short_names, value_range
from crossbow_py.search.space import Parameter

NOTHING = -0.13  # where a line goes that has no value there, below the axes
_JITTER = 0.05  # of choices, so that lines through the same one can be told apart
_GOLDEN = 0.618034  # multiples of it, without whole parts, lie evenly apart
_NEAR = 0.07  # of an axis: labels nearer than that would touch
_INCHES_PER_AXIS, _MOST_INCHES = 1.75, 40.0
_MOST_CHOICES, _MOST_CHARACTERS = 12, 14
_COLOURS = colormaps["viridis"]
_BRIGHTEST = 0.92  # of the colours: more yellow is hard to see on white
_BAR_WIDTH = 0.06  # of what is between two axes
_BEST_WIDTH, _CASING_WIDTH, _COMPLETE_WIDTH, _PRUNED_WIDTH = 3.0, 4.8, 2.0, 1.0  # points
_CASING: list[AbstractPathEffect] = [Stroke(linewidth=_CASING_WIDTH, foreground="black"), Normal()]
_PRUNED_ALPHA = 0.6
_NEUTRAL = "0.35"  # in the legend, where a kind of line has no colour of its own
_LOG_FROM = 6.0  # ratio of the last rung to the first from which epochs are spread by their logarithm
_BRACKET_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
_FEW_RUNGS, _FEW_SIZE, _MANY_SIZE = 6, 10, 8  # points, of their labels
_PRUNED, _BEST = "0.7", "crimson"


def draw_parallel(info: SearchInfo, trials: Sequence[TrialRecord]) -> Figure:
    """Return the figure; one trial at least has a value. The better the value, the higher and the brighter.

    The last axis is the scale of both.
    """
    order = ranked(trials, maximize=info.maximize)
    low, high = value_range(trials, maximize=info.maximize) or (0.0, 1.0)
    parameters = info.space.parameters
    width = min(_MOST_INCHES, max(6.5, _INCHES_PER_AXIS * (len(parameters) + 1)))
    figure = Figure(figsize=(width, 5.4), layout="constrained")
    axes = figure.add_subplot()
    for trial in [trial for trial in trials if trial.params is not None and not trial.values] + order[::-1]:
        share = None
        if trial.value is not None and trial.values:
            share = min(1.0, max(0.0, value_height(trial.value, low, high, maximize=info.maximize)))
        _draw_line(axes, parameters, trial, share, is_best=trial is order[0])
    for position, parameter in enumerate(parameters):
        name = short_names([each.key for each in parameters])[parameter.key]
        _draw_axis(axes, position, name, parameter_ticks(parameter))
    ticks = value_ticks(low, high, maximize=info.maximize, cut=_is_cut(info, order, low, high))
    _draw_axis(axes, len(parameters), info.metric, ticks, is_last=True)
    has_labels = _label_nothing(axes, parameters, trials)
    axes.set(xlim=(-0.4, len(parameters) + 0.45), ylim=(NOTHING - 0.06 if has_labels else -_JITTER, 1.13))
    axes.set_axis_off()
    axes.set_title(f"{info.experiment}: each line is a trial, from its parameters to its value", pad=12)
    figure.legend(handles=_line_legend(trials, order[0]), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _is_cut(info: SearchInfo, trials: Sequence[TrialRecord], low: float, high: float) -> bool:
    """Return whether some values are worse than those that a picture shows."""
    values = [value for trial in trials for value in trial.values.values()]
    return min(values) < low if info.maximize else max(values) > high


def value_height(value: float, low: float, high: float, *, maximize: bool) -> float:
    """Return how high a value lies on its axis: 1 for the best."""
    share = (value - low) / (high - low)
    return share if maximize else 1 - share


def heights_of(parameters: Sequence[Parameter], trial: TrialRecord, share: float | None) -> list[float]:
    """Return the height of a trial's line on each axis, the value's last."""
    found, params = [], trial.params or {}
    jitter = _JITTER * ((trial.trial * _GOLDEN) % 1 - 0.5)
    for parameter in parameters:
        position = parameter.position(params[parameter.key]) if parameter.key in params else NOTHING
        is_jittered = parameter.key in params and parameter.choices is not None
        found.append(position + jitter if is_jittered else position)
    return [*found, NOTHING if share is None else share]


def parameter_ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Return the positions and texts of the labels on a parameter's axis."""
    if parameter.choices is not None:
        every = math.ceil(len(parameter.choices) / _MOST_CHOICES)
        texts = {choice: as_text(choice) for choice in parameter.choices[::every]}
        return [
            (parameter.position(choice), text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…")
            for choice, text in texts.items()
        ]
    low, high = (float(end) for end in (parameter.low or 0, parameter.high or 0))
    within = [float(value) for value in _round_numbers(parameter, low, high) if low < value < high]
    return _apart([(parameter.position(value), f"{value:.3g}") for value in (low, high, *within)])


def _round_numbers(parameter: Parameter, low: float, high: float) -> Iterable[Any]:
    """Return numbers that are easily read, or the steps of the range where they are few."""
    if parameter.step is not None and parameter.num_points() <= _MOST_CHOICES:
        return parameter.points()
    if parameter.log:
        few = math.log10(high / low) < 3
        return LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9).tick_values(low, high)
    return MaxNLocator(5, integer=parameter.integer).tick_values(low, high)


def value_ticks(low: float, high: float, *, maximize: bool, cut: bool) -> list[tuple[float, str]]:
    """Labels of the value's axis; the lower end says where it was cut."""
    inner = [float(value) for value in MaxNLocator(6).tick_values(low, high) if low < value < high]
    worst, best = (low, high) if maximize else (high, low)
    sign = ("≤ " if maximize else "≥ ") if cut else ""
    ends = [(0.0, f"{sign}{worst:.4g}"), (1.0, f"{best:.4g}")]
    return _apart([*ends, *((value_height(value, low, high, maximize=maximize), f"{value:.4g}") for value in inner)])


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the labels without those that would touch an earlier one; ends come first."""
    kept: list[tuple[float, str]] = []
    for position, text in ticks:
        if all(abs(position - other) > _NEAR for other, _ in kept):
            kept.append((position, text))
    return sorted(kept)


def _draw_line(
    axes: Axes, parameters: Sequence[Parameter], trial: TrialRecord, share: float | None, *, is_best: bool
) -> None:
    heights = heights_of(parameters, trial, share)
    if share is None:
        axes.plot(heights, color="0.6", linestyle=":", linewidth=1.0, zorder=1)
        return
    colour = _COLOURS(_BRIGHTEST * share)
    if is_best:
        (line,) = axes.plot(heights, color=colour, linewidth=_BEST_WIDTH, zorder=4, path_effects=_CASING)
        line.set_solid_joinstyle("round")
        line.set_solid_capstyle("round")
    elif trial.state is TrialState.COMPLETE:
        axes.plot(heights, color=colour, linewidth=_COMPLETE_WIDTH, zorder=3)
    else:
        axes.plot(heights, color=colour, linewidth=_PRUNED_WIDTH, alpha=_PRUNED_ALPHA, zorder=2)


def _draw_axis(
    axes: Axes, position: int, name: str, ticks: Sequence[tuple[float, str]], *, is_last: bool = False
) -> None:
    """The last axis has the colours of values beside it, and its labels outside."""
    side, align = (1, "left") if is_last else (-1, "right")
    begin = position + _BAR_WIDTH if is_last else position
    if is_last:
        colours = _COLOURS(np.linspace(0, _BRIGHTEST, 256))[:, None]
        axes.imshow(colours, extent=(position, begin, 0, 1), origin="lower", aspect="auto", zorder=5)
    axes.plot([position, position], [0, 1], color="black", linewidth=1.0, zorder=5)
    axes.text(position, 1.05, name.replace("_", "\n"), ha="center", va="bottom", fontweight="bold", fontsize=10)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # no line crosses a label
    for height, text in ticks:
        axes.plot([begin, begin + side * 0.02], [height, height], color="black", linewidth=1.0, zorder=5)
        axes.text(begin + side * 0.05, height, text, ha=align, va="center", fontsize=8, bbox=behind, zorder=6)


def _label_nothing(axes: Axes, parameters: Sequence[Parameter], trials: Sequence[TrialRecord]) -> bool:
    """Name the positions below the axes that lines go to; whether there are some."""
    sampled = [trial.params for trial in trials if trial.params is not None]
    labels = ["not set" if any(p.key not in params for params in sampled) else "" for p in parameters]
    labels.append("no value" if any(_is_without_value(trial) for trial in trials) else "")
    for position, text in enumerate(labels):
        if text:
            axes.text(position, NOTHING - 0.025, text, ha="center", va="top", fontsize=8, style="italic")
    return any(labels)


def _is_without_value(trial: TrialRecord) -> bool:
    return trial.params is not None and (trial.value is None or not trial.values)


def _line_legend(trials: Sequence[TrialRecord], best: TrialRecord) -> list[Line2D]:
    label = f"best: trial {best.trial}, {best.value:.4g}"
    handles = [Line2D([], [], color=_COLOURS(_BRIGHTEST), linewidth=_BEST_WIDTH, path_effects=_CASING, label=label)]
    others = [trial for trial in trials if trial.trial != best.trial and not _is_without_value(trial)]
    states = {trial.state for trial in others if trial.values}
    if TrialState.COMPLETE in states:
        label = "thick, coloured by value: trained to the end"
        handles.append(Line2D([], [], color=_NEUTRAL, linewidth=_COMPLETE_WIDTH, label=label))
    if states - {TrialState.COMPLETE}:
        label = "thin, coloured by value: stopped early, value where it stopped"
        handles.append(Line2D([], [], color=_NEUTRAL, linewidth=_PRUNED_WIDTH, alpha=_PRUNED_ALPHA, label=label))
    if any(_is_without_value(trial) for trial in trials):
        handles.append(Line2D([], [], color="0.6", linestyle=":", label="failed, or not measured yet"))
    return handles


def draw_curves(info: SearchInfo, trials: Sequence[TrialRecord]) -> Figure:
    """Return the figure; one trial at least has a value. Dotted lines are the rungs where trials are compared."""
    order = ranked(trials, maximize=info.maximize)
    low, high = value_range(trials, maximize=info.maximize) or (0.0, 1.0)
    figure = Figure(figsize=(8.5, 5.4), layout="constrained")
    axes = figure.add_subplot()
    for trial in order[::-1]:
        _draw_curve(axes, trial, bracket_colour(info, trial), is_best=trial is order[0])
    _draw_rungs(axes, rung_labels(info, order))
    margin = 0.04 * (high - low)
    metric = info.metric.replace("_", " ")
    left_out = f" (those {'below' if info.maximize else 'above'} {low if info.maximize else high:.3g} are cut off)"
    axes.set(ylim=(low - margin, high + margin), ylabel=metric + (left_out if _is_cut(info, order, low, high) else ""))
    axes.set_title(f"{info.experiment}: how {len(order)} trials learned")
    figure.legend(handles=_curve_legend(info, order), loc="outside lower center", ncols=3, frameon=False)
    return figure


def rung_labels(info: SearchInfo, trials: Sequence[TrialRecord]) -> dict[float, str]:
    """Return labels by the epochs of the rungs: how many trials were measured there, of each bracket."""
    measured = Counter((epochs, trial.bracket) for trial in trials for epochs in trial.values)
    labels: dict[float, list[str]] = defaultdict(list)
    for bracket in info.brackets:
        for epochs in bracket.epochs:
            count = measured[epochs, bracket.index]
            alone = f"{count} trial{'' if count == 1 else 's'}"
            labels[epochs].append(f"{count} in bracket {bracket.index}" if len(info.brackets) > 1 else alone)
    return {epochs: "\n".join([f"{epochs:.3g}", *labels[epochs]]) for epochs in sorted(labels)}


def bracket_colour(info: SearchInfo, trial: TrialRecord) -> str:
    """Return the colour of a trial that was trained to the end."""
    return _BRACKET_COLOURS[trial.bracket % len(_BRACKET_COLOURS)] if info.num_brackets > 1 else _BRACKET_COLOURS[0]


def _draw_curve(axes: Axes, trial: TrialRecord, colour: str, *, is_best: bool) -> None:
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


def _curve_legend(info: SearchInfo, order: Sequence[TrialRecord]) -> list[Line2D]:
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
