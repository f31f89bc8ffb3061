"""The picture of a study: how members learned, and what each has in the end.

A line for each member where there are few, else a median and a band; the best member is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from crossbow_py.core.intervals import estimate
from crossbow_py.many.results import BAND, FEW, MemberResult, Results, by_group, curve
from crossbow_py.telemetry.pictures.files import plain

# Those of Okabe and Ito, which readers who see few colours can tell apart, without yellow.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#8C564B")
_SHOWN = ("train_loss", "validation_loss", "validation_accuracy")
# The first of these that was measured is shown of the end.
_ENDS = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "train_loss")
_GOLDEN = 0.618034  # multiples of it, without whole parts, lie evenly apart


def draw_curves(results: Results) -> Figure:
    """Return the figure: panels of what was measured on the way, by epoch, and one of each member's end."""
    found = {name for each in results for entry in each.history for name in entry}
    others = sorted(found - {"epoch", "samples", *_SHOWN})
    groups, best = by_group(results), next(iter(results.best_first()), None)
    measured = [name for name in (*_SHOWN, *others[:1]) if name in found]
    names = [name for name in measured if any(len(curve(own, name).epochs) > 1 for own in groups.values())]
    figure = Figure(figsize=(4.6 * (len(names) + 1), 3.8), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names) + 1, place + 1)
        _draw_by_epoch(axes, groups, name, best, few=len(results) <= FEW)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if place == 0:
            band = f"median, and from {BAND[0]} to {BAND[1]} % of members"
            axes.legend(title="median, and each member" if len(results) <= FEW else band)
    _draw_ends(figure.add_subplot(1, len(names) + 1, len(names) + 1), groups, best)
    return figure


def _draw_by_epoch(
    axes: Axes, groups: Mapping[str, Sequence[MemberResult]], name: str, best: MemberResult | None, *, few: bool
) -> None:
    for colour, (group, members) in zip(_COLOURS, groups.items(), strict=False):
        own = curve(members, name)
        axes.plot(own.epochs, own.middle, color=colour, linewidth=2, label=plain(group) or f"{len(members)} members")
        for each in [curve([each], name) for each in members] if few else []:
            axes.plot(each.epochs, each.middle, color=colour, linewidth=0.7, alpha=0.6)
        if not few:
            axes.fill_between(own.epochs, own.low, own.high, color=colour, alpha=0.2, linewidth=0)
    if best is not None:
        own = curve([best], name)
        axes.plot(own.epochs, own.middle, "--", color="black", linewidth=1.2, label=plain(f"best: {best.name}"))
    axes.set(xlabel="epoch", title=plain(name.replace("_", " ")))
    axes.grid(alpha=0.3)


def _draw_ends(axes: Axes, groups: Mapping[str, Sequence[MemberResult]], best: MemberResult | None) -> None:
    """Draw a dot for each member, and each group's mean with its interval."""
    ends = {id(each): {**each.history[-1], **each.figures()} for own in groups.values() for each in own}
    name = next((name for name in _ENDS if any(name in end for end in ends.values())), _ENDS[-1])
    for place, (colour, members) in enumerate(zip(_COLOURS, groups.values(), strict=False)):
        values = {each.name: ends[id(each)][name] for each in members if name in ends[id(each)]}
        heights = [place + 0.5 * ((n * _GOLDEN) % 1 - 0.5) for n in range(len(values))]
        axes.plot(list(values.values()), heights, "o", color=colour, alpha=0.5, markersize=4)
        if (own := estimate(list(values.values()))) is not None:
            axes.errorbar(own.mean, place, xerr=own.half_width, fmt="D", color="black", capsize=4, markersize=4)
        if best is not None and best.name in values:
            at = values[best.name], heights[list(values).index(best.name)]
            axes.plot(*at, "*", color="black", markersize=10)
            axes.set_xlabel(plain(f"★ best: {best.name}"))
    axes.set_yticks(range(len(groups)), [plain(group) or "all" for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_title(plain(f"{name.replace('_', ' ')} at the end, mean ± 95 % interval"), fontsize=10)
    axes.grid(alpha=0.3)
