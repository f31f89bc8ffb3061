"""One trial: what it trains, what lets it share a bank with others, and where it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.sampler import SampleOrder
from crossbow_py.engine.bank.frozen_base import frozen_parameters
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.dropout import dropout_rates
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.train.checks.seeded_model import seeded_model
from crossbow_py.train.schedules import Schedule

Row = dict[str, Any]  # one learner as `ReplicaBank.load_row` takes it: tensors and plain types


@dataclass(frozen=True)
class TrialSettings:
    """The settings of a trial. All randomness but the order of samples follows from `seed`.

    Attributes:
        model_key: what `make_model` makes, but for the rate of dropout: equal keys mean equal architectures.
        name: how people call the model.
        order: the samples of its own and their order; None for those of the feed, which other trials share.
        features: its configuration as numbers from 0 to 1, alike for all trials, by which `knn` packs.
        wider: the same with wider models, in whose packs it may train; the first that it fits counts.
    """

    seed: int
    make_model: Callable[[], nn.Module]
    model_key: str
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule
    label_smoothing: float = 0.0
    augmentation: Augmentation = Augmentation()
    name: str = "this model"
    order: SampleOrder | None = None
    features: tuple[float, ...] = ()
    wider: tuple[TrialSettings, ...] = ()

    def new_model(self) -> nn.Module:
        """Return the model as the trial begins. Raises UserError, or what `make_model` raises."""
        return self.optimizer.prepared(seeded_model(self.make_model, self.seed, None))


@dataclass(frozen=True)
class Checkpoint:
    """A trial between two segments: samples and rounds so far, and its row.

    A row has no frozen parameters where a pack's members share them, but the text of `frozen_values`. Rows of older
    files have them among the weights.
    """

    samples_seen: int
    num_rounds: int
    row: Row

    @property
    def state(self) -> dict[str, Tensor]:
        """The model's state dict, tied parameters once, on the host."""
        stacked = {**self.row["weights"], **self.row.get("frozen", {}), **self.row["buffers"]}
        return {**{name: value[0] for name, value in stacked.items()}, **self.row["integer_buffers"][0]}

    def with_state(self, state: Mapping[str, Tensor]) -> Checkpoint:
        """Return the checkpoint with other weights and buffers."""
        row = {**self.row, "integer_buffers": [{n: state[n] for n in self.row["integer_buffers"][0]}]}
        for part in ("weights", "frozen", "buffers") if "frozen" in row else ("weights", "buffers"):
            row[part] = {name: state[name].unsqueeze(0) for name in self.row[part]}
        return replace(self, row=row)


def signature(settings: TrialSettings, model: nn.Module) -> str:
    """Return a text that is equal for trials that can share a bank, but for the values of what is frozen.

    Each may have its own rate of dropout where all of its dropout layers have one rate, which is not 0.
    """
    tensors = [
        (name, tuple(value.shape), str(value.dtype), value.requires_grad)
        for named in (model.named_parameters(), model.named_buffers())
        for name, value in named
    ]
    facts: tuple[object, ...] = (
        settings.model_key, tensors, shared_dropout(model), settings.batch_size, settings.optimizer.shared(),
    )  # fmt: skip
    if settings.augmentation.mixes:  # their targets are shares of the classes
        facts = (*facts, "mixed")
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def shared_dropout(model: nn.Module) -> object:
    """Return what trials of one pack must have in common of dropout: all rates, if there are several or it is off."""
    rates = dropout_rates(model)
    return "each its own" if len(set(rates)) == 1 and 0 not in rates else rates


def own_dropout_rate(model: nn.Module) -> float | None:
    """Return the rate of all dropout layers of a model; None if there are several rates, or no such layer."""
    rates = set(dropout_rates(model))
    return rates.pop() if len(rates) == 1 else None


def new_row(model: nn.Module) -> Row:
    """Return the row of a learner that begins as `model`, without optimizer state."""
    parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
    buffers = dict(model.named_buffers())
    return {
        "weights": {name: value.detach().unsqueeze(0) for name, value in parameters.items()},
        "frozen": {name: value.detach().unsqueeze(0) for name, value in frozen_parameters(model).items()},
        "buffers": {name: value.unsqueeze(0) for name, value in buffers.items() if value.is_floating_point()},
        "integer_buffers": [{name: value for name, value in buffers.items() if not value.is_floating_point()}],
        "step_counts": [0],
        "optimizers": [None],
    }


def with_zero_state(row: Row, state_names: tuple[str, ...]) -> Row:
    """Return the row of a learner that begins, with optimizer state."""
    zeros = {name: torch.zeros_like(value) for name, value in row["weights"].items()}
    return {**row, "state": dict.fromkeys(state_names, zeros)}


def read_row(bank: ReplicaBank, row: int) -> Row:
    """Return a copy of a learner's row, on the host, without frozen parameters that all learners share."""
    buffers, integers = bank.buffers.shaped(row), bank.integer_buffers(row)
    return {
        "weights": {name: _copy(value) for name, value in bank.weights.shaped(row).items()},
        "frozen": {} if bank.base.is_shared else bank.base.on_host(row),
        "state": {name: {n: _copy(v) for n, v in rows.shaped(row).items()} for name, rows in bank.state.items()},
        "buffers": {name: _copy(value) for name, value in buffers.items()},
        "integer_buffers": [{name: value.detach().cpu().clone() for name, value in integers.items()}],
        "step_counts": [bank.step_counts[row]],
        "optimizers": [own.state() for own in bank.optimizers[row : row + 1]],
    }


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone().unsqueeze(0)
