"""The picture of a study: how members learned, one line each where there are few, else a median and a band."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from crossbow_py.many.results import FEW, Results, by_group, curve

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
_SHOWN = ("train_loss", "validation_loss", "validation_accuracy")


def draw_curves(results: Results) -> Figure:
    """Return the figure: a panel for each figure that was measured, by epoch."""
    found = {name for each in results for entry in each.history for name in entry}
    others = sorted(found - {"epoch", "samples", *_SHOWN})
    names = [name for name in (*_SHOWN, *others[:1]) if name in found] or ["train_loss"]
    figure = Figure(figsize=(4.6 * len(names), 3.8), layout="constrained")
    groups = by_group(results)
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        for number, (group, members) in enumerate(groups.items()):
            colour, label = _COLOURS[number % len(_COLOURS)], group or f"{len(members)} members"
            own = curve(members, name)
            single = len(own.epochs) == 1
            axes.plot(own.epochs, own.middle, color=colour, linewidth=2, label=label, marker="o" if single else None)
            if len(results) <= FEW:
                for each in members:
                    points = [(entry["epoch"], entry[name]) for entry in each.history if name in entry]
                    axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.7, alpha=0.6)
            else:
                axes.fill_between(own.epochs, own.low, own.high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xlabel("epoch")
        axes.set_title(name.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if place == 0:
            axes.legend(title="median, and the middle 80 %" if len(results) > FEW else "median, and each member")
    return figure
