"""The workloads simulated on GPUs, with their images/s on one of them. Estimates: no GPU has been measured."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.scaling.network import Network
from experiments.scaling.simulator import Tasks

GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# P of crossbow_py/models.
PARAMETERS = {"lenet": 431_080, "resnet32": 464_154, "vgg16": 14_986_698, "resnet50": 25_557_032}
SHOWN_COUNTS = (8, 16, 64, 256, 1024)  # in tables
HIDDEN_SHARE = 0.05  # of a round: averaging that takes no more of it counts as hidden

# A pass over memory runs at 4.3 TB/s (copy, H200) and begins 5 µs after it is asked for. Of a learner's correction, 30
# bytes a parameter: weights, gradients, z and momentum are read, weights, momentum, correction and bfloat16 shadow
# written. z's step moves 20. NCCL takes 16 of 132 multiprocessors while it runs. Learning varies by 2 % from round to
# round, GPUs do not differ: both are guesses, for which a table of what else they could be is made.
GPU: dict[str, float] = {
    "copy_bytes_per_s": 4.3e12,
    "launch_s": 5e-6,
    "correction_bytes": 30,
    "move_bytes": 20,
    "multiprocessors": 132,
    "cv": 0.02,
    "rank_cv": 0.0,
}
# DistributedDataParallel: buckets of 1 MiB first and then of 25 MiB; gradients can be sent during the backward pass,
# two thirds of learning.
SYNCHRONOUS: dict[str, float] = {"first_bucket_bytes": 2**20, "bucket_bytes": 25 * 2**20, "overlap": 2 / 3}


@dataclass(frozen=True)
class Workload:
    """A model and what one GPU with so many learners of it trains; and what follows from that."""

    name: str
    model: str
    batch_size: int
    num_learners: int
    images_per_s: float
    basis: str

    @property
    def parameters(self) -> int:
        return PARAMETERS[self.model]

    @property
    def images_a_round(self) -> int:
        return self.batch_size * self.num_learners

    @property
    def vector_bytes(self) -> int:
        """The bytes that are all-reduced: P values of float32."""
        return 4 * self.parameters

    def tasks(self) -> Tasks:
        """The tasks of one GPU. A round without averaging is what `images_per_s` says, corrections included."""
        correction_s = _pass_s(GPU["correction_bytes"] * self.num_learners * self.parameters)
        learning_s = self.images_a_round / self.images_per_s - correction_s
        assert learning_s > 0, f"{self.name}: corrections alone take longer than images_per_s allows"
        return Tasks(
            learning_s=learning_s,
            correction_s=correction_s,
            sum_s=_pass_s((self.num_learners + 1) * self.vector_bytes),
            move_s=_pass_s(GPU["move_bytes"] * self.parameters),
            cv=GPU["cv"],
            rank_cv=GPU["rank_cv"],
        )


def last_bucket_bytes(num_bytes: int) -> float:
    """The bytes of gradients of that size that are sent when the backward pass is over."""
    rest = num_bytes - SYNCHRONOUS["first_bucket_bytes"]
    return min(rest, SYNCHRONOUS["bucket_bytes"]) if rest > 0 else num_bytes


def slowdown(network: Network, num_gpus: int) -> float:
    """The share of its speed that learning loses to an all-reduce: it takes multiprocessors, and has them to itself."""
    return network.multiprocessors(num_gpus) / GPU["multiprocessors"]


def _pass_s(num_bytes: float) -> float:
    return GPU["launch_s"] + num_bytes / GPU["copy_bytes_per_s"]


_BEST = "published: PyTorch on one H200, at its best batch size"
# `images_per_s` is one GPU's with all its learners, gradient step included. "limit" is what bytes and operations allow
# an H200 in bfloat16, so averaging has the least to hide behind; "estimate" what the way it would be run should reach.
WORKLOADS = (
    Workload("ResNet-32 b=16 K=1", "resnet32", 16, 1, 18_000, "estimate: one learner as a CUDA graph, 15 to 21 k"),
    Workload("ResNet-32 b=16 K=4", "resnet32", 16, 4, 53_000, "estimate: graphs on streams, one kernel a microsecond"),
    Workload("ResNet-32 b=64 K=4", "resnet32", 64, 4, 474_000, "limit, fused across learners"),
    Workload("VGG-16 b=16 K=2", "vgg16", 16, 2, 76_000, "half of the limit of 152 k"),
    Workload("ResNet-50 b=16 K=2", "resnet50", 16, 2, 3_079, _BEST),
    Workload("ResNet-50 b=32 K=2", "resnet50", 32, 2, 3_079, _BEST),
    Workload("ResNet-50 b=16 K=2, fast", "resnet50", 16, 2, 7_006,
             "published: MLPerf, a GPU of an H100 system, at its best batch size"),
)  # fmt: skip
