"""The top-level keys that shape a run, the values that `auto` takes on this machine, and stop conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import UserError
from crossbow_py.core.host import prepare_environment
from crossbow_py.core.settings import check, setting
from crossbow_py.core.switches import read_switches
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.engine.auto_tuner import AutoTunerSettings
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.executors import EXECUTORS, check_executor, check_name
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import (
    Precision,
    PrecisionName,
    check_device,
    check_precision,
    choose_device,
    choose_precision,
)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings that runs and searches share: how learners or trials are trained."""

    GROUP: ClassVar[str] = ""

    batch_size: int = setting(16, "samples a learner takes per round", minimum=1)
    executor: str = setting(
        "auto",
        "how learners run: auto (the fastest), serial, fused; on CPU threads, and fused_threads, which is one group of "
        "fused learners per thread; on CUDA streams",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "the device that learners run on: auto, cpu or cuda")
    precision: PrecisionName = setting("auto", "compute format: fp32, bf16, or auto (bf16 where it is fast)")
    channels_last: bool = setting(True, "channels-last memory format for images and 4-D weights")
    seed: int = setting(
        0, "seed of initialisation, sample order, augmentation and dropout", minimum=0, maximum=2**63 - 1
    )
    num_workers: int | Literal["auto"] = setting(
        "auto",
        "processes that load data which does not live on the device; 0 loads between rounds, auto keeps learners fed",
        minimum=0,
    )
    order_seed: int | None = setting(None, "seed of the sample order alone; null is seed", minimum=0, maximum=2**63 - 1)
    sampling: Literal["shuffle", "balanced"] = setting(
        "shuffle",
        "samples of an epoch: shuffle, each once; or balanced, drawn with replacement, every class as often as another",
    )
    label_smoothing: float = setting(
        0.0, "share of the target spread over all classes, in the cross-entropy of training", minimum=0, below=1
    )

    cache_features: Literal["auto"] | bool = setting(
        "auto",
        "keep what frozen layers make of each sample before the first trained one, by executor=fused on CPU: auto "
        "where it changes no bit and saves most of a pass",
    )

    def __post_init__(self) -> None:
        check_device(self.device)
        check_precision(self.precision)
        check(self)
        check_name(self.executor)
        if self.cache_features is True and self.executor != "fused":
            raise UserError(
                f"cache_features=true is for executor=fused, got executor={self.executor}; set executor=fused, or "
                "cache_features=auto."
            )

    @property
    def sample_order_seed(self) -> int:
        """The seed of the sample order."""
        return self.seed if self.order_seed is None else self.order_seed


MOST_LEARNERS = 16_384  # each has its own module: more take minutes to set up


