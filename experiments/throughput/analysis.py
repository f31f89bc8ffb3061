"""The figures beside the suite's: a roofline for every model, and the update's GB/s beside a copy's.

Measured after the cells, in the suite's own process, when the sides' processes have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import PrecisionName
from experiments.throughput.roofline import roofline_of, roofline_text
from experiments.throughput.suite_report import best_row, main_batch_size, models, rows_of_model
from experiments.update_bandwidth.run import measure_update, result_text

# Seconds that all this takes, a model and for the update: rounds are counted, and on CUDA traced.
MODEL_S = {"cpu": 4.0, "cuda": 10.0}
UPDATE_S = 6.0
_UPDATE_LEARNERS = 4


def analysis_s(models: Sequence[str], device: str) -> float:
    return UPDATE_S + MODEL_S[device] * len(models)


def analyse(result: Mapping[str, Any], device: str, precision: PrecisionName) -> dict[str, Any]:
    """A roofline row a model, for its fastest fused cell, and the update of the largest model measured."""
    batch_size, rows = main_batch_size(result), []
    for model in models(result):
        best = best_row(rows_of_model(result, model), batch_size=batch_size, sides=["fused"])
        if best is not None:
            rows.append(
                roofline_of(model, batch_size, best["num_learners"], precision, best["images_per_s"], device)
            )
    largest = next((model for model in ("vgg16", "resnet50") if model in models(result)), models(result)[-1])
    try:
        update: dict[str, Any] | None = measure_update(largest, _UPDATE_LEARNERS, device, UPDATE_S / 2)
    except UserError as error:
        print(f"no GB/s of the update: {error}")
        update = None
    return {"roofline": rows, "update": update}


def analysis_text(result: Mapping[str, Any]) -> str:
    """Both tables; of an older result, which has none, nothing."""
    parts = []
    if result.get("roofline"):
        parts.append(f"**Limits** of the fastest fused cells\n\n{roofline_text(result['roofline'])}")
    if result.get("update"):
        parts.append(f"**The update**\n\n{result_text(result['update'])}")
    return "\n\n".join(parts)
