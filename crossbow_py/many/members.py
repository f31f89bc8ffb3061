"""The members that `train_many` trains: what each has of its own, and folds of the training data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import to_mapping
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.class_balance import checked_weights
from crossbow_py.data.datasets import Data, class_labels, num_samples
from crossbow_py.data.randomness import permutation
from crossbow_py.data.sampler import SampleOrder, balanced_weights
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.train.checks.seeded_model import seeded_model
from crossbow_py.train.schedules import Schedule

Ids = npt.NDArray[np.int64]


class Fold(NamedTuple):
    """One split of the training data: the places in it of the samples to train on, and of those held out."""

    train: Ids
    validation: Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One of the models that `train_many` trains. What is None is that of the call.

    Attributes:
        name: how it is called in tables; None is its number.
        group: members of one group are summed up together, such as the seeds and folds of one setting.
        seed: seed of its initial weights, dropout and augmentation; None is the call's seed plus its number.
        model: makes it, a function without arguments that returns an `nn.Module`.
        optimizer, schedule, batch_size, max_epochs, label_smoothing, augmentation: its own.
        subset: the training samples that it learns from: their places in the training data, which may repeat as those
            of a bootstrap do, or a mask [N] of booleans, or a `Fold`. An epoch is a pass over these.
        validation: the places of training samples that it is measured on, instead of the validation data.
        sample_weights: a weight for each sample of its subset, to draw by, with replacement.
        order_seed: seed of its order of samples. None shares the call's order, so that members of the same samples
            take the same batches, which is faster.
    """

    name: str | None = None
    group: str | None = None
    seed: int | None = None
    model: Callable[[], nn.Module] | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    batch_size: int | None = None
    max_epochs: float | None = None
    label_smoothing: float | None = None
    augmentation: Augmentation | None = None
    subset: Fold | Sequence[int] | npt.ArrayLike | None = None
    validation: Sequence[int] | npt.ArrayLike | None = None
    sample_weights: npt.ArrayLike | None = None
    order_seed: int | None = None


def folds(data: Data | int, num_folds: int, seed: int = 0) -> list[Fold]:
    """Split training data into folds of equal size, each held out once; by class, where each sample has one.

    Args:
        data: the training data, or its number of samples.
        num_folds: k, at least 2.
        seed: of the shuffle.

    Raises:
        UserError: a fold would be empty, or a class would be in no training part of some fold.
    """
    total = data if isinstance(data, int) else num_samples(data)
    if not 2 <= num_folds <= total:
        raise UserError(f"folds must be between 2 and the {total} training samples, got {num_folds}.")
    labels = None if isinstance(data, int) else class_labels(data)
    order = permutation(seed, "folds", 0, total)
    if labels is not None and labels.ndim == 1:
        classes, counts = np.unique(labels, return_counts=True)
        if counts.min() < 2:  # regression on integers, or a class that one fold alone has
            raise UserError(
                f"folds={num_folds}: class {classes[counts.argmin()]} has a single sample, which the fold that holds "
                "it out would train without; leave the class out, or give floating targets if they are no classes."
            )
        order = order[np.argsort(labels[order], kind="stable")]  # neighbours go to different folds
    number = np.empty(total, dtype=np.int64)
    number[order] = np.arange(total) % num_folds
    return [Fold(np.flatnonzero(number != fold), np.flatnonzero(number == fold)) for fold in range(num_folds)]


@dataclass(frozen=True, eq=False)
class Study:
    """What all members have unless they say otherwise, and the training data.

    Attributes:
        common: a member without a None, except for samples.
        train: the training data.
        order_seed: seed of the order that members share.
        sampling: as `RunSettings.sampling`.
        digest: a text that is equal where members of equal settings are equal.
    """

    common: Member
    train: Data
    order_seed: int
    sampling: str = "shuffle"
    digest: str = ""

    @property
    def num_samples(self) -> int:
        """N, the training samples."""
        return num_samples(self.train)


@dataclass(frozen=True, eq=False)
class Settled:
    """A member with all that was left to the call.

    Attributes:
        number: its place among the members.
        name, group: how it is called, and with which others it is summed up.
        settings: what a pack takes.
        max_epochs: passes over its own samples.
        validation: the places of its own validation samples; None for the call's validation data.
        digest: what it trains, in short; equal digests give equal models.
    """

    number: int
    name: str
    group: str | None
    settings: TrialSettings
    max_epochs: float
    validation: Ids | None
    subset: Ids | None
    digest: str

    def num_samples(self, of_all: int) -> int:
        """Return the samples of an epoch."""
        return of_all if self.settings.order is None else self.settings.order.num_samples


def settled(members: Sequence[Member], study: Study) -> list[Settled]:
    """Return the members in full. Raises UserError, which names the member and what it has wrong."""
    if not members:
        raise UserError("members must be at least one, got none; give members=8 for eight seeds, or a list of Member.")
    for number, member in enumerate(members):
        if not isinstance(member, Member):
            raise UserError(f"members[{number}] must be a Member, got {type(member).__name__}; Member(seed=0) is one.")
    names = _names(members)
    makers: dict[str, tuple[str, str]] = {}
    return [_settled(number, names[number], member, study, makers) for number, member in enumerate(members)]


