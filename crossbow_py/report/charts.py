"""The report's charts. A run has the same colour in all of them; a chart that no run has anything for is left out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from crossbow_py.core.intervals import estimate
from crossbow_py.report.reading import Point, RunRecord, Span
from crossbow_py.telemetry.events import Images
from crossbow_py.telemetry.figures import by_setting, metric_names, number, shown_range
from crossbow_py.telemetry.pictures.confusion_picture import confusion_picture
from crossbow_py.telemetry.pictures.files import plain
from crossbow_py.telemetry.timeline import ordered_rows

ROUNDS_SHOWN = 3
_STEP_OF_RANK = re.compile(r"rank/\d+/step_ms")
MOST_STREAMS = 64  # more rows than that nobody reads, nor tasks of more names

_COLOURS = (
    "#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#c2185b", "#8c564b", "#17a2b8", "#7f7f7f", "#bcbd22", "#0b3d91",
    "#e6ab02", "#66a61e",
)  # fmt: skip
_MARKERS = "os^Dv<>Pp*hX"  # of runs too: readers who see few colours go by these
# Tasks and what is not one alike: what computes gradients, what updates rows, what all learners share.
_TASK_COLOURS = {
    "learning": "#4c78a8", "pass": "#4c78a8", "correction": "#f58518", "update": "#f58518", "averaging": "#54a24b",
    "gradient mean": "#b279a2",
}  # fmt: skip
_OTHER_TASK = "#9d9da1"
_Kind = tuple[str, str, str, Callable[[Sequence[RunRecord]], Figure | None]]  # name, title, caption, drawing
_WIDTH_IN, _HEIGHT_IN = 7.2, 3.4
_PAGE_DPI = 96
_SAMPLES = "samples seen"


@dataclass(frozen=True)
class Chart:
    """A picture; `name` is that of its PNG, `caption` says how to read it, `is_wide` whether it has a row to itself.

    It `is_folded` up on a page where there are more of its kind.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    is_wide: bool = False
    is_folded: bool = False


def all_charts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Every chart that has something to show, in the order of the page; a timeline for each run that has one."""
    for name, title, caption, draw in (*_LEARNING, *_metrics(runs), *_OTHERS):
        figure = draw(runs)
        if figure is not None:
            yield Chart(name, title, caption, figure)
    for index, run in enumerate(runs):
        if run.class_counts is not None:
            several = len(runs) > 1
            title = "Confusion matrix" + (f": {run.name}" if several else "")
            name = f"confusion_{index}" if several else "confusion"
            figure = _picture(confusion_picture(run.class_counts))
            yield Chart(name, title, _CONFUSION, figure, is_wide=True, is_folded=several)
    caption = _TIMELINE
    for index, run in enumerate(runs):
        strip = typical_rounds(run.spans)
        if strip is not None:
            several = len(runs) > 1
            title = "Three rounds of the timeline" + (f": {run.name}" if several else "")
            yield Chart(f"timeline_{index}" if several else "timeline", title, caption, _timeline(strip))
            caption = ""


def colour(index: int) -> str:
    """Return the colour of the run at that position."""
    return _COLOURS[index % len(_COLOURS)]


def _axes(height_in: float = _HEIGHT_IN, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def _draw(axes: Axes, points: Sequence[Point], index: int, label: str | None, style: str = "-", **more: Any) -> bool:
    """A curve; whether there was anything to draw. Up to forty points have markers."""
    if not points:
        return False
    axes.plot(
        *zip(*points, strict=True), style, color=colour(index), label=None if label is None else plain(label),
        marker=_MARKERS[index % len(_MARKERS)], markevery=max(1, len(points) // 40), markersize=3, linewidth=1.4,
        **more,
    )  # fmt: skip
    return True


def _finished(figure: Figure, panels: Sequence[Axes], x_label: str, y_labels: Sequence[str]) -> Figure:
    for axes, y_label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(plain(y_label))
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize=8, frameon=False)
    panels[-1].set_xlabel(x_label)
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure


def _curve(run: RunRecord, tag: str, column: str) -> list[Point]:
    """Inside epochs where the event file has it, else a point an epoch."""
    found = [(x, y) for x, y in run.curves.get(tag, ()) if number(y) is not None]
    return found or run.by_epoch(column)


def _measured(run: RunRecord, what: str, x: str = "samples_seen") -> list[Point]:
    """Return the curve of the validation data if the run has some, else of the test data."""
    return run.by_epoch(f"validation_{what}", x) or run.by_epoch(f"test_{what}", x)


def _learned(what: str, training: Callable[[RunRecord], list[Point]]) -> Callable[[Sequence[RunRecord]], Figure | None]:
    """Return what draws a figure of training and of data not trained on.

    Of one run these are curves of two colours; several runs have the colours, and each of the two its panel.
    """

    def draw(runs: Sequence[RunRecord]) -> Figure | None:
        measured = "validation" if any(run.by_epoch(f"validation_{what}") for run in runs) else "test"
        kinds = {measured: [_measured(run, what) for run in runs], "training": [training(run) for run in runs]}
        kinds = {kind: curves for kind, curves in kinds.items() if any(curves)}
        if not kinds:
            return None
        if len(runs) == 1:
            figure, panels = _axes()
            for place, (kind, (points,)) in enumerate(kinds.items()):
                _draw(panels[0], points, place, kind, "--" if kind == "training" else "-")
            return _finished(figure, panels, _SAMPLES, [what])
        figure, panels = _axes(_HEIGHT_IN * (1.35 if len(kinds) > 1 else 1), rows=len(kinds))
        for axes, curves in zip(panels, kinds.values(), strict=True):
            for index, (run, points) in enumerate(zip(runs, curves, strict=True)):
                _draw(axes, points, index, run.name if axes is panels[0] else None)
        labels = [f"{kind} {what}" for kind in kinds]
        if measured in kinds:
            labels[0] += _show_differences(panels[0], kinds[measured], maximize=what == "accuracy")
        return _finished(figure, panels, _SAMPLES, labels)

    return draw


def _show_differences(axes: Axes, curves: Sequence[Sequence[Point]], *, maximize: bool) -> str:
    """Cut off how runs began, where that takes most of the axis; returns what to add to the axis's label."""
    values = [value for points in curves for _, value in points]
    low, high = shown_range(values, maximize=maximize) or (0.0, 0.0)
    if not values or max(values) - min(values) < 2 * (high - low):
        return ""
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    return f"\n({'lower' if maximize else 'higher'} values cut off)"


