"""Tables of Hyperband by three sides, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.tables.headline import cores
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]

NAMES = {
    "default_loop": "PyTorch's default loop, one trial at a time",
    "one_at_a_time": "one tuned trial at a time",
    "packed": "packs",
}
# Times as fast as these sides, by device.
_WANTED = {"cpu": {"default_loop": 2.7, "one_at_a_time": 1.6}, "cuda": {"default_loop": 5.0}}


def sides_table(result: Result) -> str:
    rows, goals = [], wanted(result)
    for side, name in NAMES.items():
        seconds, runs = result["seconds"][side], result["runs"][side]
        ratio = result["ratios"].get(f"{side}_over_packed")
        samples = median(run["samples"] for run in runs)
        rows.append(
            [
                name,
                _precision(result, side),
                spread_text(seconds, ".0f"),
                f"{samples / seconds['median']:,.0f}",
                "" if ratio is None else spread_text(ratio),
                f"≥ {goals[side]}" if side in goals else "",
                f"{result['best'][side]:.4f}",
                str(len(runs)),
            ]
        )
    header = ["", "precision", "seconds", "images/s", "÷ packs", "wanted", "test accuracy of the best", "n"]
    return markdown_table(header, rows)


def headline(result: Result) -> str:
    """Say how many times as fast packs are, and whether that is what was wanted."""
    sentences, goals = [], wanted(result)
    for side in list(NAMES)[:-1]:
        ratio = result["ratios"][f"{side}_over_packed"]
        own, theirs = (_precision(result, each) for each in ("packed", side))
        said = f"Packs in {own} end the search {spread_text(ratio)} times as fast as {NAMES[side]} in {theirs}"
        said += f" (n={len(result['runs'][side])})"
        if side in goals:
            verdict = "and is reached" if ratio["median"] >= goals[side] else "and is missed"
            said += f"; at least {goals[side]} is the goal, {verdict}"
        sentences.append(f"{said}.")
    accuracies = ", ".join(f"{result['best'][side]:.4f} by {name}" for side, name in NAMES.items())
    return " ".join([*sentences, f"Test accuracy of the best trial: {accuracies}."])


def wanted(result: Result) -> Mapping[str, float]:
    """The speed-up of packs that was wanted, by side; results of before there was a choice are of CPUs."""
    return _WANTED[result.get("device", "cpu")]


def overhead_text(result: Result) -> str:
    shares = [run["overhead_s"] / run["seconds"] for run in result["runs"]["packed"]]
    return (
        f"Sampling, storage, files of trials and changing seats took {median(shares):.1%} of the packed search's time "
        f"({min(shares):.1%} to {max(shares):.1%})."
    )


def result_text(result: Result) -> str:
    packing = " ".join(dict.fromkeys(result["packing"]))
    return f"`{' '.join(result['overrides'])}`\n\n{packing}\n\n{sides_table(result)}\n\n{overhead_text(result)}"


def _precision(result: Result, side: str) -> str:
    precision: str = result["runs"][side][0].get("precision", "fp32")  # earlier results were all in that
    return precision


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    """The search on the first page: seconds of packs, of one tuned trial at a time and of the default loop."""
    result = results["lenet_mnist"]
    seconds = [f"{result['seconds'][side]['median']:,.0f}" for side in ("packed", "one_at_a_time", "default_loop")]
    trials = {trial for trial, *_ in result["runs"]["packed"][0]["values"]}
    title = f"Hyperband over {len(trials)} LeNets on MNIST, s"
    return [[title, f"{seconds[0]} (packs)", *seconds[1:], str(result["repetitions"]), cores(result)]]


TABLES = {"all": result_text, "headline": headline}
HEADLINE = headline_rows
