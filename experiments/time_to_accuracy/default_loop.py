"""PyTorch's training loop as tutorials have it, on the settings of `python -m crossbow_py.train`.

    python -m experiments.time_to_accuracy.default_loop PARTS key=value ...

A `Dataset` that augments and normalises an image at a time on the CPU, or takes tokens as they are, a `DataLoader` with
two workers, the model in its default layout and float32, `torch.optim.SGD` or AdamW, a look at the loss in every step.
Data set, model, learning rate, schedule, batch size and length are those of the settings; it is evaluated PARTS times
`evaluations_per_epoch` times an epoch, outside of the time that counts. It writes
metrics.jsonl and summary.json as a run does, begins anew every time, and has one learner; with num_learners=seesaw its
batch grows as the samples of such a run's rounds would.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import Data, as_pair
from crossbow_py.data.sources.base import DataSource
from crossbow_py.engine.modules.precision import choose_device
from crossbow_py.engine.update.optimizers import SGD, AdamW, PerLearner
from crossbow_py.telemetry.records import METRICS_FILE, SUMMARY_FILE, finite, write_atomically
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.schedules import seesaw_learners
from experiments.grids.parts import stops

_WORKERS = 2
_TEST_BATCH = 256


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images uint8 [N, C, H, W] and classes [N]; one is cropped, flipped and normalised when it is asked for."""

    def __init__(self, pair: tuple[Tensor, Tensor], source: DataSource, augments: bool) -> None:
        self._images, self._labels = pair
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
        self._padding = source.augmentation.crop_padding if augments else 0
        self._flips = bool(source.augmentation.flip) and augments

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index].float() / 255
        if self._padding:
            height, width = image.shape[1:]
            top, left = torch.randint(0, 2 * self._padding + 1, (2,)).tolist()
            padded = nn.functional.pad(image, [self._padding] * 4)
            image = padded[:, top : top + height, left : left + width]
        if self._flips and torch.rand(1).item() < 0.5:
            image = image.flip(2)
        return (image - self._mean) / self._std, self._labels[index]


def samples(pair: tuple[Tensor, Tensor], source: DataSource, augments: bool) -> Dataset[tuple[Tensor, ...]]:
    """Return images one by one, or tokens as they are."""
    return Images(pair, source, augments) if source.mean is not None else TensorDataset(*pair)


