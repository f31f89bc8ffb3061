"""Seconds to an accuracy on CIFAR-10: the recipe `cifar10_fast`, and airbench's own script on the same cores.

    python experiments/cifar10_fast/run.py --airbench PATH

PATH is a clone of https://github.com/KellerJordan/cifar10-airbench. Sides take turns, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import foreign_share
from crossbow_py.data.datasets import as_pair
from crossbow_py.data.sources import SOURCES
from crossbow_py.telemetry.records import METRICS_FILE, SUMMARY_FILE
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import load_with_ended, spread
from experiments.cifar10_fast.airbench_side import SCRIPT, ChangedScriptError, Changes, changed
from experiments.tables.markdown import NONE, markdown_table, spread_text

Point = tuple[float, float, float]  # epochs, seconds of training, test accuracy
OURS, SMALL, PUBLISHED = "crossbow_py", "airbench", "airbench-2000"
_IMAGES = 50_000  # in an epoch
SIDES = (OURS, SMALL, PUBLISHED)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--airbench", type=Path, default=Path("cifar10-airbench"), metavar="PATH", help="a clone (%(default)s)")
    add("--sides", nargs="+", choices=SIDES, default=[OURS, SMALL], help="default: the first two")
    add("--seeds", type=count, default=3, help="runs of each side (default %(default)s)")
    add("--target", type=positive, default=0.9, help="test accuracy (default %(default)s)")
    add("--widths", type=count, nargs=3, default=(24, 96, 96), help="channels of the groups (default 24 96 96)")
    add("--epochs", type=positive, nargs=2, default=(7.0, 6.0), help=f"of {OURS} and {SMALL} (default 7 6)")
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help=f"what {OURS} has other than the recipe")
    add("--batch-size", type=count, default=256, help=f"of {SMALL} (default %(default)s)")
    add("--rate", type=positive, default=0.09, help=f"Muon's learning rate of {SMALL} (default %(default)s)")
    add("--published-epochs", type=positive, default=8.0, help=f"of {PUBLISHED} (default %(default)g)")
    add("--quick", action="store_true", help="see whether it works: two rounds, or 1/50 of an epoch")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The runs of all sides, seed by seed, in one order and then the other. Raises UserError."""
    sides = _settings(given)
    if set(sides) - {OURS}:
        _check(given.airbench, sides)
    runs = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        if set(sides) - {OURS}:
            _write_images(Path(folder) / "cifar10")
        for seed in range(given.seeds):
            for side in sides if seed % 2 == 0 else reversed(sides):
                begun = load_with_ended()
                own = _ours if side == OURS else _theirs
                curve, batches = own(given, sides[side], seed, Path(folder))
                share = foreign_share(begun, load_with_ended())
                run = {"side": side, "seed": seed, "batches": batches, "curve": curve, "foreign_share": share}
                runs.append(run)
                print(f"{side}, seed {seed}: {curve[-1][2]:.4f} after {curve[-1][1]:.0f} s", file=sys.stderr)
    return {"target": given.target, "widths": [*given.widths], "sides": sides, "runs": runs}


