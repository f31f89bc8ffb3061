"""Everything left at its default: how soon is there a number, and how near is it to that of tuned rates?

    python experiments/defaults/run.py [--seeds N] [--epochs N] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import Tensor, nn

from crossbow_py import SGD, AdamW, Member, Trainer, train_many
from experiments.bench.machine import ROOT, usable_cores
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.many_models.run import beside
from experiments.tables.markdown import markdown_table

TASKS = ("regression", "classification")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
OPTIMIZERS = {"sgd": SGD, "adamw": AdamW}
Pair = tuple[Tensor, Tensor]
_HEAD = (
    "", "first number, s", "beside busy cores, s", "test loss, default", "of the best rate", "default ÷ best", "n",
)  # fmt: skip


def data_of(task: str) -> tuple[Pair, Pair, nn.Module | None, int]:
    """1,000 rows of ten columns to train on and 4,000 to test on, the loss, and the model's outputs."""
    draw = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5000, 10, generator=draw), torch.randn(10, generator=draw)
    y = (x @ weights + 2 * x[:, 0] * x[:, 1] + 0.5 * torch.randn(5000, generator=draw))[:, None]
    if task == "classification":
        return (x[:1000], (y[:1000, 0] > 0).long()), (x[1000:], (y[1000:, 0] > 0).long()), None, 2
    return (x[:1000], y[:1000]), (x[1000:], y[1000:]), nn.MSELoss(), 1


def make(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def by_default(task: str, seed: int, epochs: int) -> dict[str, float]:
    """The test loss of a run of which nothing is set, and the seconds until there is one."""
    train, test, loss, outputs = data_of(task)
    begun = time.perf_counter()
    result = Trainer(lambda: make(outputs), train, test, loss=loss, seed=seed).fit(max_epochs=epochs)
    assert result.test_loss is not None, "there is test data"
    return {"seconds": time.perf_counter() - begun, "test_loss": result.test_loss}


def tuned(task: str, seeds: int, epochs: int) -> list[dict[str, Any]]:
    """The mean test loss of every optimizer and constant rate, plain learners of the same epochs and batches."""
    train, test, loss, outputs = data_of(task)
    cells = [(name, rate) for name in OPTIMIZERS for rate in RATES]
    members = [
        Member(group=f"{name} {rate}", seed=seed, optimizer=OPTIMIZERS[name](learning_rate=rate))
        for name, rate in cells for seed in range(seeds)
    ]  # fmt: skip
    found = train_many(
        lambda: make(outputs), train, test, members=members, loss=loss, batch_size=16, max_epochs=epochs,
        standardize_targets=loss is not None, precision="fp32",
    )  # fmt: skip
    of_cell = {name: [own.test_loss for own in found if own.group == name] for name in {own.group for own in found}}
    return [
        {"optimizer": name, "rate": rate, "test_losses": of_cell[f"{name} {rate}"]} for name, rate in cells
    ]  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for busy in (0, usable_cores()):
        with beside(busy):
            for task in TASKS:
                for seed in range(given.seeds):
                    words = [sys.executable, str(Path(__file__)), "--run", task, str(seed), str(given.epochs)]
                    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
                    runs.append({"task": task, "seed": seed, "busy": busy, **json.loads(done.stdout.splitlines()[-1])})
    return {"runs": runs, "tuned": {task: tuned(task, given.seeds, given.epochs) for task in TASKS}}


def result_text(result: Mapping[str, Any]) -> str:
    rows = []
    for task, cells in result["tuned"].items():
        own = [run for run in result["runs"] if run["task"] == task]
        quiet, busy = ([run["seconds"] for run in own if bool(run["busy"]) == side] for side in (False, True))
        loss = fmean(run["test_loss"] for run in own)
        trained = [cell for cell in cells if None not in cell["test_losses"]]  # others have diverged
        best = min(trained, key=lambda cell: fmean(cell["test_losses"]))
        lowest, name = fmean(best["test_losses"]), f"{best['optimizer']} {best['rate']}"
        rows.append([
            task, f"{median(quiet):.1f}", f"{median(busy):.1f}", f"{loss:.4f}", f"{lowest:.4f} ({name})",
            f"{loss / lowest:.2f}", str(len(quiet)),
        ])  # fmt: skip
    return markdown_table(_HEAD, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--seeds", type=count, default=5, help="of every cell (default %(default)s)")
    add("--epochs", type=count, default=10, help="of every run (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


TABLES = {"all": result_text}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(by_default(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        raise SystemExit(0)
    raise SystemExit(main())
