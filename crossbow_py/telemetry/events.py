"""The events of a run: plain values, and the listener that receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.telemetry.class_counts import ClassCounts, ClassFigures
from crossbow_py.telemetry.learners import LearnerFigures
from crossbow_py.telemetry.rank_pace import RankPace, RankSpread

Images = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class RunInfo:
    """The facts that are fixed when training starts.

    Attributes:
        validates: whether stops and the best accuracy use validation data.
        shares_samples: whether learners split an epoch's samples; else each sees all of them.
        planned_samples: None if only accuracy, loss or time stop the run.
        num_workers: processes that load the data; None for data that lives on the device.
        average_ema: horizon in epochs of the EMA of the average model that is evaluated and saved instead of it.
        averaging_settings: texts on how the rule differs from its defaults, and how it scales the learning rate.
        replicas_differ: whether learners differ from an average model.
        has_accuracy: whether the targets are classes.
        several: whether there may be more than one learner.
        learning_statistics: whether epochs have them.
        tokens_per_sample: tokens with a target of their own, in each sample of a language model; else None.
        measures_noise: whether gradients are compared in training, so that there is an `efficiency`.
        metrics: names of the metrics of evaluations, each of which may have several values: `name`, or `name/...`.
        hyper_parameters: plain values by the dotted keys of the command line.
        learner_settings: the optimizer's settings of which independent learners have each their own, by name.
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
    accumulate: int = 1
    learning_statistics: bool = False
    tokens_per_sample: int | None = None
    measures_noise: bool = False
    metrics: tuple[str, ...] = ()
    hyper_parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    learner_settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The progress of training, a few times a second. `train_loss` is the running mean of the epoch.

    `remaining_s` is None if no planned number of samples ends the run. `data_wait_share` is the share of the last
    seconds in which training waited for data; `num_workers` processes load it, None for data on the device.
    `efficiency` is what a sample is worth in so large a batch, to one of a single learner, by the gradient noise scale
    in training; both are None where they are not known, the scale also where noise hides the gradient. `tokens_per_s`
    is None but for language models. With several ranks `ranks` has the pace of each over the last seconds, in rank
    order, and `gpus` the load of the GPUs of all nodes by tags in TensorBoard; empty where they are not known.
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
    noise_scale_samples: float | None = None
    efficiency: float | None = None
    tokens_per_s: float | None = None
    ranks: tuple[RankPace, ...] = ()
    gpus: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundEnd:
    """The event of a round, for `fit(after_round=...)`.

    Attributes:
        images: images of all learners and ranks in the round.
        elapsed_s: seconds of training since the run began, without pauses.
        waited_s: seconds of this call of `fit` in which training waited for data.
        num_learners: K, the learners of this rank.
        is_settled: whether the auto-tuner has settled on a number of learners; True if the number is fixed.
        in_effect: what the round ran with: graphs, and kernels by their names.
    """

    images: int
    elapsed_s: float
    waited_s: float
    num_learners: int
    is_settled: bool
    in_effect: tuple[str, ...] = ()


@dataclass(frozen=True)
class LearnerCount:
    """A decision of `source`: `action` is grow, shrink or stay (settled), `reason` a sentence for the user."""

    action: str
    num_learners: int
    reason: str
    samples_seen: int
    elapsed_s: float
    source: str = "auto-tuner"


@dataclass(frozen=True)
class LearningStatistics:
    """Statistics of learning at the end of an epoch, of the average model z (the first learner if there is no z).

    A value that cannot be measured is None.

    Attributes:
        gradient_noise_scale_samples: B_simple = tr(Σ) / |G|²; None if the noise hides the gradient.
        gradient_variance: tr(Σ) of the gradients of single samples.
        squared_gradient_norm: |G|². Like tr(Σ) unbiased; averaging both over epochs gives a steadier noise scale.
        agreement: the share of samples on which two learners predict the same class, averaged over pairs.
        sharpness: the largest eigenvalue of the Hessian of the training loss.
        measuring_s: seconds that the measurement took, which do not count as training.
    """

    gradient_noise_scale_samples: float | None
    gradient_variance: float | None
    squared_gradient_norm: float | None
    agreement: float | None
    sharpness: float | None
    measuring_s: float


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """A line of metrics.jsonl, with its keys in this order.

    Fields named `spread` and `correction_norm` are None without a central model.
    `z_accuracy` is the accuracy of z itself, on the same data, where an EMA of it is evaluated.
    `num_non_finite` evaluated samples have outputs that are not finite, and count as wrong. `data_wait_share`, here of
    the epoch, `num_workers`, `noise_scale_samples`, `efficiency` and `tokens_per_s` are as in `Progress`. `learning` is
    None unless the user asked for it. `learner_accuracy` and `learner_loss` are those of independent learners, on the
    data that are evaluated. `ranks` is of the epoch; None with one rank.
    """

    epoch: float
    samples_seen: int
    train_loss: float
    test_loss: float | None
    test_accuracy: float | None
    images_per_s: float
    num_learners: int
    learning_rate: float
    elapsed_s: float
    train_accuracy: float | None
    spread: float | None = None
    correction_norm: float | None = None
    learner_accuracy: tuple[float | None, ...] | None = None
    learner_loss: tuple[float, ...] | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    images_per_s_per_device: float | None = None
    data_wait_share: float | None = None
    num_workers: int | None = None
    learning: LearningStatistics | None = None
    num_non_finite: int = 0
    noise_scale_samples: float | None = None
    efficiency: float | None = None
    z_accuracy: float | None = None
    tokens_per_s: float | None = None
    ranks: RankSpread | None = None