def _seeds(runs: Sequence[RunRecord]) -> Figure | None:
    """Return the mean of the seeds of each setting, with its 95 % interval."""
    figure, (axes,) = _axes()
    places, shown = {id(run): index for index, run in enumerate(runs)}, []
    for label, own in by_setting(runs).items():
        curves, index = [dict(_measured(run, "accuracy")) for run in own], places[id(own[0])]
        found = {x: estimate([each[x] for each in curves]) for x in curves[0] if all(x in each for each in curves)}
        known = [(x, each.mean, each.half_width or 0.0) for x, each in found.items() if each is not None]
        if _draw(axes, [(x, y) for x, y, _ in known], index, f"{label}, {len(own)} seed{'' if len(own) == 1 else 's'}"):
            low, high = ([y + sign * half for _, y, half in known] for sign in (-1, 1))
            axes.fill_between([x for x, *_ in known], low, high, color=colour(index), alpha=0.2, linewidth=0)
            shown.append([*((x, y) for x, y, _ in known), (0.0, low[-1]), (0.0, high[-1])])
    if not shown:
        return None
    return _finished(figure, [axes], _SAMPLES, [f"accuracy{_show_differences(axes, shown, maximize=True)}"])


def _accuracy_by_time(runs: Sequence[RunRecord]) -> Figure | None:
    figure, (axes,) = _axes()
    curves = [_measured(run, "accuracy", "elapsed_s") for run in runs]
    for index, (run, points) in enumerate(zip(runs, curves, strict=True)):
        _draw(axes, points, index, run.name)
        reached = number(run.summary.get("time_to_accuracy_s"))
        if reached is not None:
            axes.axvline(reached, color=colour(index), linestyle="--", linewidth=0.9)
    cut = _show_differences(axes, curves, maximize=True) if len(runs) > 1 else ""
    return _finished(figure, [axes], "seconds of training", [f"accuracy{cut}"]) if any(curves) else None


