"""Parallel coordinates of a search: an axis for each parameter and one for the value, a line for each trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import AbstractPathEffect, Normal, Stroke
from matplotlib.ticker import LogLocator, MaxNLocator

from crossbow_py.packing.hyperband import TrialState
from crossbow_py.packing.parameter import Parameter
from crossbow_py.packing.report.standing import as_text, ranked, short_names, value_range
from crossbow_py.packing.search_events import SearchInfo, TrialRecord

NOTHING = -0.13  # where a line goes that has no value there, below the axes
_JITTER = 0.05  # of choices, so that lines through the same one can be told apart
_GOLDEN = 0.618034  # multiples of it, without whole parts, lie evenly apart
_NEAR = 0.07  # of an axis: labels nearer than that would touch
_INCHES_PER_AXIS, _MOST_INCHES = 1.75, 40.0
_MOST_CHOICES, _MOST_CHARACTERS = 12, 14
_COLOURS = colormaps["viridis"]


def draw_parallel(info: SearchInfo, trials: Sequence[TrialRecord]) -> Figure:
    """The figure; one trial at least has a value. The better the value, the higher and the brighter."""
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
    _label_nothing(axes, parameters, trials)
    axes.set(xlim=(-0.4, len(parameters) + 0.4), ylim=(NOTHING - 0.06, 1.13))
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
    colour = _COLOURS(0.92 * share)  # the brightest yellow is hard to see on white
    if is_best:
        (line,) = axes.plot(heights, color=colour, linewidth=4.5, zorder=4, path_effects=_casing())
        line.set_solid_joinstyle("round")
        line.set_solid_capstyle("round")
    elif trial.state is TrialState.COMPLETE:
        axes.plot(heights, color=colour, linewidth=2.0, zorder=3)
    else:
        axes.plot(heights, color=colour, linewidth=1.0, alpha=0.4, zorder=2)


def _casing() -> list[AbstractPathEffect]:
    return [Stroke(linewidth=7, foreground="black"), Normal()]


def _draw_axis(
    axes: Axes, place: int, name: str, ticks: Sequence[tuple[float, str]], *, is_last: bool = False
) -> None:
    """The last axis has its labels outside."""
    side, align = (1, "left") if is_last else (-1, "right")
    axes.plot([place, place], [0, 1], color="black", linewidth=1.0, zorder=5)
    axes.text(place, 1.05, name.replace("_", "\n"), ha="center", va="bottom", fontweight="bold", fontsize=10)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    for height, text in ticks:
        axes.plot([place, place + side * 0.02], [height, height], color="black", linewidth=1.0, zorder=5)
        axes.text(place + side * 0.05, height, text, ha=align, va="center", fontsize=8, bbox=behind, zorder=6)


def _label_nothing(axes: Axes, parameters: Sequence[Parameter], trials: Sequence[TrialRecord]) -> None:
    """Name the places below the axes that lines go to."""
    sampled = [trial.params for trial in trials if trial.params is not None]
    labels = ["not set" if any(p.key not in params for params in sampled) else "" for p in parameters]
    failed = any(trial.params is not None and not trial.values for trial in trials)
    for place, text in enumerate([*labels, "no value" if failed else ""]):
        if text:
            axes.text(place, NOTHING - 0.025, text, ha="center", va="top", fontsize=8, style="italic")


def _legend(trials: Sequence[TrialRecord], best: TrialRecord) -> list[Line2D]:
    """What the kinds of lines are, of those that are there."""
    label = f"best: trial {best.trial}, {best.value:.4g}"
    handles = [Line2D([], [], color=_COLOURS(0.92), linewidth=4.5, path_effects=_casing(), label=label)]
    states = {trial.state for trial in trials if trial.values and trial.trial != best.trial}
    if TrialState.COMPLETE in states:
        handles.append(Line2D([], [], color=_COLOURS(0.6), linewidth=2.0, label="trained to the end"))
    if states - {TrialState.COMPLETE}:
        handles.append(Line2D([], [], color=_COLOURS(0.3), alpha=0.5, label="stopped early: value where it stopped"))
    if any(trial.params is not None and not trial.values for trial in trials):
        handles.append(Line2D([], [], color="0.6", linestyle=":", label="failed, or not measured yet"))
    return handles


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
