"""The sides of comparisons of packs.

One model at a time: `default_loop`, PyTorch's tutorial loop; `tuned_single` (see bench/sides/tuned.py); `captured`, on
CUDA one model with a graph a step; `serial`, a pack of one by this project. Their images/s are those of any number of
models trained one after another. The others are packs: models that share one feed and never average
(`averaging=independent`), by the executor the side is named after; an image counts once for every model that took it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from experiments.bench.packs.models import BUILDS, classes_of, data_of
from experiments.bench.sides.side import Side
from experiments.bench.workloads import Workload, prepare_all

# Whose images these are, among the models that experiments/throughput knows.
_STANDS_FOR = {"cifar10": "resnet20", "mnist": "lenet"}
DEFAULT, TUNED, CAPTURED, SERIAL = "default_loop", "tuned_single", "captured", "serial"
# Every batch through one model after another, as it has to be when the answers are wanted together.
DEFAULT_ENSEMBLE = "default_ensemble"
# One model at a time; but for the last, images/s are those of any number of models, one after another.
ONE_AT_A_TIME = (DEFAULT, TUNED, CAPTURED, SERIAL, DEFAULT_ENSEMBLE)
# What others are compared with, where a panel has them.
BASES = (DEFAULT, TUNED, CAPTURED, DEFAULT_ENSEMBLE)
# Executors of packs with one intra-op thread a model, or a group of them.
ONE_THREAD = ("threads", "fused_threads")
Work = Literal["training", "inference", "layers"]


@dataclass(frozen=True)
class PackSide(Side):
    """A side whose models are independent: `averaging` is always none. `num_learners` is the number of models.

    `layers` is forward and backward alone, without an update.
    """

    averaging: str = "none"
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    work: Work = "training"

    @property
    def label(self) -> str:
        models = "" if self.num_learners == 1 and self.side in ONE_AT_A_TIME else f" K={self.num_learners}"
        return f"{self.side}{models} {self.precision} {self.work}"


def single(side: str, work: Work = "training") -> PackSide:
    return PackSide(side, 1, work=work)


def packed(executor: str, num_models: int, work: Work = "training") -> PackSide:
    return PackSide(executor, num_models, work=work)


@dataclass(frozen=True)
class PackWorkload(Workload):
    """A workload of one of the models that packs are made of."""

    def make_model(self) -> nn.Module:
        return BUILDS[self.model](self.image_shape, self.num_classes)

    def at(self, batch_size: int) -> PackWorkload:
        return replace(self, batch_size=batch_size)


def prepare_packs(models: Sequence[str], device: str, folder: Path) -> dict[str, PackWorkload]:
    """Load the images (once, for all) and leave them under `folder`; batches are of one image until told otherwise."""
    wanted = dict.fromkeys(_STANDS_FOR[data_of(model)] for model in models)
    found = prepare_all(list(wanted), 1, device, folder)
    return {model: _of(model, found[_STANDS_FOR[data_of(model)]]) for model in models}


def _of(model: str, workload: Workload) -> PackWorkload:
    changed = {"model": model, "num_classes": classes_of(model, workload.num_classes)}
    return PackWorkload(**{**vars(workload), **changed})
