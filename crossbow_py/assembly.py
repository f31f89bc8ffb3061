"""Builds the parts of a run from a trainer's settings, and refuses what cannot work before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.averaging.collective import Collective
from crossbow_py.checkpoint import load_weights
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data
from crossbow_py.data.feed import Batch, Feed, make_feed
from crossbow_py.engine.dropout import replace_dropout
from crossbow_py.engine.executors import Executor, choose_executor
from crossbow_py.engine.optimizers import Optimizer, for_learner
from crossbow_py.engine.precision import Precision, PrecisionName, cast_module, choose_device, choose_precision
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.engine.rounds import Loss, Round, RoundTasks
from crossbow_py.errors import UserError
from crossbow_py.evaluation import Evaluator, Metric
from crossbow_py.settings import check, setting


@dataclass(frozen=True)
class RunSettings:
    """The top-level keys that shape a run, checked alike from Python and the command line."""

    GROUP: ClassVar[str] = ""

    batch_size: int = setting(16, "samples a learner takes per round", minimum=1)
    num_learners: int = setting(2, "learners (replicas trained side by side) per device", minimum=1)
    executor: Literal["auto", "serial", "threads"] = setting("auto", "how learners run: auto, serial or threads")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where they run: auto, cpu or cuda")
    precision: PrecisionName = setting("auto", "compute format: fp32, bf16, or auto (bf16 where it is fast)")
    channels_last: bool = setting(True, "channels-last memory format for images and 4-D weights")
    seed: int = setting(0, "seed of initialisation, sample order, augmentation and dropout", minimum=0)
    on_nonfinite: Literal["stop", "reseed"] = setting(
        "stop", "a learner whose loss is not finite: stop the run, or reseed it from the average model"
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Choices:
    """What `auto` became: kept in checkpoints, so that a resume takes the same."""

    device: torch.device
    precision: Precision
    executor: str


def choose(settings: RunSettings, saved: Mapping[str, str] | None) -> Choices:
    """Resolve `auto`: as a checkpoint says when there is one, else for this machine.

    Raises UserError for what this machine cannot do.
    """
    saved = saved or {}
    device = choose_device(settings.device)
    precision = saved.get("precision", "auto") if settings.precision == "auto" else settings.precision
    executor = saved.get("executor", "auto") if settings.executor == "auto" else settings.executor
    chosen = choose_executor(executor, device, settings.num_learners)
    return Choices(device, choose_precision(precision, device), chosen.NAME)  # type: ignore[arg-type]


def seeded_model(make_model: Callable[[], nn.Module], seed: int, init_from: str | None) -> Callable[[], nn.Module]:
    """A factory whose initialisation follows from the seed alone and leaves torch's generators as they were."""
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise UserError(
            f"model must be a function that returns an nn.Module, got {type(make_model).__name__}; "
            "give the class itself or a lambda."
        )

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = make_model()
        if not isinstance(module, nn.Module):
            raise UserError(f"model must be a function that returns an nn.Module, got {type(module).__name__}.")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError("the model has no parameter to train; give it some, or set requires_grad.")
        if init_from is not None:
            load_weights(module, init_from)
        return module

    return make


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built once by the trainer; `warnings` are sentences for the user."""

    choices: Choices
    bank: ReplicaBank
    rule: AveragingRule
    optimizer: Optimizer
    loss: Loss
    evaluator: Evaluator
    train_feed: Feed
    validation_feed: Feed | None
    test_feed: Feed | None
    collective: Collective
    warnings: list[str]

    def new_executor(self, seed: int) -> Executor:
        """Task bodies and the executor over the bank. It may start threads: close it."""
        tasks = RoundTasks(
            self.bank,
            optimizer=self.optimizer,
            rule=self.rule,
            feed=self.train_feed,
            loss=self.loss,
            seed=seed,
            collective=self.collective,
        )
        return choose_executor(self.choices.executor, self.choices.device, self.bank.num_learners)(tasks)

    def plan(self, index: int, cursor: int, factor: float) -> Round:
        """Round `index` from stream position `cursor`: which batch and learning rate each learner gets."""
        learners, batch_size = range(self.bank.num_learners), self.train_feed.batch_size
        return Round(
            index=index,
            starts=tuple(cursor + (j * batch_size if self.rule.has_central_model else 0) for j in learners),
            learning_rates=tuple(for_learner(self.optimizer.learning_rate, j) * factor for j in learners),
            averaging=self.rule.linear_round(index, self.bank.num_learners * self.collective.num_devices),
        )


@dataclass(frozen=True)
class DataSets:
    """What is trained on and measured on, and how images are prepared."""

    train: Data
    test: Data | None = None
    validation: Data | None = None
    num_classes: int | None = None
    augmentation: Augmentation | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None


def build_parts(
    make_model: Callable[[], nn.Module],
    data: DataSets,
    settings: RunSettings,
    choices: Choices,
    *,
    optimizer: Optimizer,
    rule: AveragingRule,
    loss: Loss,
    metrics: Mapping[str, Metric],
    init_from: str | None,
    max_evaluation_batches: int | None,
) -> Parts:
    """Build feeds, bank and evaluator, after one small batch went through the model. Raises UserError."""
    precision = choices.precision

    def feed(source: Data, batch_size: int, augmentation: Augmentation | None) -> Feed:
        return make_feed(
            source, batch_size, settings.seed, choices.device, augmentation, data.mean, data.std,
            settings.channels_last, precision.compute,
        )  # fmt: skip

    train_feed = feed(data.train, settings.batch_size, data.augmentation)
    bank = ReplicaBank(
        seeded_model(make_model, settings.seed, init_from),
        settings.num_learners,
        device=choices.device,
        precision=precision,
        state_names=optimizer.STATE,
        channels_last=settings.channels_last,
    )
    classes = data.num_classes if loss is nn.functional.cross_entropy else None
    # Not more than a batch: BatchNorm on single values, for one, trains with two samples and not with one.
    batch = next(train_feed.evaluation_batches(min(2, settings.batch_size)))
    warnings = probe(bank.template, precision, batch, loss, classes)
    evaluator = Evaluator(
        bank.template,
        precision=precision,
        loss=loss,
        metrics=metrics,
        max_batches=max_evaluation_batches,
        channels_last=settings.channels_last,
    )
    return Parts(
        choices=choices,
        bank=bank,
        rule=rule,
        optimizer=optimizer,
        loss=loss,
        evaluator=evaluator,
        train_feed=train_feed,
        validation_feed=None if data.validation is None else feed(data.validation, 1, None),
        test_feed=None if data.test is None else feed(data.test, 1, None),
        collective=Collective(),
        warnings=warnings,
    )


_DRAWS_OUTSIDE = (
    "The model draws random numbers outside nn.Dropout modules, from torch's own generator: "
    "runs will not repeat or resume bit for bit."
)


def probe(template: nn.Module, precision: Precision, batch: Batch, loss: Loss, num_classes: int | None) -> list[str]:
    """Run one small batch through a copy of the model; refuse what cannot train, and return warnings.

    Raises UserError when the model, its output or the loss does not fit the data.
    """
    inputs = batch.inputs
    model = copy.deepcopy(template).train()
    replace_dropout(model, torch.Generator(inputs.device))
    cast_module(model, precision)
    try:
        with torch.random.fork_rng():
            before = _generator_state(inputs.device)
            output = model(inputs)
            draws = not torch.equal(before, _generator_state(inputs.device))
    except Exception as error:
        raise UserError(
            f"the model cannot take inputs of shape {list(inputs.shape[1:])} and dtype {inputs.dtype} "
            f"({_first_line(error)}); choose a model and a data set that fit each other."
        ) from error
    _check_output(output, batch.targets, precision, loss, num_classes)
    return [_DRAWS_OUTSIDE] if draws else []


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


def _check_output(output: Any, targets: Tensor, precision: Precision, loss: Loss, num_classes: int | None) -> None:
    if not isinstance(output, Tensor):
        raise UserError(f"the model must return one tensor, got {type(output).__name__}; wrap it so that it does.")
    if num_classes is not None and (output.ndim != 2 or output.shape[1] != num_classes):
        raise UserError(
            f"the model's output has shape [batch, {', '.join(map(str, output.shape[1:]))}] and the data has "
            f"{num_classes} classes; its last layer must return [batch, {num_classes}]."
        )
    try:
        value = loss(output.to(precision.master), targets)
    except Exception as error:
        raise UserError(
            f"the loss cannot take the model's output {list(output.shape)} with targets {list(targets.shape)} "
            f"({_first_line(error)}); give a loss that fits them."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"the loss must return one number, a batch mean, as a tensor, got {shape}; average it.")
    if not value.requires_grad:
        raise UserError("the loss does not depend on the parameters; detach nothing on the way to it.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
