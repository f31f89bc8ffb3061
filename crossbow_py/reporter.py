"""From the run's state to what listeners see: run facts, progress, epoch records and the summary."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import crossbow_py.version
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.evaluation import Evaluation
from crossbow_py.run_state import RunState
from crossbow_py.telemetry.events import EpochRecord, Listener, Progress, RunInfo, Summary
from crossbow_py.telemetry.throughput import ThroughputMeter

_PROGRESS_EVERY_S = 0.2


class Reporter:
    """Fans out to listeners. Called from the training loop's thread, with the executor drained where it reads rows."""

    def __init__(
        self, listeners: Sequence[Listener], meter: ThroughputMeter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.listeners, self.meter, self._clock = listeners, meter, clock
        self.info: RunInfo
        self._next_progress_s = -math.inf
        self._started_s = clock()
        self._closed = False

    def start(self, info: RunInfo) -> None:
        """Announce the run."""
        self.info = info
        for listener in self.listeners:
            listener.on_start(info)

    def message(self, text: str) -> None:
        """Tell the user a decision."""
        for listener in self.listeners:
            listener.on_message(text)

    def checkpoint(self, path: str, samples_seen: int) -> None:
        """A checkpoint is on disk."""
        for listener in self.listeners:
            listener.on_checkpoint(path, samples_seen)

    def progress(self, state: RunState, learning_rate: float, num_learners: int) -> None:
        """A few times a second, nothing in between."""
        now = self._clock()
        if now < self._next_progress_s or not state.num_losses:
            return
        self._next_progress_s = now + _PROGRESS_EVERY_S
        progress = Progress(
            samples_seen=state.samples_seen,
            epoch=state.samples_seen / self.info.num_train_samples,
            train_loss=state.train_loss,
            images_per_s=self.meter.recent_images_per_s,
            learning_rate=learning_rate,
            num_learners=num_learners,
            elapsed_s=self.meter.elapsed_s,
        )
        for listener in self.listeners:
            listener.on_progress(progress)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is evaluated."""
        for listener in self.listeners:
            listener.on_epoch(record)

    def summarize(
        self,
        state: RunState,
        status: str,
        stop_reason: str,
        final: Evaluation | None,
        model_path: str | None,
        extra: dict[str, Any],
    ) -> Summary:
        """Build the summary and announce the end."""
        info = self.info
        summary = Summary(
            experiment=info.experiment,
            status=status,
            stop_reason=stop_reason,
            device=info.device,
            executor=info.executor,
            precision=info.precision,
            averaging=info.averaging,
            model=info.model,
            data=info.data,
            num_learners=info.num_learners,
            num_devices=info.num_devices,
            batch_size=info.batch_size,
            epochs=state.samples_seen / info.num_train_samples,
            samples_seen=state.samples_seen,
            test_accuracy=final.accuracy if final else None,
            test_loss=final.loss if final else None,
            best_test_accuracy=state.best_accuracy,
            time_to_accuracy_s=state.time_to_accuracy_s,
            train_time_s=self.meter.elapsed_s,
            wall_time_s=self._clock() - self._started_s,
            images_per_s=self.meter.images_per_s,
            seed=info.seed,
            num_reseeded=state.num_reseeded,
            resumed_from=info.resumed_from,
            output_dir=info.output_dir,
            model_path=model_path,
            versions=versions(),
            extra=extra,
        )
        for listener in self.listeners:
            listener.on_end(summary)
        return summary

    def close(self) -> None:
        """Close every listener, once."""
        if not self._closed:
            self._closed = True
            for listener in self.listeners:
                listener.close()


def replica_spread(bank: ReplicaBank) -> float | None:
    """Root mean square over learners of |w_j − z| / |z|: how far the replicas stand from the average model."""
    if bank.num_learners == 1:
        return None
    squares = torch.zeros((), dtype=torch.float64)
    z = bank.trained(bank.z)
    for learner in range(bank.num_learners):
        distances = torch._foreach_norm(torch._foreach_sub(bank.trained(bank.weights, learner), z))
        squares += torch.stack(distances).double().square().sum().cpu()
    norm = torch.linalg.vector_norm(bank.z.storage).double().cpu()
    return float((squares / bank.num_learners).sqrt() / norm)


def correction_norm(bank: ReplicaBank) -> float | None:
    """|Σ_j c_j| of the last round that averaged."""
    return None if bank.num_learners == 1 else float(torch.linalg.vector_norm(bank.total.storage))


def versions() -> dict[str, str]:
    """Versions a result depends on."""
    return {
        "crossbow_py": crossbow_py.version.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
