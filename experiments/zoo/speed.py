"""How fast is each executor with models that people bring, and does `executor=auto` take the fastest?

    python experiments/zoo/speed.py [--models test_vit resnetv2_18] [--learners 2 4 8] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py import SGD, Trainer
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.core.errors import CrossbowError, UserError, one_line
from experiments.bench.machine import machine
from experiments.bench.program import count, measuring_parser, positive, show_and_write
from experiments.bench.results import read_result, write_result
from experiments.bench.rounds import trained_window
from experiments.bench.windows import Window, Windows, by_turns
from experiments.tables.markdown import NONE, markdown_table, spread_text
from experiments.zoo.models import TIMM, entry_of

Result = Mapping[str, Any]
EXECUTORS = ("serial", "threads", "fused", "fused_threads")
FUSED = ("fused", "fused_threads")
BATCH_SIZE, NUM_SAMPLES = 8, 512
LEARNERS = (2, 4, 8)
REPETITIONS, WINDOW_S = 3, 0.4
KIND = "speed"
NEAR = 0.95  # of the fastest executor's throughput: auto has taken one that is as good


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as asked for; prints the table and returns the exit code."""
    parser = measuring_parser(__doc__, written="write the results there, after every model")
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help="by default all of timm")
    add("--learners", nargs="+", type=count, default=list(LEARNERS), metavar="K", help="default %(default)s")
    add("--repetitions", type=count, default=REPETITIONS, help="windows a side (default %(default)s)")
    add("--seconds", type=positive, default=WINDOW_S, help="of a window (default %(default)s)")
    options = parser.parse_args(argv)
    wanted = options.models or list(TIMM)
    if unknown := [name for name in wanted if name not in TIMM]:
        print(f"error: --models must be of {', '.join(TIMM)}, got {unknown[0]}.", file=sys.stderr)
        return 2
    method = {"batch_size": BATCH_SIZE, "repetitions": options.repetitions, "seconds": options.seconds}
    result: dict[str, Any] = {
        "kind": KIND, "machine": machine(), "versions": {"timm": importlib.metadata.version("timm")}, **method,
        "rows": _earlier(options.json, method),
    }  # fmt: skip
    there = {(row["model"], row["num_learners"]) for row in result["rows"]}
    for name in wanted:
        for num_learners in options.learners:
            if (name, num_learners) not in there:
                row = _in_a_process(name, num_learners, options.repetitions, options.seconds)
                result["rows"].append(row)
                print(_line(row), flush=True)
        if options.json:
            write_result(options.json, result)
    show_and_write(result, result_text, options.json)
    return 0


