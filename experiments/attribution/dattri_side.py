"""Models of half of the data each by dattri, as its users have them: `retrain_lds` over its own training function.

    python dattri_side.py FILE.npz OUT.npz SUBSETS EPOCHS SEED

Runs in an environment of its own (`experiments/bench/environments.py`). Prints the seconds of training; OUT gets the
samples of each model and each model's loss on each test sample.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dattri.benchmark.datasets.mnist.mnist_mlp import loss_mnist_mlp, train_mnist_mlp
from dattri.model_util.retrain import retrain_lds
from torch.utils.data import DataLoader, TensorDataset


def main(path: str, out: str, subsets: str, epochs: str, seed: str) -> None:
    given = np.load(path)
    train, test = (
        TensorDataset(*(torch.from_numpy(given[f"{part}_{own}"]) for own in "xy")) for part in ("train", "test")
    )
    train_one = partial(train_mnist_mlp, epoch_num=int(epochs))
    train_one.__name__ = "train_mnist_mlp"
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        retrain_lds(train_one, DataLoader(train, batch_size=64), folder, num_subsets=int(subsets), seed=int(seed))
        seconds = time.perf_counter() - begun
        folders = [Path(folder) / str(number) for number in range(int(subsets))]
        ids = [np.loadtxt(own / "indices.txt", dtype=np.int64) for own in folders]
        losses = [loss_mnist_mlp(own / "model_weights_0.pt", DataLoader(test, batch_size=1000)) for own in folders]
    np.savez(out, ids=np.stack(ids), losses=torch.stack(losses).numpy())
    print(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
