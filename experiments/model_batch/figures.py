"""The figures of ModelBatch that are made again here, its future work beside them, and the panels of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.bench.packs.comparison import PackCell
from experiments.bench.packs.running import executors_on, one_at_a_time, predictors_on
from experiments.bench.packs.side import DEFAULT, DEFAULT_ENSEMBLE, TUNED, PackSide, Work, packed, single
from experiments.bench.packs.workloads import PackWorkload


@dataclass(frozen=True)
class ModelBatchFigure:
    """A figure: how many of which model, what they do, and over which batch sizes."""

    title: str
    model: str
    num_models: int
    work: Work
    batch_sizes: tuple[int, ...]


_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_FEWER = (1, 4, 16, 64)
FIGURES = {
    "layers": ModelBatchFigure(
        "figure 2: forward and backward of fully connected layers", "layer", 64, "layers", (*_BATCH_SIZES, 256)
    ),
    "training": ModelBatchFigure("figure 4: training five-layer networks", "five_layers", 16, "training", _BATCH_SIZES),
    "inference": ModelBatchFigure(
        "figure 4: inference by five-layer networks", "five_layers", 16, "inference", _BATCH_SIZES
    ),
    "mlp_training": ModelBatchFigure("training MLPs", "mlp", 16, "training", _BATCH_SIZES),
    "mlp_inference": ModelBatchFigure("inference by MLPs", "mlp", 16, "inference", _BATCH_SIZES),
    "lstm": ModelBatchFigure("future work: training LSTMs on rows of digits", "lstm", 16, "training", _FEWER),
    "gru": ModelBatchFigure("future work: training GRUs on rows of digits", "gru", 16, "training", _FEWER),
}


def sides_of(figure: ModelBatchFigure, device: str) -> list[PackSide]:
    if figure.work == "layers":  # here all of the models are gone through in every tick
        return [PackSide(name, figure.num_models, work=figure.work) for name in (DEFAULT, TUNED, "fused")]
    training = figure.work == "training"
    singles = one_at_a_time(device) if training else (DEFAULT, TUNED)
    together = executors_on(device) if training else (DEFAULT_ENSEMBLE, *predictors_on(device))
    return [
        *(single(name, figure.work) for name in singles),
        *(packed(name, figure.num_models, figure.work) for name in together),
    ]


def panels_of(figure: ModelBatchFigure, workload: PackWorkload, batch_sizes: Sequence[int]) -> list[list[PackCell]]:
    sides = sides_of(figure, workload.device)
    return [[PackCell(side, workload.at(size)) for side in sides] for size in batch_sizes]
