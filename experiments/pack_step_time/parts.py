"""The panels of each part of packs' step time: families, two of them side by side, and the limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from experiments.bench.packs.comparison import PackCell
from experiments.bench.packs.models import FIVE_LAYERS_WIDTHS, MLP_UNITS
from experiments.bench.packs.running import executors_on, one_at_a_time
from experiments.bench.packs.side import CAPTURED, DEFAULT, TUNED, packed, single
from experiments.bench.packs.workloads import PackWorkload

LIMIT_MODELS = 4
LARGER_BATCHES = (4, 16, 64, 256)
LARGER_MODELS = {
    "five_layers": tuple(f"five_layers_{width}" for width in FIVE_LAYERS_WIDTHS),
    "mlp": tuple(f"mlp_{units}" for units in MLP_UNITS),
}

Workloads = Mapping[str, PackWorkload]
Panel = list[PackCell]


@dataclass(frozen=True)
class Plan:
    """Names of models, how many of them are packed, and how many images a batch has."""

    families: Sequence[str] = ("resnet20", "mobilenet", "densenet40", "mlp")
    num_models: Sequence[int] = (2, 4, 8, 16)
    batch_size: int = 16

    @property
    def mixed_models(self) -> int:
        """Models of a mixed pack, half of them from either family."""
        return max(2, max(self.num_models) // 4)


def family_panels(plan: Plan, workloads: Workloads, device: str) -> list[Panel]:
    """A panel a family: one model at a time, and packs of every size."""
    return [
        [*_singles(workload, device), *(cell for count in plan.num_models for cell in _packs(workload, count, device))]
        for workload in (workloads[family].at(plan.batch_size) for family in plan.families)
    ]


def mixed_panels(plan: Plan, workloads: Workloads, device: str) -> list[Panel]:
    """A panel a pair of neighbouring families: either alone, one model at a time and packed, and both side by side."""
    panels = []
    for pair in pairwise(plan.families):
        each = [workloads[family].at(plan.batch_size) for family in pair]
        alone = [
            cell for workload in each for cell in (*_bases(workload), *_packs(workload, plan.mixed_models // 2, device))
        ]
        both = replace(each[0], partner=each[1])
        together = [
            PackCell(packed(executor, plan.mixed_models, mixed=True), both) for executor in executors_on(device)
        ]
        panels.append([*alone, *together])
    return panels


def limit_panels(plan: Plan, workloads: Workloads, device: str) -> list[Panel]:
    """Packs of a few models, with larger batches and with wider layers: a panel each."""
    count = min(LIMIT_MODELS, max(plan.num_models))
    larger = [workloads[model].at(size) for model in LARGER_MODELS for size in LARGER_BATCHES]
    wider = [workloads[model].at(plan.batch_size) for models in LARGER_MODELS.values() for model in models]
    return [[*_bases(workload), *_packs(workload, count, device)] for workload in (*larger, *wider)]


def models_of(part: str, plan: Plan) -> list[str]:
    if part != "limits":
        return list(plan.families)
    return [*LARGER_MODELS, *(model for models in LARGER_MODELS.values() for model in models)]


PARTS: dict[str, Callable[[Plan, Workloads, str], list[Panel]]] = {
    "families": family_panels,
    "mixed": mixed_panels,
    "limits": limit_panels,
}


def _singles(workload: PackWorkload, device: str) -> Panel:
    return [PackCell(single(side), workload) for side in one_at_a_time(device)]


def _bases(workload: PackWorkload) -> Panel:
    sides = (DEFAULT, TUNED, CAPTURED) if workload.device == "cuda" else (DEFAULT, TUNED)
    return [PackCell(single(side), workload) for side in sides]


def _packs(workload: PackWorkload, num_models: int, device: str) -> Panel:
    return [PackCell(packed(executor, num_models), workload) for executor in executors_on(device)]
