"""The arguments of `Trainer`, each declared once; within the package they stay together in this form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy.typing as npt

from crossbow_py.averaging import RULES, SMA, AveragingRule
from crossbow_py.core.errors import UserError
from crossbow_py.core.other_names import python_suggestion
from crossbow_py.core.settings import suggestion
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.modules.losses import Loss, model_loss, takes_classes
from crossbow_py.engine.update.optimizers import OPTIMIZERS, SGD, AdamW, Optimizer
from crossbow_py.telemetry.events import Listener
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.checks.seeded_model import MakeModel
from crossbow_py.train.evaluation.metrics import Metric
from crossbow_py.train.run_settings import JobOptions, RunOptions, RunSettings
from crossbow_py.train.schedules import SCHEDULES, Constant, DefaultSchedule, Schedule

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainArguments(JobOptions, RunOptions, RunSettings):
    """The arguments of `Trainer`, whose docstring explains them. Raises UserError for keys of `RunSettings`."""

    model: MakeModel = field(kw_only=False)
    train_data: Data = field(kw_only=False)
    test_data: Data | None = field(default=None, kw_only=False)
    validation_data: Data | None = None
    num_classes: int | None = None
    optimizer: Optimizer | str | None = None
    schedule: Schedule | str | None = None
    averaging: AveragingRule | str = SMA()
    loss: Loss | None = None
    standardize_targets: bool | Literal["auto"] = "auto"
    metrics: Mapping[str, Metric] | None = None
    augmentation: Augmentation | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    sample_weights: npt.ArrayLike | None = None
    class_names: Sequence[str] | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    callbacks: Sequence[Listener] = ()
    tensorboard: bool = True
    names: Mapping[str, str] | None = None
    notes: Sequence[str] = ()
    ranks: Ranks = ALONE
    executor_cache: str | Path | None = None

    def __post_init__(self) -> None:
        given = self.optimizer is not None
        if self.optimizer is None:
            chosen, note = default_optimizer(self.loss, self.schedule is None)
            object.__setattr__(self, "optimizer", chosen)
            object.__setattr__(self, "notes", [*self.notes, note])
            schedule: Schedule = DefaultSchedule()
        else:
            schedule = Constant()
        if self.standardize_targets == "auto" and (given or self.init_from is not None):  # which goes on as it was
            object.__setattr__(self, "standardize_targets", False)
        if self.schedule is None:
            object.__setattr__(self, "schedule", schedule)
        for group in _REGISTRIES:
            if isinstance(name := getattr(self, group), str):
                object.__setattr__(self, group, rule_of(group, name))
        assert self.settings  # which checks them

    @property
    def rules(self) -> tuple[Optimizer, Schedule, AveragingRule]:
        """The optimizer, the schedule and the averaging rule, those that were named too."""
        found: Any = self.optimizer, self.schedule, self.averaging
        return found  # type: ignore[no-any-return]

    @cached_property
    def settings(self) -> RunSettings:
        """The keys of `RunSettings`, checked and converted."""
        return RunSettings.of(self)


def default_optimizer(loss: Loss | None, falls: bool) -> tuple[Optimizer, str]:
    """Return the optimizer where none is given, and what the user is told of it; `falls` is of its rate.

    Small networks learn well by these rates with batches of 16, and a cosine to zero. AdamW's steps do not grow with
    the loss, whose scale is known of cross-entropy alone.
    """
    knows_scale = loss is None or loss is model_loss or takes_classes(loss)
    chosen: Optimizer = SGD(learning_rate=0.03) if knows_scale else AdamW(learning_rate=0.01)
    end = ", which falls to 0 by a cosine if the run's length is known" if falls else ""
    return chosen, f"The optimizer is {chosen.NAME} at a rate of {chosen.learning_rate}{end}, as none was given."


_REGISTRIES: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "optimizer": (Optimizer, OPTIMIZERS), "schedule": (Schedule, SCHEDULES), "averaging": (AveragingRule, RULES),
}  # fmt: skip


def rule_of(group: str, given: object) -> Any:
    """Return an optimizer, schedule or averaging rule, also one that is given by its name. Raises UserError."""
    base, registry = _REGISTRIES[group]
    if isinstance(given, str):
        if given not in registry:
            raise UserError(f"{group} has no {given!r}{suggestion(given, registry)}")
        return registry[given]()
    if not isinstance(given, base):
        raise UserError(f"{group} must be an object or a name of crossbow_py's, got {given!r}.")
    return given


def with_keywords_of(
    arguments: Callable[P, A], of_fit: Callable[[], Callable[..., Any]]
) -> Callable[[Callable[[T, A], None]], Callable[Concatenate[T, P], None]]:
    """Give an `__init__` that takes one object of a dataclass the dataclass's keywords.

    It raises TypeError for another keyword, with a suggestion among these and the keywords of what `of_fit` returns.
    """
    signature, own_names = inspect.signature(arguments), [*arguments.__annotations__]
    # What must be given first, then what is the class's own, then keys of the command line.
    first = [*signature.parameters.values()]
    first.sort(key=lambda each: (each.default is not each.empty, each.name not in own_names))
    signature = signature.replace(parameters=first)

    def decorate(init: Callable[[T, A], None]) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def initialise(self: T, /, *args: P.args, **given: P.kwargs) -> None:
            check_keywords(given, keywords(of_fit()), [*signature.parameters], in_fit=False)
            signature.bind(*args, **given)  # its errors name no class of ours
            init(self, arguments(*args, **given))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        initialise.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return initialise

    return decorate


def check_keywords(given: Iterable[str], of_fit: Sequence[str], of_trainer: Sequence[str], in_fit: bool) -> None:
    """Raise TypeError with a suggestion for a keyword that `fit`, or else `Trainer`, does not take."""
    known = of_fit if in_fit else of_trainer
    for word in given:
        if word not in known:
            meant = python_suggestion(word, of_fit, of_trainer, in_fit=in_fit)
            raise TypeError(f"unexpected keyword argument {word!r}{meant or suggestion(word, known)}")


def keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's keyword arguments."""
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