def _throughput(runs: Sequence[RunRecord]) -> Figure | None:
    figure, (rate, count) = _axes(_HEIGHT_IN * 1.35, rows=2)
    drawn, what = [], "tokens" if all(run.by_epoch("tokens_per_s") for run in runs) else "images"
    for index, run in enumerate(runs):
        drawn.append(_draw(rate, _curve(run, f"throughput/{what}_per_s", f"{what}_per_s"), index, run.name))
        _draw(count, _curve(run, "num_learners", "num_learners"), index, None, drawstyle="steps-post")
    rate.set_ylim(bottom=0)
    count.set_ylim(bottom=0)
    return _finished(figure, [rate, count], _SAMPLES, [f"{what}/s", "learners a device"]) if any(drawn) else None


def _single(tag: str, column: str, label: str) -> Callable[[Sequence[RunRecord]], Figure | None]:

    def draw(runs: Sequence[RunRecord]) -> Figure | None:
        figure, (axes,) = _axes()
        drawn = [_draw(axes, _curve(run, tag, column), index, run.name) for index, run in enumerate(runs)]
        return _finished(figure, [axes], _SAMPLES, [label]) if any(drawn) else None

    return draw


def _metrics(runs: Sequence[RunRecord]) -> list[_Kind]:
    """Return a chart for each metric, without metrics of many values."""
    return [
        (f"metric_{number}_{re.sub(r'[^0-9A-Za-z]+', '_', name)[:40]}", name[:1].upper() + name[1:], _MEASURED,
         _single(f"metrics/{name}", f"metrics/{name}", name))
        for number, name in enumerate(metric_names(runs))
    ]  # fmt: skip


def _ranks(runs: Sequence[RunRecord]) -> Figure | None:
    figure, (axes,) = _axes()
    drawn = []
    for index, run in enumerate(runs):
        slowest, median = _steps(run)
        drawn.append(_draw(axes, slowest, index, run.name))
        _draw(axes, median, index, None, ":", alpha=0.6)
    axes.set_ylim(bottom=0)
    return _finished(figure, [axes], _SAMPLES, ["ms a round"]) if any(drawn) else None


def _steps(run: RunRecord) -> tuple[list[Point], list[Point]]:
    """Return the times of a round of the slowest rank and of the median one."""
    if slowest := run.curves.get("ranks/step_ms/slowest"):
        return list(slowest), list(run.curves.get("ranks/step_ms/median", ()))
    at: dict[float, list[float]] = {}
    for tag, points in run.curves.items():
        for x, y in points if _STEP_OF_RANK.fullmatch(tag) else ():
            at.setdefault(x, []).append(y)
    return [(x, max(steps)) for x, steps in at.items()], [(x, statistics.median(steps)) for x, steps in at.items()]


def _averaging(runs: Sequence[RunRecord]) -> Figure | None:
    figure, (spread, correction) = _axes(_HEIGHT_IN * 1.35, rows=2)
    # Learners that average gradients are all the same.
    apart = [(index, run) for index, run in enumerate(runs) if any(value for _, value in run.by_epoch("spread"))]
    drawn = [_draw(spread, run.by_epoch("spread"), index, run.name) for index, run in apart]
    for index, run in apart:
        _draw(correction, run.by_epoch("correction_norm"), index, None)
    labels = ["spread, share of |z|", "|step of z|, no momentum"]
    return _finished(figure, [spread, correction], _SAMPLES, labels) if any(drawn) else None


