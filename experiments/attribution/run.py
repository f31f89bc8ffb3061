"""Retraining for data attribution: models a minute by dattri's own loop and by one call, and the scores of both.

    python experiments/attribution/run.py [--subsets N] [--epochs N] [--repetitions N] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossbow_py import SGD, Member, train_many
from crossbow_py.data.sources import SOURCES
from experiments.bench.environments import MissingError, python_of, versions
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.tables.markdown import NONE, markdown_table

Array = NDArray[Any]
Study = tuple[float, Array, Array]  # seconds, the samples of each model [M, n], its losses on test samples [M, T]
OURS, THEIRS = "crossbow_py", "dattri"
_TRAIN, _TEST = 5000, 500


class MLP(nn.Module):
    """The network that dattri's benchmark trains on MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.dropout1 = nn.Linear(784, 128), nn.Dropout(0.1)
        self.fc2, self.dropout2 = nn.Linear(128, 64), nn.Dropout(0.1)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout1(torch.relu(self.fc1(x.view(-1, 784))))
        out: Tensor = self.fc3(self.dropout2(torch.relu(self.fc2(x))))
        return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--subsets", type=count, default=64, help="models, each of another half of the data (default %(default)s)")
    add("--epochs", type=count, default=5, help="of each model (default %(default)s)")
    add("--repetitions", type=count, default=3, help="of both sides, from other seeds (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns; a repetition of both has the same halves and initial weights, and other orders."""
    data, runs, missing = _data(), list[dict[str, Any]](), ""
    influences: dict[tuple[str, int], Array] = {}
    try:
        found = versions("attribution")
    except MissingError as error:
        found, missing = {}, str(error)
    for repetition in range(given.repetitions):
        seed = 1000 * repetition
        for side in (OURS, THEIRS) if found else (OURS,):
            seconds, ids, losses = (_ours if side == OURS else _theirs)(data, given.subsets, given.epochs, seed)
            influences[side, repetition] = influence(ids, losses)
            runs.append({"side": side, "repetition": repetition, "seconds": seconds, "loss": float(losses.mean())})
            print(f"{side}: {seconds:.1f} s", file=sys.stderr)
        # The same halves again, and other weights and orders: as near as scores of one loop come to each other.
        if found:
            ids, losses = _ours(data, given.subsets, given.epochs, seed, shift=500_000)[1:]
            influences["again", repetition] = influence(ids, losses)
    correlations = {
        other: [correlation(influences[OURS, n], influences[other, n]) for n in range(given.repetitions)]
        for other in (THEIRS, "again") if found
    }  # fmt: skip
    return {"subsets": given.subsets, "epochs": given.epochs, "runs": runs, "correlations": correlations,
            "versions": found, "missing": missing}  # fmt: skip


def influence(ids: Array, losses: Array) -> Array:
    """Return by how much a test sample's loss falls, on average over models, where they had a training sample.

    Args:
        ids: the training samples of M models, [M, n].
        losses: of M models on T test samples, [M, T].

    Returns scores [N, T]; a sample that all models had, or none, has 0.
    """
    had = np.zeros((len(ids), _TRAIN))
    np.put_along_axis(had, ids, 1.0, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        with_it, without = (own.T @ losses / own.sum(0)[:, None] for own in (had, 1 - had))
    scores: Array = np.nan_to_num(without - with_it)
    return scores


def correlation(one: Array, other: Array) -> float:
    """Return the mean over test samples of the correlation of their training samples' scores."""
    pairs = zip(one.T, other.T, strict=True)
    return float(np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs]))


def _data() -> dict[str, Array]:
    source = SOURCES["mnist"]().load(progress=False)
    pairs = {"train": (source.train, _TRAIN), "test": (source.test, _TEST)}
    images = {f"{part}_x": (pair[0][:size].float() / 255).numpy() for part, (pair, size) in pairs.items()}
    return images | {f"{part}_y": pair[1][:size].long().numpy() for part, (pair, size) in pairs.items()}


def _ours(data: Mapping[str, Array], subsets: int, epochs: int, seed: int, shift: int = 0) -> Study:
    size = len(data["train_y"])
    ids = [np.random.default_rng(seed + n).choice(size, size // 2, replace=False) for n in range(subsets)]  # as dattri
    train, test = (tuple(torch.from_numpy(data[f"{part}_{own}"]) for own in "xy") for part in ("train", "test"))
    begun = time.perf_counter()
    results = train_many(
        MLP, train, members=[Member(seed=shift + seed + n, subset=own) for n, own in enumerate(ids)],
        batch_size=64, max_epochs=epochs, optimizer=SGD(learning_rate=0.01, momentum=0.9), precision="fp32",
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(own.model.eval()(test[0]), test[1], reduction="none") for own in results]
    return seconds, np.stack(ids), torch.stack(losses).numpy()


def _theirs(data: Mapping[str, Array], subsets: int, epochs: int, seed: int) -> Study:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "data.npz", Path(folder) / "out.npz"
        np.savez(path, **data)  # type: ignore[arg-type]
        words = [str(python_of("attribution")), str(Path(__file__).with_name("dattri_side.py"))]
        words += [str(path), str(out), str(subsets), str(epochs), str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["dattri failed"])[-1])
        found = np.load(out)
        return float(done.stdout.splitlines()[-1]), found["ids"], found["losses"]


def result_text(result: Mapping[str, Any]) -> str:
    rows, correlations = [], result["correlations"]
    seconds = {side: [run["seconds"] for run in result["runs"] if run["side"] == side] for side in (OURS, THEIRS)}
    for side, own in seconds.items():
        if not own:
            continue
        loss = median(run["loss"] for run in result["runs"] if run["side"] == side)
        ratio = median(other / each for other, each in zip(own, seconds[OURS], strict=True))
        like = "again" if side == OURS else side
        near = f"{median(correlations[like]):.3f}" if like in correlations else NONE
        rate = f"{60 * result['subsets'] / median(own):,.0f}"
        rows.append([side, rate, f"{ratio:.2f}", f"{loss:.4f}", near, str(len(own))])
    head = ("", "models a minute", "time ÷ crossbow_py's", "test loss", "correlation of scores with crossbow_py's", "n")
    found = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{markdown_table(head, rows)}\n\n{found or f'{THEIRS} is missing: ' + result['missing']}"


def models_a_minute(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The row of the first page."""
    rows = []
    for result in results.values():
        seconds = {side: [run["seconds"] for run in result["runs"] if run["side"] == side] for side in (OURS, THEIRS)}
        ours, theirs = (f"{60 * result['subsets'] / median(own):,.0f}" if own else NONE for own in seconds.values())
        what = f"{result['subsets']} half-subsets of MNIST for attribution, MLP 784-128-64-10, b = 64"
        cells = [ours, f"{theirs} ({THEIRS})", NONE, str(len(seconds[OURS]))]
        rows.append([f"[{what}](experiments/attribution/README.md)", *cells])
    return rows


TABLES = {"all": result_text}
MODELS_A_MINUTE = models_a_minute

if __name__ == "__main__":
    raise SystemExit(main())