def _settings(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What differs between the sides that were asked for."""
    every: dict[str, dict[str, Any]] = {
        OURS: {"epochs": given.epochs[0]},
        SMALL: {"epochs": given.epochs[1], "batch_size": given.batch_size, "rate": given.rate},
        PUBLISHED: {"epochs": given.published_epochs},
    }
    found = {side: every[side] for side in SIDES if side in given.sides}
    return {side: {**own, "epochs": 0.02} for side, own in found.items()} if given.quick else found


def _check(clone: Path, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError where there is no script in the clone, or another one than the changes are for."""
    path = clone / SCRIPT
    if not path.is_file():
        raise UserError(
            f"{path} is missing; git clone https://github.com/KellerJordan/cifar10-airbench {clone}, or leave its "
            f"sides out by --sides {OURS}."
        )
    try:
        for side in set(sides) - {OURS}:
            changed(path.read_text(encoding="utf-8"), Changes(**sides[side]))
    except ChangedScriptError as error:
        raise UserError(str(error)) from error


def _write_images(folder: Path) -> None:
    """Write the images as the script keeps them, so that it downloads none."""
    source = SOURCES["cifar10"]().load(progress=False)
    folder.mkdir()
    for name, data in (("train", source.train), ("test", source.test)):
        pair = as_pair(data)
        assert pair is not None, "the images are in memory"
        images, labels = pair
        kept = {
            "images": images.permute(0, 2, 3, 1).contiguous(),
            "labels": labels,
            "classes": list(source.class_names or ()),
        }
        torch.save(kept, folder / f"{name}.pt")


def _ours(given: argparse.Namespace, own: Mapping[str, Any], seed: int, folder: Path) -> tuple[list[Point], str]:
    run = folder / f"run-{seed}"
    words = ["-m", "crossbow_py.train", "+experiment=cifar10_fast", f"seed={seed}", f"output_dir={run}",
             f"max_epochs={own['epochs']}", f"model.widths=[{','.join(map(str, given.widths))}]",
             "precision=fp32", "checkpoint_every_epochs=null", "logger=[]", *given.ours]  # fmt: skip
    _run([*words, "+debug=fast"] if given.quick else words)
    summary = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
    records = map(json.loads, (run / METRICS_FILE).read_text(encoding="utf-8").splitlines())
    curve = [(each["epoch"], each["elapsed_s"], each["test_accuracy"]) for each in records]
    return curve, f"{summary['num_learners']} × {summary['batch_size']}"


def _theirs(given: argparse.Namespace, own: Mapping[str, Any], seed: int, folder: Path) -> tuple[list[Point], str]:
    changes = Changes((given.widths[0], given.widths[1], given.widths[2]), **own)
    words = [str(Path(__file__).with_name("airbench_side.py")), str(given.airbench / SCRIPT), str(folder)]
    words += [",".join(map(str, changes.widths)), str(changes.batch_size), str(changes.epochs), str(changes.rate)]
    return curve_of(_run([*words, str(seed)]), changes.epochs), str(changes.batch_size)


def curve_of(printed: str, epochs: float) -> list[Point]:
    """Return the evaluations after each epoch in the table that the script prints."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "|" in line]
    rows = [row for row in cells if len(row) == 6 and row[1].isdecimal()]
    return [(min(int(row[1]) + 1.0, epochs), float(row[5]), float(row[3])) for row in rows]


def _run(words: Sequence[str]) -> str:
    """Return what a program prints. Raises RuntimeError with its last words if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # each side takes all cores as it does by itself
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return done.stdout


def seconds_to(target: float, curve: Sequence[Point]) -> float | None:
    """Return the seconds of training at the first evaluation that reached the target."""
    return next((seconds for _, seconds, accuracy in curve if accuracy >= target), None)


def result_text(result: Mapping[str, Any]) -> str:
    target, runs = result["target"], result["runs"]
    times = {
        side: {
            run["seed"]: found for run in runs if run["side"] == side and (found := seconds_to(target, run["curve"]))
        }
        for side in result["sides"]
    }
    rows = []
    for side, settings in result["sides"].items():
        own = [run for run in runs if run["side"] == side]
        speeds = [_IMAGES * run["curve"][-1][0] / run["curve"][-1][1] for run in own]
        shares = [run["foreign_share"] for run in own if run["foreign_share"] is not None]
        ratios = [_ratio(times[side], times[other]) for other in (SMALL, PUBLISHED) if other in times]
        rows.append([
            side, own[0]["batches"], f"{settings['epochs']:g}", f"{median(speeds):,.0f}",
            spread_text(spread([run["curve"][-1][2] for run in own]), ".4f"), f"{len(times[side])} of {len(own)}",
            spread_text(spread([*times[side].values()]), ".1f"), *ratios, f"{max(shares):.0%}" if shares else NONE,
            str(len(own)),
        ])  # fmt: skip
    head = ["", "batches", "epochs", "images/s", "accuracy at the end", f"reached {target:g}", f"seconds to {target:g}"]
    head += [f"time ÷ {other}'s" for other in (SMALL, PUBLISHED) if other in times]
    return markdown_table([*head, "others took at most", "n"], rows)


def _ratio(own: Mapping[int, float], base: Mapping[int, float]) -> str:
    return spread_text(spread([own[seed] / base[seed] for seed in own if seed in base]))


TABLES = {"all": result_text}

if __name__ == "__main__":
    raise SystemExit(main())
