"""Do tasks that people bring come to plain PyTorch's numbers, in how many lines, and how fast?

    python experiments/tasks/run.py [--tasks text tabular ...] [--repetitions 3] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import Tensor

from crossbow_py.averaging import SynchronousSGD
from crossbow_py.core.host import foreign_share
from crossbow_py.data.sampler import epoch_order
from experiments.bench.machine import machine
from experiments.bench.program import count, measuring_parser, positive, show_and_write
from experiments.bench.rounds import trained_window
from experiments.bench.windows import Window, Windows, by_turns, load_with_ended
from experiments.tables.markdown import columns_table, number, number_of, spread_of
from experiments.tasks import examples
from experiments.tasks.tasks import BATCH_SIZE, TASKS, Task

Result = Mapping[str, Any]
COMPARED_ROUNDS, SEED = 48, 0
LEARNERS = 8
_MOST_STEPS = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and measure as asked for; prints the table and returns the exit code: 1 where numbers differ."""
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="NAME", help="by default all of them")
    add("--learners", type=count, default=LEARNERS, help="side by side (default %(default)s)")
    add("--repetitions", type=count, default=3, help="windows a side (default %(default)s)")
    add("--seconds", type=positive, default=1.0, help="of a window (default %(default)s)")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # packages' own
    rows = []
    for name in options.tasks:
        row = {"task": name, "note": TASKS[name].note, **compared(TASKS[name])}
        row |= timed(TASKS[name], options.learners, options.repetitions, options.seconds)
        print(f"{name}: difference {row['difference']:.1e}", flush=True)
        rows.append(row)
    method = {"rounds": COMPARED_ROUNDS, "batch_size": BATCH_SIZE, "num_learners": options.learners,
              "repetitions": options.repetitions, "seconds": options.seconds, "tolerance": TOLERANCE}  # fmt: skip
    show_and_write({"machine": machine(), **method, "rows": rows}, result_text, options.json)
    return int(any(row["difference"] > TOLERANCE for row in rows))


# The largest ‖a − b‖ of all weights, or scores, against how far the loop moved them; float32 rounds at 1e-7 a step.
TOLERANCE = 1e-4


def compared(task: Task) -> dict[str, Any]:
    """Train with one learner in float32, and by the plain loop on the same batches; and count lines."""
    torch.manual_seed(SEED)
    model = task.model().train()
    initial = task.outcome(model)
    data = task.data()
    size = len(data["labels"] if isinstance(data, dict) else data[1])
    task.plain(model, data, _order(size, COMPARED_ROUNDS))
    trainer = task.trainer(
        num_learners=1, batch_size=BATCH_SIZE, executor="serial", device="cpu", precision="fp32", seed=SEED
    )
    steps = trainer.run.settings.accumulate
    found = trainer.fit(max_rounds=COMPARED_ROUNDS // steps).model
    by_loop = task.outcome(model)
    return {
        "difference": float((task.outcome(found) - by_loop).norm() / (by_loop - initial).norm()),
        "plain_lines": _lines(task.plain),
        "trainer_lines": _lines(task.trainer),
    }


def _order(num_samples: int, num_batches: int) -> list[Tensor]:
    """Return the batches that a run of this seed takes."""
    epochs = -(-num_batches * BATCH_SIZE // num_samples)
    order = torch.cat([torch.from_numpy(epoch_order(SEED, epoch, num_samples)) for epoch in range(epochs)])
    return list(order[: num_batches * BATCH_SIZE].split(BATCH_SIZE))


def _lines(function: Callable[..., Any]) -> int:
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines())


def timed(task: Task, num_learners: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """Measure samples/s of the plain loop and of learners, by turns."""
    model, data = task.model().train(), task.data()
    size = len(data["labels"] if isinstance(data, dict) else data[1])
    trainer = task.trainer(num_learners=num_learners, batch_size=BATCH_SIZE, averaging=SynchronousSGD(), device="cpu")
    trainer.fit(max_rounds=2)

    def plain() -> Window:
        before, ends = load_with_ended(), [0.0]

        def batches() -> Any:
            begun = time.perf_counter()
            for batch in _order(size, _MOST_BATCHES):
                yield batch
                ends.append(time.perf_counter() - begun)
                if ends[-1] >= seconds:
                    return

        task.plain(model, data, batches())  # only iterated over
        rounds, share = len(ends) - 1, foreign_share(before, load_with_ended())
        return Window(BATCH_SIZE * rounds / ends[-1], 0.0, ends[-1] / rounds, rounds, share)

    windows: dict[str, Windows[Window]] = {"plain": Windows(), "learners": Windows()}
    learners = partial(trained_window, trainer, trainer.run.samples_per_round, seconds=seconds)
    take: dict[str, Callable[[], Window]] = {"plain": plain, "learners": learners}
    for side in by_turns(list(take), repetitions):
        windows[side].add(take[side])
    return {
        "executor": trainer.choices.executor,
        **{side: own.figures() for side, own in windows.items()},
        "ratio": windows["learners"].ratio(windows["plain"]),
    }


_MOST_BATCHES = 20_000


def result_text(result: Result) -> str:
    return columns_table(result["rows"], {
        "task": "task", "": "note", "difference": number_of("difference", ".0e"), "lines, plain": "plain_lines",
        "lines, Trainer": "trainer_lines",
        "plain loop, samples/s": lambda row: number(row["plain"]["images_per_s"], ",.0f"),
        f"K = {result['num_learners']} learners, samples/s":
            lambda row: f"{number(row['learners']['images_per_s'], ',.0f')} ({row['executor']})",
        "learners ÷ plain": spread_of("ratio"),
    })  # fmt: skip


TABLES = {"all": result_text}
TABLES_OF_KIND = {examples.KIND: {"all": examples.result_text}}


if __name__ == "__main__":
    raise SystemExit(main())
