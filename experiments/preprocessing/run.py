"""The share of time spent on preprocessing by 1 to 16 models, with a feed each and on one feed.

    python experiments/preprocessing/run.py [--models 1 2 4 8 16] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.engine.device.host import intra_op_threads
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.streamed_runs import SIZE, Setup, StreamedRun, five_layers, photographs
from experiments.bench.windows import MAX_FOREIGN_SHARE, Window, Windows, waiting
from experiments.tables.markdown import columns_table, number_of, spread_text

Result = Mapping[str, Any]
# ModelBatch's figure 3: the share with one model, and with 16 that share a feed.
MODELBATCH = {1: 0.815, 16: 0.0194}
TARGET_SHARE = 0.05
OWN, LOOP, WORKER = "own feed", "shared, in the loop", "shared, one worker"
BATCH, WIDTH = 16, 16
WARM_UP_ROUNDS = 6  # more than a worker makes ahead
Executor = Literal["serial", "fused"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--folder")
    add = parser.add_argument
    add("--models", type=count, nargs="+", default=(1, 2, 4, 8, 16), metavar="K", help="models on one feed")
    add("--rounds", type=count, default=24, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="windows a side (default %(default)s)")
    return measure_and_write(
        parser, argv,
        lambda given: measure_preprocessing(given.folder, given.models, given.rounds, given.repetitions), result_text,
    )  # fmt: skip


@dataclass
class Side:
    """Models that train together, how they are fed, and what their windows came to."""

    name: str
    num_models: int
    windows: Windows[Window] = field(default_factory=Windows)

    @property
    def num_workers(self) -> int:
        return int(self.name == WORKER)


def sides_of(num_models: Sequence[int]) -> list[Side]:
    """One model with a feed of its own, and for every number of models a feed in the loop and one with a worker."""
    shared = [Side(name, count) for count in sorted(set(num_models)) for name in (LOOP, WORKER)]
    return [Side(OWN, 1), *shared]


def measure_preprocessing(
    folder: str, num_models: Sequence[int], rounds: int, repetitions: int
) -> dict[str, Any]:
    """Shares of waiting and images/s by side and number of models, as plain values.

    Raises:
        UserError: there are no such images.
    """
    images, sides = photographs(folder), sides_of(num_models)
    with intra_op_threads(1):
        # The two shared sides of as many models are one run, fed now this way and now that.
        runs = {key: StreamedRun(Setup(WIDTH, BATCH, *key), images) for key in dict.fromkeys(map(_key, sides))}
        for run in runs.values():
            run.rounds_window(0, 1, 1)  # files come into the page cache, memory to the process
        for _ in range(repetitions):
            for side in sides:
                run = runs[_key(side)]
                side.windows.add(partial(run.rounds_window, side.num_workers, WARM_UP_ROUNDS, rounds))
    return {
        "folder": Path(folder).name,
        "images": images.num_files,
        "size": SIZE,
        "batch_size": BATCH,
        "width": WIDTH,
        "parameters": sum(each.numel() for each in five_layers(WIDTH, len(images.data.classes)).parameters()),
        "method": {
            "warm_up_rounds": WARM_UP_ROUNDS,
            "rounds": rounds,
            "repetitions": repetitions,
            "max_foreign_share": MAX_FOREIGN_SHARE,
            "foreign_load_known": all(side.windows.load_known for side in sides),
        },
        **summary(sides),
    }


def _key(side: Side) -> tuple[int, Executor]:
    return side.num_models, "serial" if side.name == OWN else "fused"


def summary(sides: Sequence[Side]) -> dict[str, Any]:
    """A row for every side, the first with a feed of its own; speed-ups are within repetitions.

    K models with a feed each train one after another, so that their images/s are one model's, and so is their share.
    """
    rows: list[Mapping[str, Any]] = [
        {
            "side": side.name,
            "num_models": side.num_models,
            **waiting(side.windows),
            "speedup": side.windows.ratio(sides[0].windows),
        }
        for side in sides
    ]
    return {"rows": rows}


def headline(result: Result) -> str:
    method = result["method"]
    setting = (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}; a "
        f"five-layer network of {result['parameters']:,} parameters, batches of {result['batch_size']}, windows of "
        f"{method['rounds']} rounds."
    )
    row = max((row for row in result["rows"] if row["side"] == WORKER), key=lambda row: int(row["num_models"]))
    if row["wait_share"] is None:
        return setting
    share = row["wait_share"]["median"]
    verdict = "reached" if share <= TARGET_SHARE else "missed"
    return (
        f"{setting} {row['num_models']} models on one feed wait for preprocessing {_percent(share)} of the time "
        f"(to reach: {TARGET_SHARE:.0%} with 16; {verdict if row['num_models'] == 16 else 'not measured'})."
    )


def shares_table(result: Result) -> str:
    return columns_table(result["rows"], {
        "": "side",
        "models": lambda row: "any" if row["side"] == OWN else str(row["num_models"]),
        "of the time, preprocessing": lambda row: _share(row["wait_share"]),
        "models · images/s": number_of("images_per_s"),
        "÷ own feed": lambda row: "1" if row["side"] == OWN else spread_text(row["speedup"]),
        "n": "n",
        "dropped": "dropped",
    })  # fmt: skip


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{shares_table(result)}"


def _share(share: Mapping[str, float] | None) -> str:
    if share is None:
        return "–"
    return f"{_percent(share['median'])} ({_percent(share['minimum'])}–{_percent(share['maximum'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
