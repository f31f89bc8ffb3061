"""What a run tells the outside: plain values, and the listener that receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

Images = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class RunInfo:
    """What is fixed when training starts.

    `planned_samples` is None when only accuracy, loss or time stop the run. `validates` says that validation data feeds
    stops and the best accuracy, `shares_samples` that learners split an epoch's samples instead of all seeing each.
    `num_workers` processes load the data; None where it lives on the device. `average_ema` is the horizon in epochs of
    the EMA of the average model that is evaluated and saved in its place, where one is. `averaging_settings` are words
    on how the rule differs from its defaults, and on what it makes of the learning rate. `replicas_differ` says that
    learners move apart from an average model, `has_accuracy` that classes are told apart, `several` that there may be
    more than one learner, `learning_statistics` that epochs have them. `hyper_parameters` are plain
    values by the dotted keys of the command line.
    """

    experiment: str
    model: str
    num_parameters: int
    data: str
    num_train_samples: int
    num_test_samples: int
    device: str
    executor: str
    precision: str
    averaging: str
    num_learners: int
    num_devices: int
    batch_size: int
    seed: int
    validates: bool = False
    shares_samples: bool = True
    samples_seen: int = 0
    planned_samples: int | None = None
    num_workers: int | None = None
    output_dir: str | None = None
    resumed_from: str | None = None
    trace_path: str | None = None
    average_ema: float | None = None
    averaging_settings: tuple[str, ...] = ()
    replicas_differ: bool = True
    has_accuracy: bool = True
    several: bool = True
    learning_statistics: bool = False
    hyper_parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Where training stands, a few times a second. `train_loss` is the running mean of the epoch.

    `remaining_s` is None when nothing planned ends the run. `data_wait_share` is the share of the last seconds in which
    nothing trained for want of data, `num_workers` how many processes load it; None for data that lives on the device.
    """

    samples_seen: int
    epoch: float
    train_loss: float
    images_per_s: float
    learning_rate: float
    num_learners: int
    elapsed_s: float
    remaining_s: float | None = None
    data_wait_share: float | None = None
    num_workers: int | None = None


@dataclass(frozen=True)
class RoundEnd:
    """What `fit(after_round=...)` is told of a round.

    Attributes:
        images: of all learners and ranks, in the round.
        elapsed_s: seconds of training since the run began, without pauses.
        waited_s: seconds of this call of `fit` in which nothing trained for want of data.
        num_learners: K of this rank.
        is_settled: whether the auto-tuner has found its number of learners; True where the number is fixed.
    """

    images: int
    elapsed_s: float
    waited_s: float
    num_learners: int
    is_settled: bool


@dataclass(frozen=True)
class LearnerCount:
    """A decision of the auto-tuner: `action` is grow, shrink or stay (settled), `reason` a sentence for the user."""

    action: str
    num_learners: int
    reason: str
    samples_seen: int
    elapsed_s: float


@dataclass(frozen=True)
class LearningStatistics:
    """How learning goes at the end of an epoch, of the average model z (the first learner where there is none).

    Attributes:
        gradient_noise_scale_samples: B_simple = tr(Σ) / |G|²; None where the noise hides the gradient.
        gradient_variance: tr(Σ) of gradients of single samples.
        squared_gradient_norm: |G|². Like tr(Σ) without bias; means of both over epochs make a steadier noise scale.
        agreement: share of samples on which two learners predict the same class, mean over pairs.
        sharpness: the largest eigenvalue of the Hessian of the training loss.
        measuring_s: what it took to measure them, which is no part of training.

    None is what cannot be measured.
    """

    gradient_noise_scale_samples: float | None
    gradient_variance: float | None
    squared_gradient_norm: float | None
    agreement: float | None
    sharpness: float | None
    measuring_s: float