@dataclass(frozen=True, kw_only=True)
class RunSettings(JobSettings):
    """The top-level keys that shape a run's training. The same checks apply from Python and the command line."""

    num_learners: int | Literal["auto", "seesaw"] = setting(
        "auto",
        "learners (replicas trained side by side) per device; auto finds the one that learns fastest, seesaw takes "
        "more as the learning rate falls",
        minimum=1,
        maximum=MOST_LEARNERS,
    )
    min_learners: int = setting(
        1, "learners per device that num_learners=seesaw begins with", minimum=1, maximum=MOST_LEARNERS
    )
    max_learners: int = setting(
        8, "most learners that num_learners=auto or seesaw may take per device", minimum=1, maximum=MOST_LEARNERS
    )
    accumulate: int = setting(1, "batches of batch_size whose gradients are added for a learner's step", minimum=1)
    compile_model: bool = setting(
        False, "run learners' models through torch.compile first (serial, threads, streams); takes up to minutes"
    )
    on_nonfinite: Literal["stop", "reseed"] = setting(
        "stop", "a learner whose loss is not finite: stop the run, or reseed it from the average model"
    )
    count_effective_samples: bool = setting(
        False, "count schedule, max_epochs and max_samples by what samples are worth in so large a batch (AdaScale)"
    )
    class_weights: Literal["balanced"] | tuple[float, ...] | None = setting(
        None,
        "weights of classes in the cross-entropy of training: a list, or balanced, inversely proportional to their "
        "counts",
        above=0,
    )
    evaluations_per_epoch: int = setting(1, "evaluations in an epoch, evenly spaced", minimum=1)
    learning_statistics: bool = setting(
        False, "measure gradient noise scale, sharpness and agreement of learners at the end of every epoch"
    )

    @classmethod
    def of(cls, config: object, **own: Any) -> RunSettings:
        """Build settings from the attributes of an object that has some of them; `own` values override these."""
        names = [field.name for field in dataclasses.fields(RunSettings)]
        return RunSettings(**{name: getattr(config, name) for name in names if hasattr(config, name)} | own)

    @property
    def samples_per_step(self) -> int:
        """The samples of a learner's batch, by which it takes a step in each round."""
        return self.batch_size * self.accumulate

    @property
    def first_learners(self) -> int:
        """The learners per device that a run begins with: with `auto` it is one."""
        if isinstance(self.num_learners, int):
            return self.num_learners
        return 1 if self.num_learners == "auto" else self.min_learners

    @property
    def most_learners(self) -> int:
        """The most learners per device that a run may have."""
        return self.num_learners if isinstance(self.num_learners, int) else self.max_learners

    @property
    def several(self) -> bool:
        """Whether there may be more than one learner on a device."""
        return self.num_learners == "auto" or self.most_learners > 1

    def has_several(self, num_ranks: int) -> bool:
        """Return whether there may be more than one learner over all ranks."""
        return self.several or num_ranks > 1

    def averages(self, rule: AveragingRule, num_ranks: int) -> bool:
        """Return whether learners may follow an average model."""
        return rule.has_central_model and (rule.has_velocity or self.has_several(num_ranks))


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Where runs and searches are recorded, and what they go on from. From Python a path may be a `Path`."""

    experiment: str = setting("custom", "name of the run's recipe; chosen with +experiment=NAME")
    resume: str | Path | None = setting(
        None, "null, auto (newest valid checkpoint) or the path of a run or checkpoint folder"
    )
    output_dir: str | Path | None = setting(None, "the run's folder; null is runs/<experiment>/<time>")
    init_from: str | Path | None = setting(None, "safetensors file with the initial weights (fine-tuning)")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The keys of a run that do not decide how learners learn."""

    max_evaluation_batches: int | None = setting(None, "the most batches to evaluate on; null is all", minimum=1)
    trace: bool = setting(
        False, "write a timeline of tasks to trace.json in the run's folder (open it in ui.perfetto.dev)"
    )
    profile: bool = setting(False, "write which operators take the time to profile.txt and profile.json.gz")
    distributed: DistributedSettings = dataclasses.field(
        default=DistributedSettings(), metadata={"help": "settings of several ranks, started by torchrun"}
    )
    auto_tuner: AutoTunerSettings = dataclasses.field(
        default=AutoTunerSettings(), metadata={"help": "settings of num_learners=auto"}
    )


@dataclass(frozen=True)
class Choices:
    """The values chosen for `auto`. Checkpoints keep them, so that a resumed run takes the same.

    Attributes:
        device: the device that learners run on.
        precision: the formats of weights and of computation.
        executor: the executor; `auto` until the candidates have been measured.
        executor_choice_s: seconds that measuring the candidates took; 0 if none was measured. Not in checkpoints.
    """

    device: torch.device
    precision: Precision
    executor: str
    executor_choice_s: float = 0.0

    def to_plain(self) -> dict[str, str]:
        """Return plain values for a checkpoint."""
        return {"device": self.device.type, "precision": self.precision.name, "executor": self.executor}


def choose(settings: RunSettings, saved: Mapping[str, Any] | None, num_ranks: int = 1) -> Choices:
    """Resolve `auto` for everything but the executor: to a checkpoint's values if there is one, else for this machine.

    The executor is resolved too if there is nothing to measure: for a single learner per device on CPUs. On several
    ranks it gets a thread, so that it goes on while ranks average.

    Raises UserError for settings that this machine cannot run.
    """
    saved = saved or {}
    read_switches()  # so that a mistake in them is found at once
    chosen = EXECUTORS.get(settings.executor)
    may_stream = settings.executor == "auto" or (chosen is not None and issubclass(chosen, StreamsExecutor))
    if may_stream and settings.device != "cpu" and torch.cuda.is_available():
        prepare_environment()
    device = choose_device(saved.get("device", "auto") if settings.device == "auto" else settings.device)
    if device.type == "cpu" and settings.several:
        keep_freed_memory()
    precision = saved.get("precision", "auto") if settings.precision == "auto" else settings.precision
    executor = saved.get("executor", "auto") if settings.executor == "auto" else settings.executor
    if executor == "auto" and not settings.several and device.type == "cpu":
        executor = "serial" if num_ranks == 1 else "threads"  # no learners to run side by side
    if executor != "auto":
        check_executor(executor, device)
        if settings.compile_model and EXECUTORS[executor].FUSES:
            raise UserError(
                f"compile_model=true is for executors that run one model after another, got executor={executor}; "
                "set compile_model=false, or another executor."
            )
        if not accumulates(settings, executor, device):
            raise UserError(
                f"accumulate={settings.accumulate} is for executors that begin each pass from the host, and rounds of "
                f"executor={executor} on CUDA are graphs; set executor=serial, or accumulate=1."
            )
    return Choices(device, choose_precision(precision, device), executor)


