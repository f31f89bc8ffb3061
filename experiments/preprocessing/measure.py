"""The share of time that goes to preprocessing, with a feed for every model and with one for all: windows in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from crossbow_py.engine.device.host import intra_op_threads
from experiments.bench.streamed_runs import SIZE, Setup, StreamedRun, five_layers, photographs
from experiments.bench.windows import MAX_FOREIGN_SHARE, Windows

OWN, LOOP, WORKER = "own feed", "shared, in the loop", "shared, one worker"
BATCH, WIDTH = 16, 16
WARM_UP_ROUNDS = 6  # more than a worker makes ahead

Executor = Literal["serial", "fused"]


@dataclass
class Side:
    """Models that train together, how they are fed, and what their windows came to."""

    name: str
    num_models: int
    windows: Windows = field(default_factory=Windows)

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
            **side.windows.summary(),
            "speedup": side.windows.ratio(sides[0].windows),
        }
        for side in sides
    ]
    return {"rows": rows}
