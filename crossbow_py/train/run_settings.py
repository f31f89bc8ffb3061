"""The top-level keys that shape a run, and what `auto` becomes on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import prepare_environment
from crossbow_py.core.settings import check, setting
from crossbow_py.engine.device.freed_memory import keep_freed_memory
from crossbow_py.engine.executors import EXECUTORS, check_executor, check_name
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import Precision, PrecisionName, choose_device, choose_precision


@dataclass(frozen=True)
class JobSettings:
    """How models are trained, be it a run's learners or a search's trials."""

    GROUP: ClassVar[str] = ""

    batch_size: int = setting(16, "samples a learner takes per round", minimum=1)
    executor: str = setting(
        "auto",
        "how learners run: auto (the fastest), serial, fused; on CPU threads, and fused_threads, which is a group of "
        "fused learners a thread; on CUDA and experimental streams, and "
        "subarrays2 or subarrays4, which are that many groups of fused learners on streams",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where they run: auto, cpu or cuda")
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
    order_seed: int | None = setting(
        None, "seed of the sample order alone; null is seed", minimum=0, maximum=2**63 - 1
    )
    label_smoothing: float = setting(
        0.0, "share of the target spread over all classes, in the cross-entropy that is trained on", minimum=0, below=1
    )

    def __post_init__(self) -> None:
        check(self)
        check_name(self.executor)

    @property
    def sample_order_seed(self) -> int:
        """The seed of the order of samples."""
        return self.seed if self.order_seed is None else self.order_seed


@dataclass(frozen=True)
class RunSettings(JobSettings):
    """The top-level keys of a run that shape its training. Checked alike from Python and the command line."""

    num_learners: int | Literal["auto"] = setting(
        "auto",
        "learners (replicas trained side by side) per device; auto finds the fastest number",
        minimum=1,
        maximum=16_384,  # each has a module of its own: more take minutes to set up
    )
    max_learners: int = setting(8, "most learners that num_learners=auto may take per device", minimum=1)
    compile_model: bool = setting(
        False, "run learners' models through torch.compile first (serial, threads, streams); takes up to minutes"
    )
    on_nonfinite: Literal["stop", "reseed"] = setting(
        "stop", "a learner whose loss is not finite: stop the run, or reseed it from the average model"
    )
    learning_statistics: bool = setting(
        False, "measure gradient noise scale, sharpness and agreement of learners at the end of every epoch"
    )

    @classmethod
    def of(cls, values: Mapping[str, Any], **own: Any) -> RunSettings:
        """Return those among `values` that are settings of a run, and `own`; others keep their defaults."""
        names = [field.name for field in dataclasses.fields(RunSettings)]
        return RunSettings(**{name: values[name] for name in names if name in values} | own)

    @property
    def first_learners(self) -> int:
        """How many a run begins with: the auto-tuner starts from one."""
        return 1 if self.num_learners == "auto" else self.num_learners

    @property
    def several(self) -> bool:
        """Whether there may be more than one learner."""
        return self.num_learners == "auto" or self.num_learners > 1


@dataclass(frozen=True)
class Choices:
    """What `auto` became: kept in checkpoints, so that a resume takes the same.

    `executor` is `auto` until the candidates have been measured.
    """

    device: torch.device
    precision: Precision
    executor: str

    def to_plain(self) -> dict[str, str]:
        """Plain values for a checkpoint."""
        return {"device": self.device.type, "precision": self.precision.name, "executor": self.executor}


def choose(settings: RunSettings, saved: Mapping[str, Any] | None, num_ranks: int = 1) -> Choices:
    """Resolve `auto` but for the executor: as a checkpoint says when there is one, else for this machine.

    A learner alone on a CPU that averages with those of other ranks has a thread for that, to go on meanwhile.

    Raises UserError for what this machine cannot do.
    """
    saved = saved or {}
    chosen = EXECUTORS.get(settings.executor)
    if chosen is not None and issubclass(chosen, StreamsExecutor) and torch.cuda.is_available():
        prepare_environment()
    device = choose_device(saved.get("device", "auto") if settings.device == "auto" else settings.device)
    if device.type == "cpu" and settings.several:
        keep_freed_memory()
    precision = saved.get("precision", "auto") if settings.precision == "auto" else settings.precision
    executor = saved.get("executor", "auto") if settings.executor == "auto" else settings.executor
    if executor == "auto" and not settings.several and device.type == "cpu":
        executor = "serial" if num_ranks == 1 else "threads"  # there is nothing to run side by side
    if executor != "auto":
        check_executor(executor, device)
        if settings.compile_model and EXECUTORS[executor].FUSES:
            raise UserError(
                f"compile_model=true is for executors that run one model after another, got executor={executor}; "
                "set compile_model=false, or another executor."
            )
    return Choices(device, choose_precision(precision, device), executor)