@dataclass(frozen=True)
class EpochRecord:
    """One line of metrics.jsonl. Fields named `spread` and `correction_norm` are None without a central model.

    `num_non_finite` of the evaluated samples have outputs that are not finite, which count as wrong. `data_wait_share`
    and `num_workers` are as in `Progress`, the former of the epoch. `learning` is None unless asked for.
    """

    epoch: float
    samples_seen: int
    train_loss: float
    train_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    images_per_s: float
    num_learners: int
    learning_rate: float
    elapsed_s: float
    spread: float | None = None
    correction_norm: float | None = None
    learner_accuracy: tuple[float | None, ...] | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    images_per_s_per_device: float | None = None
    data_wait_share: float | None = None
    num_workers: int | None = None
    learning: LearningStatistics | None = None
    num_non_finite: int = 0


@dataclass(frozen=True)
class Predictions:
    """What the model that is evaluated says of N samples of the evaluation data, which are always the same.

    Attributes:
        images: uint8 [N, H, W, C] with one or three channels; of clips the middle frame.
        targets: [N], the right classes.
        predicted: [N], the classes of the highest probability.
        probabilities: [N], of the predicted ones.
        class_names: by class; empty, or shorter, where they are not known.
    """

    images: Images
    targets: tuple[int, ...]
    predicted: tuple[int, ...]
    probabilities: tuple[float, ...]
    class_names: tuple[str, ...] = ()

    def name(self, label: int) -> str:
        """What a class is called: its number, where nothing else is known."""
        return self.class_names[label] if 0 <= label < len(self.class_names) else str(label)


@dataclass(frozen=True)
class Summary:
    """summary.json: how the run ended. `status` is finished, target_reached, interrupted, terminated or failed.

    `data_wait_share` and `num_workers` as in `Progress`, the former of this process's training.
    """

    experiment: str
    status: str
    stop_reason: str
    device: str
    executor: str
    precision: str
    averaging: str
    model: str
    data: str
    num_learners: int
    num_devices: int
    batch_size: int
    epochs: float
    samples_seen: int
    test_accuracy: float | None
    test_loss: float | None
    best_test_accuracy: float | None
    best_validation_accuracy: float | None
    time_to_accuracy_s: float | None
    train_time_s: float
    wall_time_s: float
    images_per_s: float
    seed: int
    num_reseeded: int
    resumed_from: str | None
    output_dir: str | None
    model_path: str | None
    learner_test_accuracy: tuple[float | None, ...] | None = None
    data_wait_share: float | None = None
    num_workers: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    num_non_finite: int = 0
    model_sha256: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Listener:
    """Hooks a run calls; every one is a no-op to override. Called from the training loop's thread only.

    Attributes:
        BLOCKS: whether `on_progress` may take seconds, which then do not count as training.
    """

    BLOCKS: ClassVar[bool] = False

    def on_start(self, info: RunInfo) -> None:
        """Training is about to start (or to go on, when `info.resumed_from` is set)."""

    def on_progress(self, progress: Progress) -> None:
        """A few times a second."""

    def on_epoch(self, record: EpochRecord) -> None:
        """An epoch is closed and evaluated."""

    def on_predictions(self, predictions: Predictions, samples_seen: int) -> None:
        """An evaluation of images that are classified has more to show than figures: ever further apart, and last."""

    def on_learner_count(self, change: LearnerCount) -> None:
        """The auto-tuner decided about the number of learners."""

    def on_message(self, message: str) -> None:
        """A sentence for the user: a decision taken, a restart, a reseed, a checkpoint fallen back to."""

    def on_checkpoint(self, path: str, samples_seen: int) -> None:
        """A checkpoint is whole on disk."""

    def on_end(self, summary: Summary) -> None:
        """The run ended, after an error too if training had started; `summary.status` says how."""

    def take_notes(self) -> list[str]:
        """Sentences for the user that came up since the last call; asked for after every hook."""
        return []

    def close(self) -> None:
        """Release files and the terminal. Called once, also after an error; must not raise."""