def accumulates(settings: RunSettings, executor: str, device: torch.device) -> bool:
    """Return whether an executor can add the gradients of as many micro-batches as the settings say."""
    return settings.accumulate == 1 or device.type == "cpu" or executor == SerialExecutor.NAME


@dataclass(frozen=True)
class StopConditions:
    """The conditions that stop a run, and which model it then returns. The first one met stops it; one must be set.

    `after_round` and `after_evaluation` return the name of the field that stops the run, or None to go on.
    """

    max_epochs: float | None = setting(None, "stop after this many epochs", above=0)
    max_samples: int | None = setting(None, "stop after this many samples", minimum=1)
    max_time_s: float | None = setting(None, "stop after this many seconds of training, without evaluation", above=0)
    max_rounds: int | None = setting(None, "stop after this many rounds (one step per learner each)", minimum=1)
    target_accuracy: float | None = setting(None, "stop at this accuracy, between 0 and 1", above=0, maximum=1)
    target_loss: float | None = setting(None, "stop at this loss or below", minimum=0)
    patience: int | None = setting(
        None, "stop after this many evaluations in a row that were not the best yet; returns the best model", minimum=1
    )
    restore_best: bool = setting(False, "return and save the model of the best evaluation, not the last one")

    def __post_init__(self) -> None:
        check(self)
        values = {field.name: getattr(self, field.name) for field in fields(StopConditions)}
        del values["restore_best"]
        if all(value is None for value in values.values()):
            raise UserError(f"a run needs an end, got none; set one of {', '.join(values)}.")

    @property
    def returns_best(self) -> bool:
        """Whether the run returns the model of its best evaluation, not the last one."""
        return self.restore_best or self.patience is not None

    def check_measured(self, has_data: bool, has_accuracy: Callable[[], bool]) -> None:
        """Raise UserError if something is set that nothing measures, such as a target that could never be reached."""
        asked = (self.target_accuracy, self.target_loss, self.patience, self.restore_best or None)
        if not has_data and any(value is not None for value in asked):
            raise UserError(
                "target_accuracy, target_loss, patience and restore_best go by evaluations, got neither test_data nor "
                "validation_data; give one of them."
            )
        if self.target_accuracy is not None and not has_accuracy():
            raise UserError(
                f"target_accuracy={self.target_accuracy:g} is for outputs [batch, classes] with a class for each "
                "sample, and this task has no such accuracy; set target_loss, and measure what you like by metrics."
            )

    def after_round(
        self, samples_seen: float, samples_per_epoch: int, train_time_s: float, num_rounds: int = 0
    ) -> str | None:
        """Return which of `max_epochs`, `max_samples`, `max_time_s` and `max_rounds` is reached, or None."""
        if self.max_epochs is not None and samples_seen >= self._epoch_samples(self.max_epochs, samples_per_epoch):
            return "max_epochs"
        if self.max_samples is not None and samples_seen >= self.max_samples:
            return "max_samples"
        if self.max_time_s is not None and train_time_s >= self.max_time_s:
            return "max_time_s"
        if self.max_rounds is not None and num_rounds >= self.max_rounds:
            return "max_rounds"
        return None

    def after_evaluation(self, accuracy: float | None, loss: float | None, num_stale: int = 0) -> str | None:
        """Return which of `target_accuracy`, `target_loss` and `patience` is reached after an evaluation, if any.

        The last `num_stale` evaluations were not the best yet.
        """
        if self.target_accuracy is not None and accuracy is not None and accuracy >= self.target_accuracy:
            return "target_accuracy"
        if self.target_loss is not None and loss is not None and loss <= self.target_loss:
            return "target_loss"
        if self.patience is not None and num_stale >= self.patience:
            return "patience"
        return None

    def planned_samples(self, samples_per_epoch: int) -> int | None:
        """Return the samples at which `max_epochs` or `max_samples` ends the run; None if neither is set."""
        limits = [] if self.max_samples is None else [self.max_samples]
        if self.max_epochs is not None:
            limits.append(self._epoch_samples(self.max_epochs, samples_per_epoch))
        return min(limits, default=None)

    @staticmethod
    def _epoch_samples(epochs: float, samples_per_epoch: int) -> int:
        return max(1, round(epochs * samples_per_epoch))
