"""Hyperband with packs against Hyperband one trial at a time: wall time and best accuracy, same trials and budget.

    python experiments/hyperband/run.py [--device cpu|cuda] [--repetitions 3] [--json PATH] [KEY=VALUE ...]

README.md says what the sides are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.mnist import Mnist
from crossbow_py.engine.modules.precision import choose_device
from experiments.bench.machine import usable_cores
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import spread
from experiments.hyperband.measure import measure_hyperband
from experiments.hyperband.others import OPTUNA, OTHERS, RAY
from experiments.tables.markdown import cores, markdown_table, spread_text

Result = Mapping[str, Any]
NAMES = {
    OPTUNA: "Optuna, a trial a process",
    RAY: "Ray Tune, fractions of the device",
    "default_loop": "PyTorch's default loop, one trial at a time",
    "one_at_a_time": "one tuned trial at a time",
    "packed": "packs",
}
# Times as fast as these sides, by device.
_WANTED = {"cpu": {"default_loop": 2.7, "one_at_a_time": 1.6}, "cuda": {"default_loop": 5.0}}
DEFAULTS = ("+experiment=search_lenet", "max_epochs=1", "min_epochs=0.1111111111")
# As many images of MNIST's shape.
SYNTHETIC = ("data=synthetic", "data.shape=[1,28,28]", "data.num_train=60000", "data.num_test=10000")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--device")
    add = parser.add_argument
    add("--repetitions", type=count, default=3, help="searches by each side (default %(default)s)")
    add("--processes", type=int, choices=range(257), metavar="N", default=usable_cores(),
        help="trials at a time by Optuna and Ray Tune, on a CPU; 0 leaves them out (default %(default)s)")
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the search (default {' '.join(DEFAULTS)})")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        device = choose_device(given.device).type
        overrides = given.overrides or default_search()
        return measure_hyperband(overrides, given.repetitions, device, given.processes)

    return measure_and_write(parser, argv, measure, result_text)


def names_of(result: Result) -> dict[str, str]:
    """The sides that a result has, and how they are called; the last is packs."""
    return {side: name for side, name in NAMES.items() if side in result["runs"]}


def default_search() -> tuple[str, ...]:
    """LeNet on MNIST when that is here and whole, else on synthetic images."""
    try:
        Mnist(download=False).load(progress=False)
    except UserError as error:
        print(f"synthetic images instead of MNIST: {error}", flush=True)
        return (*DEFAULTS, *SYNTHETIC)
    return DEFAULTS


def sides_table(result: Result) -> str:
    rows, goals = [], wanted(result)
    for side, name in names_of(result).items():
        seconds, runs = result["seconds"][side], result["runs"][side]
        ratio = result["ratios"].get(f"{side}_over_packed")
        samples, trials = (median(values) for values in ([run["samples"] for run in runs], trial_counts(runs)))
        rows.append(
            [
                name,
                _precision(result, side),
                spread_text(seconds, ".0f"),
                f"{samples / seconds['median']:,.0f}",
                f"{trials / seconds['median']:.2f}",
                "" if ratio is None else spread_text(ratio),
                f"≥ {goals[side]}" if side in goals else "",
                f"{result['best'][side]:.4f}",
                str(len(runs)),
            ]
        )
    header = ["", "precision", "seconds", "images/s", "trials/s", "÷ packs", "wanted", "test accuracy of the best", "n"]
    return markdown_table(header, rows)


def trial_counts(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many trials each run has values of."""
    return [len({trial for trial, *_ in run["values"]}) for run in runs]


def headline(result: Result) -> str:
    sentences, goals = [], wanted(result)
    for side in list(names_of(result))[:-1]:
        ratio, does = result["ratios"][f"{side}_over_packed"], "end the search {} times as fast"
        if side in OTHERS:  # they go on with other trials
            ratio, does = pace_ratio(result, side), "train {} times as many images a second"
        own, theirs = (_precision(result, each) for each in ("packed", side))
        said = f"Packs in {own} {does.format(spread_text(ratio))} as {NAMES[side]} in {theirs}"
        said += f" (n={len(result['runs'][side])})"
        if side in goals:
            verdict = "and is reached" if ratio["median"] >= goals[side] else "and is missed"
            said += f"; at least {goals[side]} is the goal, {verdict}"
        sentences.append(f"{said}.")
    accuracies = ", ".join(f"{result['best'][side]:.4f} by {name}" for side, name in names_of(result).items())
    return " ".join([*sentences, f"Test accuracy of the best trial: {accuracies}."])


def pace_ratio(result: Result, side: str) -> dict[str, float] | None:
    """The images/s of packs ÷ those of a side, over the whole search, within repetitions."""
    own, theirs = ([run["samples"] / run["seconds"] for run in result["runs"][each]] for each in ("packed", side))
    return spread([ours / other for ours, other in zip(own, theirs, strict=True)])


def wanted(result: Result) -> Mapping[str, float]:
    """The speed-up of packs that was wanted, by side; results of before there was a choice are of CPUs."""
    return _WANTED[result.get("device", "cpu")]


def overhead_text(result: Result) -> str:
    shares = [run["overhead_s"] / run["seconds"] for run in result["runs"]["packed"]]
    return (
        f"Sampling, storage, files of trials and changing seats took {median(shares):.1%} of the packed search's time "
        f"({min(shares):.1%} to {max(shares):.1%})."
    )


def others_text(result: Result) -> str:
    """What Optuna and Ray Tune were given, and which of them is left out; nothing of results without them."""
    said = [f"{NAMES[side]}: left out, {reason}." for side, reason in result.get("left_out", {}).items()]
    if any(side in result["runs"] for side in OTHERS):
        said.insert(0, f"Optuna and Ray Tune train {result['num_processes']} trials at a time.")
    if starts := [run["start_s"] for run in result["runs"].get(RAY, ())]:
        said.append(f"Of Ray Tune's seconds, {median(starts):.1f} were over when its first trial began.")
    return " ".join(said)


def result_text(result: Result) -> str:
    packing = " ".join(dict.fromkeys(result["packing"]))
    said = (f"`{' '.join(result['overrides'])}`", packing, sides_table(result), overhead_text(result),
            others_text(result))  # fmt: skip
    return "\n\n".join(text for text in said if text)


def _precision(result: Result, side: str) -> str:
    precision: str = result["runs"][side][0].get("precision", "fp32")  # earlier results were all in that
    return precision


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    result = results["lenet_mnist"]
    seconds = [f"{result['seconds'][side]['median']:,.0f}" for side in ("packed", "one_at_a_time", "default_loop")]
    title = f"Hyperband over {trial_counts(result['runs']['packed'])[0]} LeNets on MNIST, s"
    return [[title, f"{seconds[0]} (packs)", *seconds[1:], str(result["repetitions"]), cores(result)]]


TABLES = {"all": result_text, "headline": headline}
HEADLINE = headline_rows


if __name__ == "__main__":
    raise SystemExit(main())
