"""Prediction: models are loaded, run over test data as an ensemble, and timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree, batch_key, values_per_sample
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Feed
from crossbow_py.data.sources import DataSource
from crossbow_py.engine.bank.frozen_base import share_frozen
from crossbow_py.engine.modules.losses import IGNORED
from crossbow_py.engine.modules.precision import choose_device, choose_precision
from crossbow_py.predict.config import PredictConfig
from crossbow_py.predict.ensemble import Ensemble
from crossbow_py.predict.trained_models import TrainedModel, common_data, find_models
from crossbow_py.train.evaluation.evaluator import evaluation_batch_size
from crossbow_py.train.ladder.ladder import check_trusted, try_once
from crossbow_py.train.tuning.worker_autotuner import first_workers

SIZES = (1, 2, 4, 8, 16, 32, 64)  # of batches whose latency is measured
_FEWEST_CALLS, _MOST_CALLS = 20, 10_000
Clock = Callable[[], float]


@dataclass(frozen=True)
class Latency:
    """The latency of an answer: percentiles in milliseconds of `calls` calls one after another, and their executor."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    calls: int
    executor: str


@dataclass(frozen=True)
class Prediction:
    """The answers of K models on N test samples of C classes.

    Attributes:
        config: what was asked for.
        models: the members.
        data: name of the data set.
        probabilities: `[K, N, C]` float32.
        targets: `[N]`.
        executor: of the batches that were predicted.
        num_architectures: how many banks there are.
        images_per_s: samples that all members together answer in a second; loading is not counted.
        latencies: by batch size.
        notes: sentences for the user.
    """

    config: PredictConfig
    models: tuple[TrainedModel, ...]
    data: str
    probabilities: npt.NDArray[np.float32]
    targets: npt.NDArray[Any]
    device: str
    precision: str
    executor: str
    num_architectures: int
    batch_size: int
    images_per_s: float
    latencies: dict[int, Latency]
    notes: tuple[str, ...]

    @property
    def ensemble(self) -> npt.NDArray[np.float32]:
        """The mean of the members' probabilities `[N, C]`."""
        mean: npt.NDArray[np.float32] = self.probabilities.mean(0)
        return mean

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of every member."""
        return [self._accuracy(own) for own in self.probabilities]

    @property
    def accuracy(self) -> float:
        """The accuracy of the ensemble."""
        return self._accuracy(self.ensemble)

    @property
    def num_non_finite(self) -> list[int]:
        """Samples for which a member's outputs are not finite, of every member."""
        return [int((~np.isfinite(own).all(-1)).sum()) for own in self.probabilities]

    def _accuracy(self, probabilities: npt.NDArray[np.float32]) -> float:
        """Return the share of right predictions; a sample whose values are not finite is wrong.

        Samples that cross-entropy leaves out count for nothing.
        """
        right = (probabilities.argmax(-1) == self.targets) & np.isfinite(probabilities).all(-1)
        return float(right[self.targets != IGNORED].mean())

    @property
    def num_ignored(self) -> int:
        """Samples that cross-entropy leaves out, as they are of no class."""
        return int((self.targets == IGNORED).sum())


def predict(config: PredictConfig, clock: Clock = time.perf_counter) -> Prediction:
    """Do what was asked for. Raises UserError for what cannot be predicted."""
    models = find_models(config.models, config.targets)
    data = config.data if config.data is not None else common_data(models, config.targets)
    source: DataSource = data.load(progress=sys.stderr.isatty())
    if source.num_classes is None:
        found = f"and the targets of data={source.name} are none"
        raise UserError(f"models of an ensemble must tell classes apart, {found}; use data with integer targets.")
    shape, classes = source.input_shape, source.num_classes
    if config.executor == "auto":
        device = choose_device(config.device)
        outcomes = try_once(device, lambda message: print(message, file=sys.stderr, flush=True))
        check_trusted(outcomes, choose_precision(config.precision, device))
    with Ensemble(
        _loaded(models, shape, classes),
        executor=config.executor, device=config.device, precision=config.precision,
    ) as ensemble:  # fmt: skip
        feed = make_feed(
            source.test, 1, device=ensemble.device, mean=source.mean, std=source.std, channels_last=True,
            dtype=ensemble.precision.compute, num_workers=first_workers(config.num_workers, ensemble.device, False),
        )  # fmt: skip
        try:
            size = config.batch_size or evaluation_batch_size(values_per_sample(feed.first_samples(1).inputs))
            probabilities, targets, rate = _run(ensemble, feed, size, clock)
            executor = next(iter(ensemble.chosen.values()))
            latencies = measure_latencies(ensemble, feed, config.latency_s, clock) if config.latency_s else {}
            notes = (*source.notes, *feed.take_notes(), *ensemble.notes)
        finally:
            feed.close()
    return Prediction(
        config, tuple(models), source.name, probabilities, targets, str(ensemble.device), ensemble.precision.name,
        executor, ensemble.num_banks, size, rate, latencies, notes,
    )  # fmt: skip


def _loaded(models: Sequence[TrainedModel], input_shape: tuple[int, ...], num_classes: int) -> list[nn.Module]:
    """Return the models, which hold what is frozen and equal once: the ensemble copies them."""
    found: list[nn.Module] = []
    for model in models:
        module = model.load(input_shape, num_classes)
        share_frozen(module, found)
        found.append(module)
    return found


def _run(
    ensemble: Ensemble, feed: Feed, batch_size: int, clock: Clock
) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any], float]:
    """Probabilities `[K, N, C]`, targets `[N]` and samples a second. The host waits for every batch."""
    found: list[Tensor] = []
    targets: list[Tensor] = []
    seen: set[int] = set()
    seconds = 0.0
    for batch in feed.evaluation_batches(batch_size):
        if len(batch.targets) not in seen:  # what is measured, exported or captured for it counts for nothing
            ensemble.predict(batch.inputs)
            seen.add(len(batch.targets))
        _wait(ensemble.device)
        begun = clock()
        members = ensemble.members(batch.inputs).cpu()  # a host–device synchronisation on CUDA
        seconds += clock() - begun
        found.append(members)
        targets.append(batch.targets.cpu())
    right = torch.cat(targets)
    if bool((right == IGNORED).all()):
        raise UserError(f"every test sample has the target {IGNORED}, which is no class; give data with classes.")
    return torch.cat(found, 1).numpy(), right.numpy(), len(right) / seconds


def measure_latencies(ensemble: Ensemble, feed: Feed, seconds: float, clock: Clock) -> dict[int, Latency]:
    """Measure batches of 1 to 64 of the first samples, each for so many seconds and at least some calls."""
    sizes = [size for size in SIZES if size <= feed.num_samples]
    return {size: _latency(ensemble, feed.first_samples(size).inputs, seconds, clock) for size in sizes}


def _latency(ensemble: Ensemble, inputs: Tree, seconds: float, clock: Clock) -> Latency:
    ensemble.predict(inputs)
    times: list[float] = []
    _wait(ensemble.device)
    begun = clock()
    while len(times) < _FEWEST_CALLS or (clock() - begun < seconds and len(times) < _MOST_CALLS):
        before = clock()
        ensemble.predict(inputs).cpu()  # a host–device synchronisation on CUDA
        times.append(1000 * (clock() - before))
    p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
    return Latency(p50, p90, p99, len(times), ensemble.chosen[batch_key(inputs)])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
