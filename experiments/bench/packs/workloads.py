"""The workloads of comparisons of packs: a model by name, and real images where they are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from experiments.bench.packs.models import BUILDS, classes_of, data_of
from experiments.bench.workloads import Workload, prepare_all

# Whose images these are, among the models that experiments/throughput knows.
_STANDS_FOR = {"cifar10": "resnet20", "mnist": "lenet"}


@dataclass(frozen=True)
class PackWorkload(Workload):
    """A workload of one of the models that packs are made of.

    `partner` trains beside it in a mixed pack, and is None in all others.
    """

    partner: PackWorkload | None = None

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
