"""What does a user wait for that is no training?

    python experiments/overhead/run.py [--repetitions 15 --seconds 2] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch

from crossbow_py import SGD, Trainer
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.models import MLP, LeNet
from crossbow_py.telemetry.events import Summary
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.run_folder.reporter import Reporter
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE, spread
from experiments.tables.markdown import columns_table, markdown_table, number_of, spread_of, spread_text

Result = Mapping[str, Any]
MOST_IMPORT_RATIO, MOST_HELP_S, MOST_TELEMETRY, MOST_OF_A_TREE = 1.2, 3.0, 0.01, 0.01
IMPORT_TORCH, IMPORT_OURS = "import torch", "import crossbow_py"
STARTS = {
    IMPORT_TORCH: ["-c", "import torch"],
    IMPORT_OURS: ["-c", "import crossbow_py"],
    "train --help": ["-m", "crossbow_py.train", "--help"],
    "train --list": ["-m", "crossbow_py.train", "--list"],
    "search --help": ["-m", "crossbow_py.search", "--help"],
    "report --help": ["-m", "crossbow_py.report", "--help"],
}
# Networks with rounds as short as they come, and of a usual length for a CPU: the model, the shape, learners.
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: MLP(hidden=(256, 256)).build((1, 8, 8), 10), (1, 8, 8), 2),
    "lenet": (lambda: LeNet().build((1, 28, 28), 10), (1, 28, 28), 2),
}
_SAMPLES, _BATCH = 60_000, 32
_DICT_PAIRS = 4  # windows in the place of one


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=15, help="of everything (default %(default)s)")
    add("--seconds", type=positive, default=2.0, help="of training, each time (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        starts = measure_starts(given.repetitions)
        telemetry = {name: measure_telemetry(name, given.repetitions, given.seconds) for name in NETWORKS}
        return {"starts": starts, "telemetry": telemetry, "dict": measure_dict(given.repetitions, given.seconds)}

    return measure_and_write(parser, argv, measure, result_text)


def measure_starts(repetitions: int) -> dict[str, Any]:
    """Seconds of every start, by turns; the first round of turns, which fills the disk's cache, does not count."""
    walls: dict[str, list[float]] = {name: [] for name in STARTS}
    cpus: dict[str, list[float]] = {name: [] for name in STARTS}
    for repetition in range(repetitions + 1):
        for name, arguments in STARTS.items():
            wall, cpu = _run(arguments)
            if repetition:
                walls[name].append(wall)
                cpus[name].append(cpu)
    ratios = [own / base for own, base in zip(cpus[IMPORT_OURS], cpus[IMPORT_TORCH], strict=True)]
    return {
        "n": repetitions,
        "wall_s": {name: spread(values) for name, values in walls.items()},
        "cpu_s": {name: spread(values) for name, values in cpus.items()},
        "import_ratio": spread(ratios),
    }


def _run(arguments: list[str]) -> tuple[float, float]:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_telemetry(network: str, repetitions: int, seconds: float) -> dict[str, Any]:
    """Runs with all records in a folder and without any, by turns; a pair in which others were busy is dropped."""
    shares, ratios, rounds_ms, dropped = list[float](), list[float](), list[float](), 0
    for repetition in range(repetitions):
        rates: dict[bool, float] = {}
        before = LoadSnapshot.take()
        for recorded in (True, False) if repetition % 2 else (False, True):
            with _timed() as spent, tempfile.TemporaryDirectory() as folder:
                summary = train(network, Path(folder) / "run" if recorded else None, seconds)
            rates[recorded] = summary.images_per_s
            if recorded:
                share = spent[0] / summary.train_time_s
                round_ms = 1000 * summary.num_learners * _BATCH / summary.images_per_s
        foreign = foreign_share(before, LoadSnapshot.take())
        if foreign is not None and foreign > MAX_FOREIGN_SHARE:
            dropped += 1
            continue
        shares.append(share)
        rounds_ms.append(round_ms)
        ratios.append(rates[True] / rates[False])
    return {
        "n": len(shares), "dropped": dropped, "share_of_training": spread(shares), "throughput_ratio": spread(ratios),
        "round_ms": round(median(rounds_ms), 3) if rounds_ms else None,
    }  # fmt: skip


def train(network: str, folder: Path | None, seconds: float) -> Summary:
    """Train for so many seconds on made-up samples, with all records if there is a folder; the run's summary."""
    make_model, shape, num_learners = NETWORKS[network]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (_SAMPLES, *shape), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, 10, (_SAMPLES,), generator=generator)
    trainer = Trainer(
        model=make_model, train_data=(images, targets), batch_size=_BATCH,
        num_learners=num_learners, device="cpu", executor="threads", output_dir=folder,
        optimizer=SGD(learning_rate=0.01, momentum=0.9), checkpoint=CheckpointSettings(every_epochs=None),
    )  # fmt: skip
    return trainer.fit(max_time_s=seconds).summary


