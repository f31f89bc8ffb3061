"""The same Hyperband with PyTorch's tutorial loop: one trial after another, on all of torch's threads or on CUDA.

Models train where the images lie, operator by operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.data.sampler import epoch_order
from crossbow_py.engine.update.optimizers import SGD, PerLearner
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.search.hyperband import Bracket, Results, Segment, best, ready, to_epochs
from crossbow_py.search.loop import epoch_samples

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """Normalised float images [N, C, H, W] and classes [N], on the device: the loop has no loading to wait for."""

    train: Pair
    validation: Pair
    test: Pair


@dataclass
class PlainTrial:
    """A trial in plain PyTorch: its model, its optimizer, and the samples that it has seen."""

    settings: TrialSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    samples_seen: int = 0


def search(
    brackets: tuple[Bracket, ...], trial_of: Callable[[int], TrialSettings], images: Images, order_seed: int
) -> dict[str, Any]:
    """All segments in the order of `ready`; the best trial's value and test accuracy, and the samples trained on."""
    results: dict[Segment, float | None] = {}
    trials: dict[int, PlainTrial] = {}
    samples = 0
    planned = epoch_samples(brackets[0].epochs[-1], len(images.train[1]))
    while waiting := ready(brackets, results, maximize=True):
        segment = waiting[0]
        if segment.trial not in trials:
            trials[segment.trial] = new_trial(trial_of(segment.trial), images.train[0].device)
        trial, before = trials[segment.trial], trials[segment.trial].samples_seen
        end = epoch_samples(to_epochs(brackets, segment), len(images.train[1]))
        healthy = train(trial, end, planned, images.train, order_seed)
        samples += trial.samples_seen - before
        results[segment] = accuracy(trial.model, images.validation) if healthy else None
    return {**_best(brackets, results, trials, images), "samples": samples}


def new_trial(settings: TrialSettings, device: torch.device) -> PlainTrial:
    """The trial as it begins."""
    model, own = copy.deepcopy(settings.new_model()).to(device), settings.optimizer
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    assert isinstance(own, SGD), "the spaces of this experiment have SGD alone"
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": own.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=_rate(settings), momentum=_one(own.momentum))
    return PlainTrial(settings, model, optimizer)


def train(trial: PlainTrial, end: int, planned: int, data: Pair, order_seed: int) -> bool:
    """Batches of the very samples a pack's row gets, until `end`. False when the loss is not finite."""
    settings, size, count = trial.settings, trial.settings.batch_size, len(data[1])
    criterion = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)
    order, epoch = epoch_order(order_seed, 0, count), 0
    trial.model.train()
    while trial.samples_seen < end:
        places = torch.arange(trial.samples_seen, trial.samples_seen + size)
        if int(places[0]) // count != epoch:
            epoch = int(places[0]) // count
            order = epoch_order(order_seed, epoch, count)
        later = epoch_order(order_seed, epoch + 1, count) if int(places[-1]) // count != epoch else order
        picked = [(order if p // count == epoch else later)[p % count] for p in places.tolist()]
        ids = torch.tensor(picked, device=data[0].device)
        rate = settings.schedule.factor(trial.samples_seen, count, planned) * _rate(settings)
        for group in trial.optimizer.param_groups:
            group["lr"] = rate
        trial.optimizer.zero_grad()
        loss = criterion(trial.model(data[0][ids]), data[1][ids])
        if not loss.isfinite():
            return False
        loss.backward()
        trial.optimizer.step()
        trial.samples_seen += size
    return True


def _rate(settings: TrialSettings) -> float:
    return _one(settings.optimizer.learning_rate)


def _one(value: PerLearner) -> float:
    assert not isinstance(value, tuple), "a trial is one learner"
    return value


@torch.no_grad()
def accuracy(model: nn.Module, data: Pair) -> float:
    """The share of `data` that a model classifies rightly."""
    model.eval()
    batches = zip(torch.split(data[0], 256), torch.split(data[1], 256), strict=True)
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in batches)
    return right / len(data[1])


def _best(
    brackets: tuple[Bracket, ...], results: Results, trials: dict[int, PlainTrial], images: Images
) -> dict[str, Any]:
    winner = best(brackets, results, maximize=True)
    assert winner is not None, "some trial has a value"
    last = max(segment for segment in results if segment.trial == winner)
    return {
        "trial": winner,
        "value": results[last],
        "test_accuracy": accuracy(trials[winner].model, images.test),
        "values": [[segment.trial, segment.rung, value] for segment, value in sorted(results.items())],
    }