@dataclass(frozen=True)
class Predictions:
    """The evaluated model's predictions for N samples of the evaluation data, which are always the same.

    Attributes:
        images: uint8 [N, H, W, C] with one or three channels; the middle frame of clips.
        targets: [N], the right classes.
        predicted: [N], the classes of the highest probability.
        probabilities: [N], the probabilities of the predicted classes.
        class_names: names by class; empty, or shorter, if they are not known.
    """

    images: Images
    targets: tuple[int, ...]
    predicted: tuple[int, ...]
    probabilities: tuple[float, ...]
    class_names: tuple[str, ...] = ()

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if the name is unknown."""
        return self.class_names[label] if 0 <= label < len(self.class_names) else str(label)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """summary.json, with its keys in this order: how the run ended.

    `status` is finished, target_reached, interrupted, terminated or failed.
    `data_wait_share` and `num_workers` as in `Progress`, the former of this process's training. `per_class` are the
    figures of every class on the test data, for at most a thousand classes. `model_epoch` is `epochs`, or smaller if
    the run returns the model of its best evaluation. `learners` are those of a run without averaging. `ranks` and
    `per_rank` are of this process's training, None with one rank. `hanging_ranks` are those that ended the run; None if
    none did.
    """

    experiment: str
    status: str
    device: str
    executor: str
    precision: str
    num_learners: int
    num_devices: int
    batch_size: int
    epochs: float
    samples_seen: int
    test_accuracy: float | None
    best_test_accuracy: float | None
    time_to_accuracy_s: float | None
    train_time_s: float
    wall_time_s: float
    images_per_s: float
    seed: int
    resumed_from: str | None
    versions: dict[str, str] = field(default_factory=dict)
    stop_reason: str
    averaging: str
    model: str
    data: str
    test_loss: float | None
    best_validation_accuracy: float | None
    num_reseeded: int
    output_dir: str | None
    model_path: str | None
    learner_test_accuracy: tuple[float | None, ...] | None = None
    learners: tuple[LearnerFigures, ...] | None = None
    data_wait_share: float | None = None
    num_workers: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    per_class: tuple[ClassFigures, ...] | None = None
    num_non_finite: int = 0
    model_sha256: dict[str, str] = field(default_factory=dict)
    model_epoch: float | None = None
    tokens_per_s: float | None = None
    ranks: RankSpread | None = None
    per_rank: tuple[RankPace, ...] | None = None
    hanging_ranks: tuple[HangingRank, ...] | None = None


class Listener:
    """Hooks that a run calls from the training loop's thread. Each is a no-op to override.

    Attributes:
        BLOCKS: whether `on_progress` may take seconds, which then do not count as training.
        ONLY_FIRST_RANK: whether only the first of several ranks calls it, as what records a run once.
    """

    BLOCKS: ClassVar[bool] = False
    ONLY_FIRST_RANK: ClassVar[bool] = False

    def on_start(self, info: RunInfo) -> None:
        """Called before training starts, or resumes if `info.resumed_from` is set."""

    def on_progress(self, progress: Progress) -> None:
        """Called a few times a second."""

    def on_epoch(self, record: EpochRecord) -> None:
        """Called when an epoch is closed and evaluated."""

    def on_predictions(self, predictions: Predictions, samples_seen: int) -> None:
        """Called with example predictions of classified images, ever more rarely, and after the last evaluation."""

    def on_class_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        """Called with the confusion matrix of the `which` ("test" or "validation") data, as often as predictions."""

    def on_learner_count(self, change: LearnerCount) -> None:
        """Called when the auto-tuner has decided about the number of learners."""

    def on_message(self, message: str) -> None:
        """Called with a sentence for the user: a decision, a restart, a reseed, a fallback to a checkpoint."""

    def on_checkpoint(self, path: str, samples_seen: int) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_end(self, summary: Summary) -> None:
        """Called when the run ends, also by an error if training had started; `summary.status` says how."""

    def take_notes(self) -> list[str]:
        """Return the sentences for the user since the last call. Called after every hook."""
        return []

    def close(self) -> None:
        """Release files and the terminal. Called once, also after an error. Must not raise."""


class NotingListener(Listener):
    """A listener with sentences of its own for the user: it adds them to `_notes`."""

    _notes: tuple[str, ...] = ()

    def take_notes(self) -> list[str]:
        notes, self._notes = list(self._notes), ()
        return notes