def _settled(number: int, name: str, member: Member, study: Study, makers: dict[str, tuple[str, str]]) -> Settled:
    own = {each.name: getattr(member, each.name) for each in fields(Member)}
    whole: Any = replace(study.common, **{key: value for key, value in own.items() if value is not None})
    what, total = f"member {name}", study.num_samples
    subset = whole.subset.train if isinstance(whole.subset, Fold) else whole.subset
    held_out = whole.subset.validation if isinstance(whole.subset, Fold) else None
    ids = None if subset is None else _places(f"{what}: subset", subset, total)
    validation = held_out if whole.validation is None else whole.validation
    own_validation = None if validation is None else _places(f"{what}: validation", validation, total, unique=True)
    seed = number + (study.common.seed or 0) if member.seed is None else member.seed
    order = _order(what, member, ids, study)
    size = total if order is None else order.num_samples
    if whole.batch_size > size:
        raise UserError(f"{what}: batch_size={whole.batch_size} is more than its samples; choose at most {size}.")
    maker = _maker_key(whole.model)
    if maker not in makers:
        makers[maker] = f"model {len(makers)}", _architecture(whole.model)
    key, architecture = makers[maker]
    settings = TrialSettings(
        seed=seed,
        make_model=whole.model,
        model_key=key,
        batch_size=whole.batch_size,
        optimizer=whole.optimizer,
        schedule=whole.schedule,
        label_smoothing=whole.label_smoothing or 0.0,
        augmentation=whole.augmentation or Augmentation(),
        order=order,
    )
    plain = [
        study.digest, seed, architecture, whole.batch_size, str(to_mapping(whole.optimizer)),
        str(to_mapping(whole.schedule)),
        settings.label_smoothing, str(settings.augmentation), whole.max_epochs, study.order_seed,
        None if order is None else order.seed,
    ]  # fmt: skip
    found = hashlib.blake2b(repr(plain).encode(), digest_size=8)
    for part in (ids, own_validation, None if order is None else order.weights):
        found.update(b"-" if part is None else part.tobytes())
    digest = found.hexdigest()
    return Settled(number, name, member.group, settings, float(whole.max_epochs), own_validation, ids, digest)


def _order(what: str, member: Member, ids: Ids | None, study: Study) -> SampleOrder | None:
    """Return the member's own order of samples; None if it has all samples in the order that is shared."""
    size = study.num_samples if ids is None else len(ids)
    weights, labels = None, class_labels(study.train) if study.sampling == "balanced" else None
    if member.sample_weights is not None:
        try:
            weights = checked_weights(member.sample_weights, size)
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
    elif labels is not None and ids is not None:
        weights = balanced_weights(labels[ids])
    if ids is None and weights is None and member.order_seed is None:
        return None
    seed = study.order_seed if member.order_seed is None else member.order_seed
    return SampleOrder(seed, size, weights, ids)


def _places(what: str, given: Any, total: int, unique: bool = False) -> Ids:
    """Return places in the training data as int64 [n]. Raises UserError."""
    places = np.asarray(given)
    if places.dtype == np.bool_ and places.shape == (total,):
        places = np.flatnonzero(places)
    if places.ndim != 1 or places.size == 0 or places.dtype.kind not in "iu":
        raise UserError(
            f"{what} must be places of training samples, 0 to {total - 1}, or {total} booleans, got {_short(given)}."
        )
    places = places.astype(np.int64)
    if places.min() < 0 or places.max() >= total:
        outside = places[(places < 0) | (places >= total)][0]
        raise UserError(f"{what} has place {outside}, and there are {total} training samples, 0 to {total - 1}.")
    if unique and len(np.unique(places)) < len(places):
        values, counts = np.unique(places, return_counts=True)
        raise UserError(f"{what} has place {values[counts.argmax()]} {counts.max()} times; give each once.")
    return places


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ")
    return f"{text[:60]}..." if len(text) > 63 else text


def _architecture(make: Callable[[], nn.Module]) -> str:
    """Return what a model is made of, in text that is the same in every process."""
    model = seeded_model(make, 0, None)
    return repr((str(model), [(name, value.shape, value.dtype) for name, value in model.state_dict().items()]))


def _maker_key(make: Callable[[], nn.Module]) -> str:
    """Return a text that is equal for functions that make models of one architecture, as far as can be told."""
    if isinstance(make, partial):
        return repr((_maker_key(make.func), make.args, sorted(make.keywords.items())))
    return f"{getattr(make, '__module__', '')}.{getattr(make, '__qualname__', '')} {id(make)}"


def _names(members: Sequence[Member]) -> list[str]:
    """Return the members' names, those given or made of what differs. Raises UserError if two are the same."""
    given = [member.name for member in members if member.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise UserError(f"members has {given.count(name)} of the name {name!r}; give each its own.")
    width = len(str(len(members) - 1))
    return [member.name if member.name is not None else f"{number:0{width}}" for number, member in enumerate(members)]