def _timeline(strip: Strip) -> Figure:
    figure, (axes,) = _axes(0.9 + 0.45 * len(strip.streams))
    axes.grid(visible=False)
    rows = {stream: index for index, stream in enumerate(strip.streams)}
    for task in dict.fromkeys(span.task for span in strip.spans):
        own = [span for span in strip.spans if span.task == task]
        starts = [(span.start_us - strip.start_us) / 1000 for span in own]
        lengths = [(span.end_us - span.start_us) / 1000 for span in own]
        axes.barh(
            [rows[span.stream] for span in own], lengths, left=starts, height=0.7, label=plain(task), linewidth=0.4,
            color=_TASK_COLOURS.get(task, _OTHER_TASK), edgecolor="white",
        )  # fmt: skip
    whole = max((span.end_us - strip.start_us) / 1000 for span in strip.spans)
    for span in strip.spans:
        length = (span.end_us - span.start_us) / 1000
        if length > whole / 25:
            middle = (span.start_us - strip.start_us) / 1000 + length / 2
            axes.text(
                middle, rows[span.stream], str(span.round_index), ha="center", va="center", fontsize=7, color="white"
            )
    axes.set_yticks(range(len(rows)), list(map(plain, rows)))
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds from the begin of round {strip.first_round}")
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _picture(pixels: Images) -> Figure:
    """Return a figure that is the picture; on a page a pixel is one of the picture's."""
    height, width, _ = pixels.shape
    figure = Figure(figsize=(width / _PAGE_DPI, height / _PAGE_DPI), dpi=_PAGE_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(pixels, interpolation="antialiased", aspect="auto")
    return figure


_CONFUSION = (
    "A row is a class, a column what it was predicted as; the redder, the more of the row. Independent models are "
    "counted together, each with its own prediction of a sample. The folder has the counts."
)
_TIMELINE = (
    "A row is a stream, a bar a task while it ran, its number the round. Where averaging overlaps the next round's "
    "learning, learners did not wait for it. The whole of it is in trace.json: open it in ui.perfetto.dev."
)
_MEASURED = "Of the test data, or the validation data where there is some."
_LEARNING: tuple[_Kind, ...] = (
    ("accuracy", "Accuracy", "Training accuracy is counted while the model still learns.",
     _learned("accuracy", lambda run: run.by_epoch("train_accuracy"))),
    ("accuracy_of_seeds", "Accuracy of settings", "The mean over seeds, and its 95 % interval by Student's t.",
     _seeds),
    ("accuracy_by_time", "Accuracy over time", "Evaluation does not count as training; dashed: the target was reached.",
     _accuracy_by_time),
    ("loss", "Loss", "That of training is with label smoothing, where there is some.",
     _learned("loss", lambda run: _curve(run, "loss/train", "train_loss"))),
)  # fmt: skip
_OTHERS: tuple[_Kind, ...] = (
    ("throughput", "Throughput and learners", "Below, what the auto-tuner made of the number of learners, if asked to.",
     _throughput),
    ("ranks", "The slowest rank", "What a round takes it by itself, without waiting for other ranks; dotted: the "
     "median rank.", _ranks),
    ("averaging", "Averaging", "How far learners are from the average model z, and how far a round moves it.",
     _averaging),
    ("learning_rate", "Learning rate", "As the optimizer has it: the schedule's, times what the averaging rule makes "
     "of it.", _single("learning_rate", "learning_rate", "learning rate")),
    ("waiting", "Waiting for data", "The share of time in which nothing trained for want of data.",
     _single("data/wait_share", "data_wait_share", "share of time")),
    ("goodput", "Efficiency", "What a sample is worth in so large a batch, to one of a single learner, by the gradient "
     "noise scale in training.", _single("goodput/efficiency", "efficiency", "efficiency")),
    ("noise_scale", "Gradient noise scale", "What a step averages over may grow up to about as many samples.",
     _single("learning/gradient_noise_scale_samples", "gradient_noise_scale_samples", "samples")),
)  # fmt: skip


@dataclass(frozen=True)
class Strip:
    """Spans of rounds in a row; `streams` from top to bottom, `first_round` the first of them, `start_us` its begin."""

    spans: tuple[Span, ...]
    streams: tuple[str, ...]
    first_round: int
    start_us: float


def typical_rounds(spans: Sequence[Span]) -> Strip | None:
    """Return the strip in whose rounds begin at the most usual distance, so that no evaluation or first round is shown.

    None where no span has a round.
    """
    starts: dict[int, float] = {}
    for span in spans:
        if span.round_index is not None:
            starts[span.round_index] = min(span.start_us, starts.get(span.round_index, span.start_us))
    if not starts:
        return None
    count = min(ROUNDS_SHOWN, len(starts))
    firsts = [index for index in starts if all(index + later in starts for later in range(count))] or [min(starts)]
    # To the start of the round after the last; of the last one if none follows.
    ends = {index: starts.get(index + count, starts.get(index + count - 1, starts[index])) for index in firsts}
    lengths = {index: end - starts[index] for index, end in ends.items()}
    usual = statistics.median(lengths.values())
    first = min(firsts, key=lambda index: (abs(lengths[index] - usual), index))
    shown = [each for each in spans if each.round_index in range(first, first + count)]
    streams = tuple(ordered_rows(each.stream for each in shown)[:MOST_STREAMS])
    tasks = list(dict.fromkeys(each.task for each in shown))[:MOST_STREAMS]
    kept = tuple(each for each in shown if each.stream in streams and each.task in tasks)
    return Strip(kept, streams, first, starts[first])
