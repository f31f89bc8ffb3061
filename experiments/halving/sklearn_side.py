"""Given configurations of an MLP by scikit-learn's halving over skorch; takes the folder of the job."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import joblib
import numpy as np
import skorch
import torch
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import HalvingGridSearchCV, PredefinedSplit
from torch import nn

from experiments.halving.job import MLP, measured, prepare, read, report

# The names of parameters in skorch.
_NET = {
    "optimizer.learning_rate": "optimizer__lr", "optimizer.momentum": "optimizer__momentum",
    "optimizer.weight_decay": "optimizer__weight_decay", "label_smoothing": "criterion__label_smoothing",
    "model.dropout": "module__dropout",
}  # fmt: skip


def search(folder: str) -> tuple[float, float]:
    """Search the configurations as a grid of points, with skorch's own training loop and a process a core."""
    job = read(folder)
    x, y = (torch.cat([job["train"][part], job["validation"][part]]).numpy() for part in (0, 1))
    fold = np.repeat([-1, 0], [len(job["train"][1]), len(job["validation"][1])])
    net = skorch.NeuralNetClassifier(
        MLP, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, batch_size=job["batch_size"], verbose=0,
        iterator_train__shuffle=True, train_split=None,
    )  # fmt: skip
    grid = [{_NET[key]: [own] for key, own in config.items()} for config in job["configurations"]]
    halving = HalvingGridSearchCV(
        net, grid, resource="max_epochs", min_resources=1, max_resources=job["rungs"][-1], factor=job["eta"],
        cv=PredefinedSplit(fold), scoring=partial(_score, folder=folder), refit=False, return_train_score=False,
        n_jobs=job["cores"],
    )  # fmt: skip
    cores = range(job["cores"])
    joblib.Parallel(len(cores))(joblib.delayed(prepare)(job["seed"] + core, net) for core in cores)
    begun_s, begun = time.perf_counter(), time.time()
    halving.fit(x, y)
    return time.perf_counter() - begun_s, begun


def _score(net: Any, _x: Any, _y: Any, *, folder: str) -> float:
    return measured(folder, net.max_epochs, net.module_)


if __name__ == "__main__":
    report(search)
