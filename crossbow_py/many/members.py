"""The members that `train_many` trains: what each has of its own, and folds of the training data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.class_balance import checked_weights
from crossbow_py.data.datasets import Data, check_data, class_labels, in_tensors, num_samples
from crossbow_py.data.randomness import permutation
from crossbow_py.data.sampler import SampleOrder, balanced_weights
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.models.lora import LoRA
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.train.arguments import check_keywords, rule_of
from crossbow_py.train.run_settings import JobSettings, StopConditions
from crossbow_py.train.schedules import Constant, Schedule

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
        validation: the places of training samples that it is measured on, instead of the validation data. Without a
            subset it trains on all others.
        sample_weights: a weight for each sample of its subset, to draw by, with replacement.
        order_seed: seed of its order of samples. None shares the call's order, so that members of the same samples
            take the same batches, which is faster.
    """

    name: str | None = None
    group: str | None = None
    seed: int | None = None
    model: Callable[[], nn.Module] | None = None
    optimizer: Optimizer | str | None = None
    schedule: Schedule | str | None = None
    batch_size: int | None = None
    max_epochs: float | None = None
    label_smoothing: float | None = None
    augmentation: Augmentation | None = None
    subset: Fold | Sequence[int] | npt.ArrayLike | None = None
    validation: Sequence[int] | npt.ArrayLike | None = None
    sample_weights: npt.ArrayLike | None = None
    order_seed: int | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Make an object for `__init__`. Raises TypeError for an unknown keyword, with the one that was meant."""
        check_keywords(given, (), [each.name for each in fields(cls)], in_fit=False)
        return super().__new__(cls)


def folds(data: Data | int, num_folds: int, seed: int = 0) -> list[Fold]:
    """Split training data into folds of equal size, each held out once; by class, where each sample has one.

    Args:
        data: the training data, or its number of samples.
        num_folds: k, at least 2.
        seed: of the shuffle.

    Raises:
        UserError: a fold would be empty, or a class would be in no training part of some fold.
    """
    if isinstance(data, bool) or not isinstance(data, int | np.integer):
        data = in_tensors(data)
        check_data(data, "the data set")
    total = int(data) if isinstance(data, int | np.integer) else num_samples(data)
    if isinstance(num_folds, bool) or not isinstance(num_folds, int | np.integer) or not 2 <= num_folds <= total:
        raise UserError(f"folds must be between 2 and the {total} training samples, got {num_folds!r}.")
    labels = None if isinstance(data, int | np.integer) else class_labels(data)
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
        schedule: that of members for which none is given, unless they have an optimizer of their own.
    """

    common: Member
    train: Data
    order_seed: int
    sampling: str = "shuffle"
    schedule: Schedule = Constant()

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
        digest: what it trains, in short: equal digests give equal models. Empty where nothing is written.
    """

    number: int
    name: str
    group: str | None
    settings: TrialSettings
    max_epochs: float
    validation: Ids | None
    digest: str = ""

    def num_samples(self, of_all: int) -> int:
        """Return the samples of an epoch."""
        return of_all if self.settings.order is None else self.settings.order.num_samples


def settled(members: int | Iterable[Member], study: Study) -> list[Settled]:
    """Return the members in full. Raises UserError, which names the member and what it has wrong."""
    if isinstance(members, bool | float | str) or not isinstance(members, int | np.integer | Iterable):
        raise UserError(f"members must be a number or a list of Member, got {members!r}.")
    found = [Member()] * int(members) if isinstance(members, int | np.integer) else list(members)
    if not found:
        raise UserError("members must be at least one, got none; give members=8 for eight seeds, or a list of Member.")
    for number, member in enumerate(found):
        if not isinstance(member, Member):
            raise UserError(f"members[{number}] must be a Member, got {type(member).__name__}; Member(seed=0) is one.")
    names, makers = _names(found), dict[str, str]()
    return [_settled(number, names[number], member, study, makers) for number, member in enumerate(found)]


def _settled(number: int, name: str, member: Member, study: Study, makers: dict[str, str]) -> Settled:
    own = {each.name: getattr(member, each.name) for each in fields(Member)}
    whole: Any = replace(study.common, **{key: value for key, value in own.items() if value is not None})
    what, total = f"member {name}", study.num_samples
    with _naming(what):
        seed = number + (study.common.seed or 0) if member.seed is None else member.seed
        job = JobSettings(
            seed=seed, order_seed=member.order_seed, batch_size=whole.batch_size,
            label_smoothing=whole.label_smoothing or 0.0,
        )  # fmt: skip
        max_epochs = StopConditions(max_epochs=whole.max_epochs).max_epochs
        if max_epochs is None or not math.isfinite(max_epochs):
            raise UserError(f"max_epochs must be a number, got {whole.max_epochs}.")
        fallback = study.schedule if member.optimizer is None else Constant()
        optimizer, schedule = rule_of("optimizer", whole.optimizer), rule_of("schedule", whole.schedule or fallback)
        augmentation = whole.augmentation or Augmentation()
        if not isinstance(augmentation, Augmentation):
            raise UserError(f"augmentation must be an Augmentation, got {augmentation!r}.")
        ids, validation = _samples(whole, total)
        order = _order(replace(member, order_seed=job.order_seed), ids, study)
    size = total if order is None else order.num_samples
    if job.batch_size > size:
        raise UserError(f"{what}: batch_size={job.batch_size} is more than its samples; choose at most {size}.")
    settings = TrialSettings(
        seed=job.seed,
        make_model=whole.model,
        model_key=makers.setdefault(_maker_key(whole.model), f"model {len(makers)}"),
        batch_size=job.batch_size,
        optimizer=optimizer,
        schedule=schedule,
        label_smoothing=job.label_smoothing,
        augmentation=augmentation,
        order=order,
    )
    return Settled(number, name, member.group, settings, max_epochs, validation)


def _samples(member: Member, total: int) -> tuple[Ids | None, Ids | None]:
    """Return the places of the training samples, None for all, and of its own validation samples, None for none.

    Without a subset it trains on all samples that it is not measured on. Raises UserError.
    """
    subset, held_out = member.subset, member.validation
    if isinstance(subset, tuple) and len(subset) == 2 and all(np.ndim(part) == 1 for part in subset):
        subset, fold_validation = subset  # a Fold, or a pair as scikit-learn's splitters give it
        held_out = fold_validation if held_out is None else held_out
    validation = None if held_out is None else _places("validation", held_out, total, unique=True)
    if subset is not None:
        ids = _places("subset", subset, total)
        if validation is not None and (both := np.intersect1d(ids, validation)).size:
            raise UserError(f"place {both[0]} is both in subset and in validation; measure on samples not trained on.")
        return ids, validation
    if validation is None:
        return None, None
    rest = np.setdiff1d(np.arange(total, dtype=np.int64), validation)
    if not rest.size:
        raise UserError("validation has every training sample, so that none is left to train on.")
    return rest, validation


def _order(member: Member, ids: Ids | None, study: Study) -> SampleOrder | None:
    """Return the member's own order of samples; None if it has all samples in the order that is shared."""
    if ids is None and member.sample_weights is None and member.order_seed is None:
        return None
    size = study.num_samples if ids is None else len(ids)
    weights = None
    if member.sample_weights is not None:
        weights = checked_weights(member.sample_weights, size)
    elif study.sampling == "balanced" and (labels := class_labels(study.train)) is not None:
        weights = balanced_weights(labels if ids is None else labels[ids])
    seed = study.order_seed if member.order_seed is None else member.order_seed
    return SampleOrder(seed, size, weights, ids)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Have what is raised about settings name the member."""
    try:
        yield
    except (UserError, TypeError) as error:
        raise UserError(f"{what}: {error}") from error


def _places(what: str, given: Any, total: int, unique: bool = False) -> Ids:
    """Return places in the training data as int64 [n]. Raises UserError."""
    try:
        places = np.asarray(given)
    except ValueError:  # lists of different lengths
        places = np.empty(0)
    if places.dtype == np.bool_ and places.shape == (total,):
        places = np.flatnonzero(places)
    if places.ndim != 1 or places.size == 0 or places.dtype.kind not in "iu":
        raise UserError(
            f"{what} must be places of training samples, 0 to {total - 1}, or {total} booleans, got {_short(given)}."
        )
    if places.shape == (total,) and total > 2 and places.max() <= 1 and places.min() >= 0:
        raise UserError(f"{what} looks like a mask, {total} zeros and ones; give it as booleans: mask.astype(bool).")
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


def _maker_key(make: Callable[[], nn.Module]) -> str:
    """Return a text that is equal for functions that make models of one architecture, as far as can be told."""
    if isinstance(make, partial):
        return repr((_maker_key(make.func), make.args, sorted(make.keywords.items())))
    if isinstance(make, LoRA):
        own = {each.name: getattr(make, each.name) for each in fields(make)}
        return repr({**own, "model": _maker_key(make.model)})
    return f"{getattr(make, '__module__', '')}.{getattr(make, '__qualname__', '')} {id(make)}"


def _names(members: Sequence[Member]) -> list[str]:
    """Return the members' names: those given, or their numbers. Raises UserError if two are the same."""
    width = len(str(len(members) - 1))
    names = [f"{number:0{width}}" if each.name is None else each.name for number, each in enumerate(members)]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"members has {count} of the name {name!r}; give each its own.")
    return names
