"""The table on the first page: the figures that say most, each from the results file of its experiment."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.common.markdown import NONE, markdown_table
from experiments.common.results import read_results
from experiments.throughput import suite_report
from experiments.throughput.sides import EXECUTOR_SIDES
from experiments.time_to_accuracy.report import fastest, times_of
from experiments.time_to_accuracy.run import DEFAULT, LEARNERS, TUNED

NAME = "headline"
_HEADER = ["", "crossbow_py", "one tuned model", "PyTorch's default loop", "n", "cores"]
_TIMES = (("resnet32", 0.88, "ResNet-32 on CIFAR-10 to {}, s"), ("lenet", 0.99, "LeNet on MNIST to {}, s"))
_MODELS = {"mlp": "MLP", "lenet": "LeNet", "resnet32": "ResNet-32", "vgg16": "VGG-16"}


def table() -> str:
    """A row a figure."""
    return markdown_table(_HEADER, [*_time_rows(), *_search_rows(), *_throughput_rows()])


def _time_rows() -> list[list[str]]:
    results, rows = read_results("time_to_accuracy"), []
    for name, target, title in _TIMES:
        result = results[name]
        times = times_of(result, target)
        cells = [fastest(result, side, times) for side in (LEARNERS, TUNED, DEFAULT)]
        values = [f"{median(times[cell].values()):,.1f}" if cell else NONE for cell in cells]
        runs = max(len(times[cell]) for cell in cells if cell)
        own = cells[0].removeprefix(f"{LEARNERS}, ") if cells[0] else ""
        rows.append([title.format(target), f"{values[0]} ({own})", *values[1:], str(runs), _cores(result)])
    return rows


def _search_rows() -> list[list[str]]:
    result = read_results("hyperband")["lenet_mnist"]
    seconds = [f"{result['seconds'][side]['median']:,.0f}" for side in ("packed", "one_at_a_time", "default_loop")]
    own = f"{seconds[0]} (packs)"
    trials = {trial for trial, *_ in result["runs"]["packed"][0]["values"]}
    title = f"Hyperband over {len(trials)} LeNets on MNIST, s"
    return [[title, own, *seconds[1:], str(result["repetitions"]), _cores(result)]]


def _throughput_rows() -> list[list[str]]:
    result, rows = read_results("throughput")["suite_cpu"], []
    size = suite_report.main_batch_size(result)
    for model, name in _MODELS.items():
        own = suite_report.rows_of_model(result, model)
        best = suite_report.best_row(own, batch_size=size, sides=EXECUTOR_SIDES)
        single, loop = (
            suite_report.best_row(own, batch_size=size, sides=[side]) for side in ("tuned_single", "default_loop")
        )
        assert best is not None, f"{model} was measured"
        fastest_cell = f"{best['images_per_s']:,.0f} (K={best['num_learners']}, {best['side']})"
        rates = [f"{row['images_per_s']:,.0f}" if row else NONE for row in (single, loop)]
        rows.append([f"{name}, batches of {size}, images/s", fastest_cell, *rates, str(best["n"]), _cores(result)])
    return rows


def _cores(result: Mapping[str, Any]) -> str:
    """How many, and whether they multiply bfloat16."""
    facts = result["machine"]
    fast = any("bf16" in flag for flag in facts["flags"])
    return f"{facts['cores']}{' (bf16)' if fast else ''}"