def flat(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and classes; of tokens, each as a sample."""
    return (output.flatten(0, 1), targets.flatten()) if output.ndim > targets.ndim > 1 else (output, targets)


class Batches(Sampler[list[int]]):
    """Batches of shuffled samples, as large as `size` says for what was drawn before."""

    def __init__(self, count: int, size: Callable[[int], int]) -> None:
        self._order, self._size, self._drawn = RandomSampler(range(count)), size, 0

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self._order)
        while batch := list(itertools.islice(order, self._size(self._drawn))):
            self._drawn += len(batch)
            yield batch


@dataclass
class _Trained:
    samples: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    steps: int = 0


def main(argv: Sequence[str]) -> int:
    """Train as the settings say; returns the exit code."""
    config = compose(argv[1:], TrainConfig)
    parts = int(argv[0]) * config.evaluations_per_epoch
    assert config.output_dir is not None, "it is said for cells"
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    source, device = config.data.load(progress=False), choose_device(config.device)
    check_known(config, source)
    model = config.model.build(source.input_shape, source.num_classes).to(device)
    records: list[dict[str, Any]] = []
    for record in train(model, source, config, parts, device):
        records.append(record)
        write_atomically(folder / METRICS_FILE, "".join(json.dumps(finite(each)) + "\n" for each in records))
        print(f"epoch {record['epoch']:.4g}: test accuracy {record['test_accuracy']:.4f}", flush=True)
    tokens = None if source.mean is not None else source.input_shape[0]
    summary = finite(_summary(config, device, records, tokens))
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
    return 0


def check_known(config: TrainConfig, source: DataSource) -> None:
    """Refuse settings that the loop would not follow. Raises UserError."""
    settings, augmentation = config.optimizer, source.augmentation
    of_optimizer = isinstance(settings, SGD | AdamW) and not settings.groups
    of_images = augmentation.flip in (True, False) and not augmentation.random_erasing
    if not (of_optimizer and of_images) or config.num_learners not in (1, "seesaw") or config.min_learners != 1:
        raise UserError(
            "the default loop has one learner, or a batch that grows from one's, SGD or AdamW, crops and random "
            "flips, and neither groups, erasing nor alternating flips; leave what is more out."
        )


def train(
    model: nn.Module, source: DataSource, config: TrainConfig, parts: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Train to the end, or to the target accuracy, or until the loss is not finite; a record an evaluation."""
    assert config.max_epochs is not None, "cells say it"
    assert isinstance(config.optimizer, SGD | AdamW), "the recipes are of these"
    optimizer = _optimizer(model, config.optimizer)
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    count = len(_pair(source.train)[1])
    total = round(config.max_epochs * count)

    def growth(seen: int) -> int:
        if config.num_learners != "seesaw":
            return 1
        factor = config.schedule.warmed_up_factor(seen, count, total)
        return seesaw_learners(factor, config.min_learners, config.max_learners)

    rate, power = _one(config.optimizer.learning_rate), config.optimizer.noise_power or 0.0
    batches = Batches(count, lambda seen: config.batch_size * growth(seen))
    data = samples(_pair(source.train), source, augments=True)
    loader = DataLoader(data, batch_sampler=batches, num_workers=_WORKERS)
    ends, state = [round(stop * count) for stop in stops(config.max_epochs, parts)], _Trained()
    while ends:
        begun = time.perf_counter()
        for images, labels in loader:
            factor = config.schedule.factor(state.samples, count, total) * growth(state.samples) ** power
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad()
            loss = criterion(*flat(model(images.to(device)), labels.to(device)))
            loss.backward()
            if config.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            state.loss_sum, state.steps = state.loss_sum + loss.item(), state.steps + 1
            state.samples += len(labels)
            if state.samples >= ends[0]:
                state.seconds += time.perf_counter() - begun
                record = _record(state, model, source, device, config.max_evaluation_batches)
                yield record
                ends = [end for end in ends if end > state.samples]
                if _is_over(record, config) or not ends:
                    return
                begun = time.perf_counter()
        state.seconds += time.perf_counter() - begun


def _is_over(record: dict[str, Any], config: TrainConfig) -> bool:
    reached = config.target_accuracy is not None and record["test_accuracy"] >= config.target_accuracy
    return reached or not math.isfinite(record["train_loss"])


def _pair(data: Data) -> tuple[Tensor, Tensor]:
    pair = as_pair(data)
    assert pair is not None, "the data set is in memory"
    return pair


def _optimizer(model: nn.Module, settings: SGD | AdamW) -> torch.optim.Optimizer:
    if isinstance(settings, AdamW):
        return torch.optim.AdamW(
            model.parameters(), _one(settings.learning_rate), betas=(_one(settings.beta1), _one(settings.beta2)),
            eps=settings.epsilon, weight_decay=_one(settings.weight_decay),
        )  # fmt: skip
    return torch.optim.SGD(
        model.parameters(), _one(settings.learning_rate), momentum=_one(settings.momentum),
        weight_decay=_one(settings.weight_decay), nesterov=settings.nesterov,
    )  # fmt: skip


def _one(value: PerLearner) -> float:
    assert not isinstance(value, tuple), "there is one learner"
    return value


def _record(
    state: _Trained, model: nn.Module, source: DataSource, device: torch.device, most_batches: int | None
) -> dict[str, Any]:
    accuracy, loss = evaluate(model, source, device, most_batches)
    record = {
        "epoch": round(state.samples / len(_pair(source.train)[1]), 4),
        "samples_seen": state.samples,
        "elapsed_s": state.seconds,
        "num_learners": 1,
        "train_loss": state.loss_sum / state.steps,
        "test_loss": loss,
        "test_accuracy": accuracy,
    }
    state.loss_sum, state.steps = 0.0, 0
    return record


@torch.no_grad()
def evaluate(
    model: nn.Module, source: DataSource, device: torch.device, most_batches: int | None = None
) -> tuple[float, float]:
    """Accuracy and loss on the test data, or its first batches; the model goes on training afterwards."""
    pair = _pair(source.test)
    model.eval()
    right, loss = 0, 0.0
    count = 0
    batches = DataLoader(samples(pair, source, augments=False), _TEST_BATCH)
    for images, targets in itertools.islice(batches, most_batches):
        output, labels = flat(model(images.to(device)).cpu(), targets)
        count += len(labels)
        right += int((output.argmax(1) == labels).sum())
        loss += float(nn.functional.cross_entropy(output, labels, reduction="sum"))
    model.train()
    return right / count, loss / count


def _summary(
    config: TrainConfig, device: torch.device, records: Sequence[dict[str, Any]], tokens: int | None
) -> dict[str, Any]:
    last, diverged = records[-1], not math.isfinite(records[-1]["train_loss"])
    return {
        "status": "failed" if diverged else "finished",
        "stop_reason": "non_finite" if diverged else "max_epochs",
        "device": device.type,
        "executor": "default loop",
        "precision": "fp32",
        "averaging": "none",
        "model": config.model.NAME,
        "data": config.data.NAME,
        "num_learners": 1,
        "batch_size": config.batch_size,
        "epochs": last["epoch"],
        "samples_seen": last["samples_seen"],
        "test_accuracy": None if diverged else last["test_accuracy"],
        "best_test_accuracy": max(record["test_accuracy"] for record in records),
        "train_time_s": last["elapsed_s"],
        "tokens_per_s": None if tokens is None else tokens * last["samples_seen"] / last["elapsed_s"],
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