def _earlier(path: Path | None, method: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what an earlier run, stopped midway, has measured by the same method."""
    if path is None or not path.exists():
        return []
    result = read_result(path)
    return list(result["rows"]) if all(result.get(key) == value for key, value in method.items()) else []


def _in_a_process(name: str, num_learners: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """Measure in a process of its own, with which a model's memory goes. `crashed` says that it did not survive."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measured, name, num_learners, repetitions, seconds).result()
        except BrokenProcessPool:
            nothing = dict.fromkeys(("auto", "best", "auto_over_best", "fused_over_apart"))
            return {"model": name, "num_learners": num_learners, "crashed": True, "executors": {}, **nothing}


def measured(name: str, num_learners: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """Measure every executor by turns, after `auto` has chosen one; `refused` says why one cannot run the model."""
    warnings.simplefilter("ignore")  # packages' own
    entry = entry_of(name)
    data = entry.data(NUM_SAMPLES)
    row: dict[str, Any] = {"model": name, "num_learners": num_learners, "refused": {}}

    def trainer(executor: str, cache: str, channels_last: bool = True) -> Trainer:
        return Trainer(
            model=entry.build, train_data=data, batch_size=BATCH_SIZE, num_learners=num_learners, executor=executor,
            averaging=SynchronousSGD(), optimizer=SGD(learning_rate=1e-4), device="cpu", precision="fp32",
            channels_last=channels_last, executor_cache=Path(cache) / "executors.json",
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as cache:
        try:
            auto = trainer("auto", cache)
        except UserError:  # torch cannot train it in that format
            row["channels_last"] = False
            auto = trainer("auto", cache, channels_last=False)
        row |= {"auto": auto.choices.executor, "parameters": auto.run.bank.layout.num_values}
        del auto
        trainers = {}
        for executor in EXECUTORS:
            try:
                trainers[executor] = trainer(executor, cache, row.get("channels_last", True))
                trainers[executor].fit(max_rounds=2)
            except CrossbowError as error:
                trainers.pop(executor, None)
                row["refused"][executor] = one_line(error)[:200]
    windows: dict[str, Windows[Window]] = {executor: Windows() for executor in trainers}
    for executor in by_turns(list(trainers), repetitions):
        windows[executor].add(
            partial(trained_window, trainers[executor], BATCH_SIZE * num_learners, seconds=seconds)
        )
    row["executors"] = {executor: own.figures() for executor, own in windows.items()}
    rates = {executor: own["images_per_s"] for executor, own in row["executors"].items() if own["images_per_s"]}
    best = max(rates, key=rates.__getitem__, default=None)
    row |= {"best": best, "auto_over_best": windows[row["auto"]].ratio(windows[best]) if best else None}
    fused, apart = (max((e for e in rates if (e in FUSED) is kind), key=rates.__getitem__, default=None)
                    for kind in (True, False))  # fmt: skip
    row["fused_over_apart"] = windows[fused].ratio(windows[apart]) if fused and apart else None
    return row


def _line(row: Mapping[str, Any]) -> str:
    rates = {executor: own["images_per_s"] for executor, own in row["executors"].items()}
    return f"{row['model']} K={row['num_learners']}: {rates}, auto took {row['auto']}"


def result_text(result: Result) -> str:
    return "\n\n".join([summary_table(result), models_table(result)])


def summary_table(result: Result) -> str:
    rows = []
    for count_, own in _by_learners(result).items():
        both = [row["fused_over_apart"]["median"] for row in own if row["fused_over_apart"]]
        regret = [row["auto_over_best"]["median"] for row in own if row["auto_over_best"]]
        wins = sum(ratio > 1 for ratio in both)
        rows.append([
            str(count_), f"{wins} of {len(both)}", f"{median(both):.2f} ({min(both):.2f}–{max(both):.2f})",
            f"{sum(ratio >= NEAR for ratio in regret)} of {len(regret)}", f"{min(regret):.2f}",
        ])  # fmt: skip
    header = ["K", "fused is faster", "fused ÷ learners apart", f"auto within {1 - NEAR:.0%} of the best", "at worst"]
    return markdown_table(header, rows)


def models_table(result: Result) -> str:
    rows = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        own = {row["num_learners"]: row for row in result["rows"] if row["model"] == name}
        rows.append([
            name, _size(own.values()),
            *(spread_text(own[k]["fused_over_apart"]) if k in own else NONE for k in _by_learners(result)),
            *(f"{own[k]['auto']} {own[k]['auto_over_best']['median']:.2f}" if k in own and own[k]["auto_over_best"]
              else NONE for k in _by_learners(result)),
        ])  # fmt: skip
    counts = list(_by_learners(result))
    return markdown_table(["model", "parameters", *(f"K={k}" for k in counts), *(f"auto, K={k}" for k in counts)], rows)


def _size(rows: Iterable[Mapping[str, Any]]) -> str:
    known = [row["parameters"] for row in rows if "parameters" in row]
    return f"{known[0] / 1e6:.1f} M" if known else NONE


def _by_learners(result: Result) -> dict[int, list[Mapping[str, Any]]]:
    counts = sorted({row["num_learners"] for row in result["rows"]})
    return {k: [row for row in result["rows"] if row["num_learners"] == k] for k in counts}


if __name__ == "__main__":
    raise SystemExit(main())