class Named(torch.nn.Module):
    """A layer that takes its images by position or by name: the cheapest model, whose rounds show what a tree costs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(images)
        return scores


def measure_dict(repetitions: int, seconds: float) -> dict[str, Any]:
    """Milliseconds that a round of two learners takes longer with a dict of inputs, in pairs of windows of two runs."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_SAMPLES // 10, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (_SAMPLES // 10,), generator=generator)
    trainers = {
        in_dict: Trainer(
            model=Named, train_data=({"images": images} if in_dict else images, targets), batch_size=_BATCH,
            num_learners=2, device="cpu", executor="threads", precision="fp32",
            optimizer=SGD(learning_rate=0.01, momentum=0.9),
        )
        for in_dict in (False, True)
    }  # fmt: skip
    for trainer in trainers.values():
        trainer.fit(max_time_s=seconds / 4)
    longer, dropped = list[float](), 0
    for repetition in range(_DICT_PAIRS * repetitions):
        before, round_ms = LoadSnapshot.take(), dict[bool, float]()
        for in_dict in (False, True) if repetition % 2 else (True, False):
            state = trainers[in_dict].state
            then = state.samples_seen, state.elapsed_s
            trainers[in_dict].fit(max_time_s=state.elapsed_s + seconds / _DICT_PAIRS)
            rounds = (state.samples_seen - then[0]) / (2 * _BATCH)
            round_ms[in_dict] = 1000 * (state.elapsed_s - then[1]) / rounds
        foreign = foreign_share(before, LoadSnapshot.take())
        if foreign is not None and foreign > MAX_FOREIGN_SHARE:
            dropped += 1
            continue
        longer.append(round_ms[True] - round_ms[False])
    return {"n": len(longer), "dropped": dropped, "longer_ms": spread(longer, 4)}


@contextmanager
def _timed() -> Iterator[list[float]]:
    spent, progress = [0.0], Reporter.progress

    def timed(*arguments: Any, **named: Any) -> None:
        begin = time.perf_counter()
        progress(*arguments, **named)
        spent[0] += time.perf_counter() - begin

    Reporter.progress = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Reporter.progress = progress  # type: ignore[method-assign]


def starts_table(result: Result) -> str:
    starts = result["starts"]
    rows = [
        [f"`{name}`", *(spread_text(starts[clock][name]) for clock in ("wall_s", "cpu_s")), str(starts["n"])]
        for name in starts["wall_s"]
    ]
    return markdown_table(["", "seconds", "seconds of the processor", "n"], rows)


def telemetry_table(result: Result) -> str:
    return columns_table(({"name": name, **own} for name, own in result["telemetry"].items()), {
        "": "name", "a round, ms": number_of("round_ms", ".2f"),
        "share of training in telemetry": spread_of("share_of_training", ".2%"),
        "images/s with ÷ without": spread_of("throughput_ratio", ".3f"), "n": "n", "dropped": "dropped",
    })  # fmt: skip


def headline(result: Result) -> str:
    starts = result["starts"]
    ratio, longest = (
        starts["import_ratio"]["median"],
        max(each["median"] for name, each in starts["wall_s"].items() if "help" in name),
    )
    shares = [own["share_of_training"]["median"] for own in result["telemetry"].values() if own["n"]]
    said = [
        f"Importing `crossbow_py` takes {spread_text(starts['import_ratio'], '.2f')} times the processor's time of "
        f"importing torch (at most {MOST_IMPORT_RATIO} was wanted{_verdict(ratio <= MOST_IMPORT_RATIO)}).",
        f"The longest `--help` takes {longest:.1f} s (at most {MOST_HELP_S:g}{_verdict(longest <= MOST_HELP_S)}).",
    ]
    if shares:
        said.append(
            f"Telemetry takes at most {max(shares):.2%} of training (at most {MOST_TELEMETRY:.0%}"
            f"{_verdict(max(shares) <= MOST_TELEMETRY)})."
        )
    lenet_ms = result["telemetry"].get("lenet", {}).get("round_ms")
    if (own := result.get("dict", {"n": 0}))["n"] and lenet_ms:
        longer = own["longer_ms"]["median"]
        said.append(
            f"A dict of inputs makes a round {1000 * longer:.0f} µs longer, {longer / lenet_ms:.2%} of one of LeNet "
            f"(at most {MOST_OF_A_TREE:.0%}{_verdict(longer / lenet_ms <= MOST_OF_A_TREE)})."
        )
    return " ".join(said)


def result_text(result: Result) -> str:
    return "\n\n".join([headline(result), starts_table(result), telemetry_table(result)])


def _verdict(reached: bool) -> str:
    return ": reached" if reached else ": missed"


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
