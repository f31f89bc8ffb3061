"""What does a checkpoint cost training?

    python experiments/checkpoint/run.py [--model resnet50 --num-learners 10 --seconds 300] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import nn

from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.models import MODELS
from crossbow_py.train.checkpoints.writer import CheckpointWriter, save
from experiments.bench.machine import usable_cores
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE
from experiments.tables.markdown import markdown_table

BATCH_SIZE = 16
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
Result = Mapping[str, Any]
PERIODS_S = (60, 300, 600)
_ROWS = {
    "snapshot_s": "beside training: it stands still for the copy",
    "slowed_s": "beside training: it is slower during the write",
    "beside_s": "beside training, together",
    "still_s": "training stands still",
}
TARGET = 0.02
# Images and classes of the data sets they are made for.
_DATA = {"resnet50": ((3, 224, 224), 1000), "resnet32": ((3, 32, 32), 10)}
_WINDOW_S = 4.0
_QUIET_S = 1.0
# What a repetition holds; times in seconds, rates in rounds a second.
FIGURES = ("rate", "snapshot_s", "write_s", "write_rate", "slowed_s", "beside_s", "still_s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=_DATA, default="resnet50", help="whose bank is written (default %(default)s)")
    add("--num-learners", type=count, default=10, help="in that bank (default %(default)s)")
    add("--beside", choices=("resnet20", "resnet32"), default="resnet32", help="what is trained (default %(default)s)")
    add("--threads", type=count, default=usable_cores(), help="that train, a learner each (default all cores)")
    add("--seconds", type=positive, default=300.0, help="of measuring (default %(default)s)")
    add("--folder", type=Path, help="on the disk to write to (default that for temporary files)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            return measure_checkpoints(
                given.model, given.num_learners, given.beside, given.threads, given.seconds, Path(folder)
            )

    return measure_and_write(parser, argv, measure, result_text)


def measure_checkpoints(
    model: str, num_learners: int, beside: str, threads: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """Repetitions for `seconds`, as plain values; those are dropped in which others were busy.

    Args:
        model, num_learners: whose bank is written.
        beside, threads: the model that is trained meanwhile, and by how many learners of a thread each.
        seconds: of measuring, the first repetition, which warms up, not counted.
        folder: where checkpoints go; its disk is a part of what is measured.
    """
    keep_freed_memory()  # as every run of several learners on a CPU does
    template = MODELS[model]().build(*_DATA[model])
    bank = ReplicaBank(template, num_learners, device=torch.device("cpu"), precision=FP32, state_names=("momentum",))
    training, writer = Training(beside, threads), CheckpointWriter(folder, keep=1)
    repetitions: list[dict[str, float]] = []
    dropped = 0
    with training.running():
        _repetition(bank, training, writer, folder, 0)
        end_s = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end_s:
            number += 1
            _await_quiet(training, end_s)
            before = LoadSnapshot.take()
            found = _repetition(bank, training, writer, folder, number)
            share = foreign_share(before, LoadSnapshot.take())
            if share is not None and share > MAX_FOREIGN_SHARE:
                dropped += 1
            else:
                repetitions.append(found)
    size = sum(path.stat().st_size for path in folder.rglob("rank-0.pt"))
    writer.close()
    return {
        "model": model,
        "num_learners": num_learners,
        "beside": beside,
        "batch_size": BATCH_SIZE,
        "threads": threads,
        "gb": round(size / 1e9, 3),
        "method": {"seconds": seconds, "window_s": _WINDOW_S, "max_foreign_share": MAX_FOREIGN_SHARE},
        "dropped": dropped,
        **summary(repetitions),
    }


def _await_quiet(training: Training, end_s: float) -> None:
    """A repetition is long: begin none while others are busy."""
    training.pause()
    share: float | None = 1.0
    while share is not None and share > MAX_FOREIGN_SHARE and time.monotonic() < end_s:
        before = LoadSnapshot.take()
        time.sleep(_QUIET_S)
        share = foreign_share(before, LoadSnapshot.take())
    training.resume()


def _repetition(
    bank: ReplicaBank, training: Training, writer: CheckpointWriter, folder: Path, number: int
) -> dict[str, float]:
    rate = _rate(training)
    training.pause()
    begin_s = time.perf_counter()
    writer.begin(bank.state_dict(), 2 * number)
    snapshot_s = time.perf_counter() - begin_s
    first_round = training.rounds
    training.resume()
    begin_s = time.perf_counter()
    writer.wait()
    writer.conclude()
    writer.wait()
    write_s = time.perf_counter() - begin_s
    rounds = training.rounds - first_round
    rate = (rate + _rate(training)) / 2
    training.pause()
    begin_s = time.perf_counter()
    save(folder, bank.state_dict(), 2 * number + 1, keep=1)
    still_s = time.perf_counter() - begin_s
    training.resume()
    return figures(rate, snapshot_s, write_s, rounds, still_s)


def _rate(training: Training) -> float:
    begin_s, first_round = time.perf_counter(), training.rounds
    while time.perf_counter() - begin_s < _WINDOW_S or training.rounds == first_round:
        time.sleep(_WINDOW_S)
    return (training.rounds - first_round) / (time.perf_counter() - begin_s)


def figures(rate: float, snapshot_s: float, write_s: float, rounds: float, still_s: float) -> dict[str, float]:
    """Work out a repetition: seconds lost are those in which the rounds that are missing would have been trained.

    Args:
        rate: rounds a second without a checkpoint.
        snapshot_s: for which training stood still, so that its state could be copied.
        write_s, rounds: how long it was then written, and what was trained meanwhile.
        still_s: for which training stood still so that all was copied and written.
    """
    slowed_s = write_s - rounds / rate
    values = (rate, snapshot_s, write_s, rounds / write_s, slowed_s, snapshot_s + slowed_s, still_s)
    return dict(zip(FIGURES, values, strict=True))


def summary(repetitions: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median, smallest and largest of every figure, None without a clean repetition; and what follows from them.

    `ratio` is seconds lost to a checkpoint written beside training over those lost to one it stands still for, within
    repetitions; `period_s` is how far apart checkpoints must be for the target.
    """
    ratios = [each["beside_s"] / each["still_s"] for each in repetitions]
    found = {name: _medians([each[name] for each in repetitions]) for name in FIGURES}
    lost = {name: None if (spread := found[f"{name}_s"]) is None else spread[0] for name in ("beside", "still")}
    return {
        "n": len(repetitions),
        "figures": found,
        "ratio": _medians(ratios),
        "period_s": {name: None if value is None else round(value / TARGET, 1) for name, value in lost.items()},
        "repetitions": [{name: round(value, 4) for name, value in each.items()} for each in repetitions],
    }


