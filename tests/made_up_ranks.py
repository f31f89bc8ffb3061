"""Folders of runs of many ranks, as a run's own listeners write them, of events that are made up. Nothing is trained.

    python -m tests.made_up_ranks 8 FOLDER    # for pictures: docs/screenshots.py

A rank is the slowest of all from the middle of the run on, another one waits for data now and then.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.rank_pace import RankCounts, RankMeter, spread_of
from crossbow_py.telemetry.records import file_listeners, node_listeners
from crossbow_py.telemetry.system import SystemMonitor, gpu_load, job_sample
from tests.unit.telemetry.conftest import Events

GIB = 2**30
GPUS_OF_A_NODE = 8
STEP_S = 0.1  # of a round of a usual rank
SLOW_RANK, SLOWER = 5, 1.2  # which is slow in the second half, and how many times a usual rank's time it takes
ROUNDS_BETWEEN, SAMPLES_OF_A_RANK = 10, 128
EPOCHS, SYNCHRONISATIONS = 4, 200


class ManyGpus:
    """NVML with GPUs by number: `GPU-3` is the third. `percents`, by number, is set from outside."""

    class NVMLError(Exception):
        """What is raised for a GPU that is not there."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, num_gpus: int) -> None:
        self.percents = [0.0] * num_gpus

    def nvmlInit(self) -> None:
        """Need nothing."""

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        number = int(uuid.removeprefix("GPU-"))
        if number >= len(self.percents):
            raise self.NVMLError("Not Found")
        return number

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=round(self.percents[handle]))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=round((40 + handle / 4) * GIB))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return round(1000 * (100 + 5 * self.percents[handle]))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return round(35 + self.percents[handle] / 3)


def host_of(rank: int) -> str:
    """The name of a rank's host."""
    return f"gpu-{rank // GPUS_OF_A_NODE}"


class Job:
    """The counts of all ranks, and the load of their GPUs, after some rounds."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.elapsed_s = num_ranks, 0.0
        self._random = random.Random(0)
        self._data_s, self._rank_s = [0.0] * num_ranks, [0.0] * num_ranks
        self.nvml = ManyGpus(num_ranks)

    def run(self, rounds: int, second_half: bool) -> None:
        """Go on by some rounds, each as long as its slowest rank takes."""
        own = [STEP_S * self._random.gauss(1.0, 0.01) for _ in range(self.num_ranks)]
        if second_half:
            own[SLOW_RANK] *= SLOWER
        waits = [0.0] * self.num_ranks
        if self._random.random() < 0.1:
            waits[2] = 0.05 * STEP_S
        step_s = max(map(sum, zip(own, waits, strict=True)))
        for rank in range(self.num_ranks):
            self._data_s[rank] += rounds * waits[rank]
            self._rank_s[rank] += rounds * (step_s - own[rank] - waits[rank])
            self.nvml.percents[rank] = 97 * own[rank] / step_s
        self.elapsed_s += rounds * step_s

    def counts(self) -> list[RankCounts]:
        return [RankCounts(self.elapsed_s, *each) for each in zip(self._data_s, self._rank_s, strict=True)]


def write_job(folder: Path, num_ranks: int, synchronisations: int = SYNCHRONISATIONS) -> Path:
    """Write what the first rank of every node writes of a run of four epochs."""
    job = Job(num_ranks)
    meter = RankMeter([host_of(rank) for rank in range(num_ranks)], None, waits_for_data=True)
    nodes = [range(first, min(first + GPUS_OF_A_NODE, num_ranks)) for first in range(0, num_ranks, GPUS_OF_A_NODE)]
    monitors = [SystemMonitor([f"GPU-{rank}" for rank in node], nvml=job.nvml) for node in nodes]
    folder.mkdir(parents=True)
    listeners = list(file_listeners(folder, None, monitors[0]))
    for number, (node, monitor) in enumerate(zip(nodes[1:], monitors[1:], strict=True), start=1):
        listeners += node_listeners(folder, None, monitor, f"node_{number}_{host_of(node[0])}")
    of_a_round = num_ranks * SAMPLES_OF_A_RANK
    planned = synchronisations * ROUNDS_BETWEEN * of_a_round
    info = Events.run_info(
        experiment="resnet50", model="resnet50", data="imagenet", device="cuda:0", executor="fused", num_learners=4,
        batch_size=32, num_devices=num_ranks, num_workers=8, num_train_samples=planned // EPOCHS,
        planned_samples=planned, output_dir=str(folder),
    )  # fmt: skip
    _tell(listeners, "on_start", info)
    for index in range(synchronisations):
        meter.update(job.counts(), index * ROUNDS_BETWEEN, index * ROUNDS_BETWEEN * of_a_round)
        job.run(ROUNDS_BETWEEN, second_half=index >= synchronisations // 2)
        _tell_progress(listeners, job, meter, monitors, index + 1, synchronisations)
    paces = meter.whole
    last = Events.summary(
        num_devices=num_ranks, samples_seen=planned, epochs=EPOCHS, ranks=spread_of(paces), per_rank=paces,
        train_time_s=job.elapsed_s, images_per_s=planned / job.elapsed_s, output_dir=str(folder),
    )  # fmt: skip
    _tell(listeners, "on_end", last)
    for listener in listeners:
        listener.close()
    return folder


def _tell_progress(
    listeners: list[Listener], job: Job, meter: RankMeter, monitors: list[SystemMonitor], done: int, planned: int
) -> None:
    """Announce what is known once so many synchronisations of those planned are over, and an epoch at its end."""
    samples, share = done * ROUNDS_BETWEEN * job.num_ranks * SAMPLES_OF_A_RANK, done / planned
    figures: dict[str, Any] = {
        "train_loss": 0.7 + 6 * 0.02**share, "images_per_s": samples / job.elapsed_s, "num_learners": 4,
        "num_workers": 8, "elapsed_s": job.elapsed_s, "data_wait_share": 0.01,
    }  # fmt: skip
    gpus = job_sample([gpu_load(monitor.newest) for monitor in monitors])
    progress = Events.progress(samples, epoch=EPOCHS * share, ranks=meter.recent, gpus=gpus, **figures)
    _tell(listeners, "on_progress", progress)
    if done % (planned // EPOCHS) == 0:
        record = Events.epoch_record(
            done * EPOCHS // planned, samples_seen=samples, test_loss=0.8 + 6 * 0.02**share, train_accuracy=0.8 * share,
            test_accuracy=0.75 * share**0.5, spread=0.1 * (1 - share / 2), ranks=spread_of(meter.lap()),
            **figures,
        )  # fmt: skip
        _tell(listeners, "on_epoch", record)


def _tell(listeners: Sequence[Listener], hook: str, event: Any) -> None:
    for listener in listeners:
        getattr(listener, hook)(event)


if __name__ == "__main__":
    write_job(Path(sys.argv[2]), int(sys.argv[1]))
