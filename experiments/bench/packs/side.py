"""The sides of comparisons of packs.

One model at a time: `default_loop`, PyTorch's tutorial loop; `tuned_single` (see bench/sides/tuned.py); `captured`, on
CUDA one model with a graph a step; `serial`, a pack of one by this project. Their images/s are those of any number of
models trained one after another. The others are packs: models that share one feed and never average
(`averaging=independent`), by the executor the side is named after; an image counts once for every model that took it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiments.bench.sides.side import Side

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

    `layers` is forward and backward alone, without an update. A `mixed` side has half of its models from either of two
    families, each half a pack of its own.
    """

    averaging: str = "none"
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    work: Work = "training"
    mixed: bool = False

    @property
    def label(self) -> str:
        models = "" if self.num_learners == 1 and self.side in ONE_AT_A_TIME else f" K={self.num_learners}"
        return f"{'mixed ' if self.mixed else ''}{self.side}{models} {self.precision} {self.work}"


def single(side: str, work: Work = "training") -> PackSide:
    return PackSide(side, 1, work=work)


def packed(executor: str, num_models: int, work: Work = "training", *, mixed: bool = False) -> PackSide:
    return PackSide(executor, num_models, work=work, mixed=mixed)