def _medians(values: Sequence[float]) -> list[float] | None:
    return [round(value, 4) for value in (median(values), min(values), max(values))] if values else None


def cost_table(result: Result) -> str:
    header = ["", "seconds lost", *(f"every {period_s} s" for period_s in PERIODS_S), "≤ 2 % from every"]
    return markdown_table(header, [_row(result, name, label) for name, label in _ROWS.items()])


def headline(result: Result) -> str:
    found = result["figures"]
    what = (
        f"{result['num_learners']} learners of {result['model']}, {result['gb']:.2f} GB, beside {result['threads']} "
        f"learners of {result['beside']} with b={result['batch_size']}, a thread each; n = {result['n']}, "
        f"{result['dropped']} dropped."
    )
    if not result["n"]:
        return what
    slower = 1 - found["write_rate"][0] / found["rate"][0]
    return (
        f"{what} Writing beside training takes {found['write_s'][0]:.1f} s, in which that is {slower:.0%} slower. A "
        f"checkpoint written beside training loses {_spread(result['ratio'], '.2f')} of the time of one it stands "
        "still for."
    )


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{cost_table(result)}"


def _row(result: Result, name: str, label: str) -> list[str]:
    spread = result["figures"][name]
    if spread is None:
        return [label, *("–" for _ in range(len(PERIODS_S) + 2))]
    shares = [f"{spread[0] / (period_s + spread[0]):.1%}" for period_s in PERIODS_S]
    period_s = result["period_s"].get(name.removesuffix("_s"))
    return [label, _spread(spread, ".2f"), *shares, "" if period_s is None else f"{period_s:.0f} s"]


def _spread(spread: list[float], form: str) -> str:
    middle, smallest, largest = (format(value, form) for value in spread)
    return f"{middle} ({smallest}–{largest})"


class Training:
    """`num_learners` replicas of a model, each in a thread of its own with one intra-op thread."""

    def __init__(self, model: str, num_learners: int) -> None:
        self._rounds = [0] * num_learners
        self._changed = threading.Condition()
        self._runs, self._ends, self._standing = False, False, 0
        self._threads = [
            threading.Thread(target=self._train, args=(model, number), daemon=True) for number in range(num_learners)
        ]

    @property
    def rounds(self) -> float:
        """The rounds that a learner has trained, in the mean."""
        return sum(self._rounds) / len(self._rounds)

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        self.resume()
        try:
            yield
        finally:
            with self._changed:
                self._ends = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def pause(self) -> None:
        """Block until every learner has ended its round and stands still."""
        with self._changed:
            self._runs = False
            self._changed.wait_for(lambda: self._standing == len(self._threads))

    def resume(self) -> None:
        with self._changed:
            self._runs = True
            self._changed.notify_all()

    def _train(self, model: str, number: int) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(number)
        module = MODELS[model]().build((3, 32, 32), 10)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch takes all the same
        images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
        classes = torch.randint(10, (BATCH_SIZE,), generator=generator)
        weights: list[torch.Tensor] = list(module.parameters())
        momentum = [torch.zeros_like(weight) for weight in weights]
        while self._may_go_on():
            loss = nn.functional.cross_entropy(module(images), classes)
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_mul_(momentum, _MOMENTUM)
                torch._foreach_add_(momentum, gradients)
                torch._foreach_add_(weights, momentum, alpha=-_LEARNING_RATE)
            self._rounds[number] += 1

    def _may_go_on(self) -> bool:
        with self._changed:
            self._standing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._runs or self._ends)
            self._standing -= 1
            return not self._ends


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
