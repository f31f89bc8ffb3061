"""Parallel coordinates of a search: an axis for each parameter and one for the value, a line for each trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import AbstractPathEffect, Normal, Stroke
from matplotlib.ticker import LogLocator, MaxNLocator

from crossbow_py.search.events import SearchInfo, TrialRecord
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.parameter import Parameter
from crossbow_py.search.report.standing import as_text, ranked, short_names, value_range

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
_PRUNED_ALPHA = 0.6
_NEUTRAL = "0.35"  # in the legend, where a kind of line has no colour of its own


def draw_parallel(info: SearchInfo, trials: Sequence[TrialRecord]) -> Figure:
    """The figure; one trial at least has a value. The better the value, the higher and the brighter.

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
            share = min(1.0, max(0.0, value_place(trial.value, low, high, maximize=info.maximize)))
        _draw_trial(axes, parameters, trial, share, is_best=trial is order[0])
    for place, parameter in enumerate(parameters):
        name = short_names([each.key for each in parameters])[parameter.key]
        _draw_axis(axes, place, name, parameter_ticks(parameter))
    lowest = min(value for trial in order for value in trial.values.values())
    greatest = max(value for trial in order for value in trial.values.values())
    cut = lowest < low if info.maximize else greatest > high
    ticks = value_ticks(low, high, maximize=info.maximize, cut=cut)
    _draw_axis(axes, len(parameters), info.metric, ticks, is_last=True)
    has_labels = _label_nothing(axes, parameters, trials)
    axes.set(xlim=(-0.4, len(parameters) + 0.45), ylim=(NOTHING - 0.06 if has_labels else -_JITTER, 1.13))
    axes.set_axis_off()
    axes.set_title(f"{info.experiment}: each line is a trial, from its parameters to its value", pad=12)
    figure.legend(handles=_legend(trials, order[0]), loc="outside lower center", ncols=2, frameon=False)
    return figure


def value_place(value: float, low: float, high: float, *, maximize: bool) -> float:
    """How high a value lies on its axis: 1 for the best."""
    share = (value - low) / (high - low)
    return share if maximize else 1 - share


def places(parameters: Sequence[Parameter], trial: TrialRecord, share: float | None) -> list[float]:
    """How high the line of a trial is on each axis, the value's last."""
    params = trial.params or {}
    found = [_place(parameter, params, trial.trial) for parameter in parameters]
    return [*found, NOTHING if share is None else share]


def parameter_ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Where the axis of a parameter is labelled, and how."""
    if parameter.choices is not None:
        every = math.ceil(len(parameter.choices) / _MOST_CHOICES)
        return [(parameter.place(choice), _shortened(as_text(choice))) for choice in parameter.choices[::every]]
    low, high = (float(end) for end in (parameter.low or 0, parameter.high or 0))
    within = [float(value) for value in _round_numbers(parameter, low, high) if low < value < high]
    return _apart([(parameter.place(value), f"{value:.3g}") for value in (low, high, *within)])


def _round_numbers(parameter: Parameter, low: float, high: float) -> Iterable[Any]:
    """Numbers that are easily read, or the steps of the range where they are few."""
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
    return _apart([*ends, *((value_place(value, low, high, maximize=maximize), f"{value:.4g}") for value in inner)])


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Without those that would touch one before them; ends come first."""
    kept: list[tuple[float, str]] = []
    for place, text in ticks:
        if all(abs(place - other) > _NEAR for other, _ in kept):
            kept.append((place, text))
    return sorted(kept)


def _place(parameter: Parameter, params: Mapping[str, Any], trial: int) -> float:
    if parameter.key not in params:
        return NOTHING
    place = parameter.place(params[parameter.key])
    return place if parameter.choices is None else place + _JITTER * ((trial * _GOLDEN) % 1 - 0.5)


def _draw_trial(
    axes: Axes, parameters: Sequence[Parameter], trial: TrialRecord, share: float | None, *, is_best: bool
) -> None:
    heights = places(parameters, trial, share)
    if share is None:
        axes.plot(heights, color="0.6", linestyle=":", linewidth=1.0, zorder=1)
        return
    colour = _COLOURS(_BRIGHTEST * share)
    if is_best:
        (line,) = axes.plot(heights, color=colour, linewidth=_BEST_WIDTH, zorder=4, path_effects=_casing())
        line.set_solid_joinstyle("round")
        line.set_solid_capstyle("round")
    elif trial.state is TrialState.COMPLETE:
        axes.plot(heights, color=colour, linewidth=_COMPLETE_WIDTH, zorder=3)
    else:
        axes.plot(heights, color=colour, linewidth=_PRUNED_WIDTH, alpha=_PRUNED_ALPHA, zorder=2)


def _casing() -> list[AbstractPathEffect]:
    return [Stroke(linewidth=_CASING_WIDTH, foreground="black"), Normal()]


def _draw_axis(axes: Axes, place: int, name: str, ticks: Sequence[tuple[float, str]], *, is_last: bool = False) -> None:
    """The last axis has the colours of values beside it, and its labels outside."""
    side, align = (1, "left") if is_last else (-1, "right")
    begin = place + _BAR_WIDTH if is_last else place
    if is_last:
        colours = _COLOURS(np.linspace(0, _BRIGHTEST, 256))[:, None]
        axes.imshow(colours, extent=(place, begin, 0, 1), origin="lower", aspect="auto", zorder=5)
    axes.plot([place, place], [0, 1], color="black", linewidth=1.0, zorder=5)
    axes.text(place, 1.05, name.replace("_", "\n"), ha="center", va="bottom", fontweight="bold", fontsize=10)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # no line crosses a label
    for height, text in ticks:
        axes.plot([begin, begin + side * 0.02], [height, height], color="black", linewidth=1.0, zorder=5)
        axes.text(begin + side * 0.05, height, text, ha=align, va="center", fontsize=8, bbox=behind, zorder=6)


def _label_nothing(axes: Axes, parameters: Sequence[Parameter], trials: Sequence[TrialRecord]) -> bool:
    """Name the places below the axes that lines go to; whether there are some."""
    sampled = [trial.params for trial in trials if trial.params is not None]
    labels = ["not set" if any(p.key not in params for params in sampled) else "" for p in parameters]
    labels.append("no value" if any(_is_without_value(trial) for trial in trials) else "")
    for place, text in enumerate(labels):
        if text:
            axes.text(place, NOTHING - 0.025, text, ha="center", va="top", fontsize=8, style="italic")
    return any(labels)


def _is_without_value(trial: TrialRecord) -> bool:
    """Whether its line goes nowhere: it was sampled, and failed or was not measured yet."""
    return trial.params is not None and (trial.value is None or not trial.values)


def _legend(trials: Sequence[TrialRecord], best: TrialRecord) -> list[Line2D]:
    """What the kinds of lines are, of those that are there."""
    label = f"best: trial {best.trial}, {best.value:.4g}"
    handles = [Line2D([], [], color=_COLOURS(_BRIGHTEST), linewidth=_BEST_WIDTH, path_effects=_casing(), label=label)]
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


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
