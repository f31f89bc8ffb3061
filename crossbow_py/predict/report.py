"""A prediction as text, as plain values in predict.json, and its probabilities in predictions.npz."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from crossbow_py.core.errors import unwritable
from crossbow_py.core.files import replacing
from crossbow_py.core.host import versions
from crossbow_py.core.printing import columns
from crossbow_py.engine.modules.losses import IGNORED
from crossbow_py.predict.prediction import Prediction
from crossbow_py.telemetry.records import write_json
from crossbow_py.train.evaluation.evaluator import non_finite_remark

JSON_FILE, PROBABILITIES_FILE = "predict.json", "predictions.npz"


def as_text(found: Prediction) -> str:
    """Return the text for the user."""
    k, banks = len(found.models), found.num_architectures
    several = f" of {banks} architectures" if banks > 1 else ""
    head = (
        f"{k} model{'s' if k > 1 else ''}{several} on the {len(found.targets):,} test samples of data={found.data}: "
        f"executor={found.executor} device={found.device} precision={found.precision} batch_size={found.batch_size}"
    )
    rows = [(model.name, f"{own:.4f}") for model, own in zip(found.models, found.accuracies, strict=True)]
    together = [("ensemble", f"{found.accuracy:.4f}")] if k > 1 else []
    by_all = ", each answered by all models" if k > 1 else ""
    count = found.num_ignored
    of = f"{count:,} of {len(found.targets):,} samples have the target {IGNORED}, which is no class"
    ignored = [f"{of}: accuracy is that of the others."] if count else []
    counts = zip(found.models, found.num_non_finite, strict=True)
    non_finite = [non_finite_remark(model.name, bad, len(found.targets)) for model, bad in counts if bad]
    blocks = [
        [head, *found.notes, *ignored, *non_finite],
        columns(("model", "accuracy"), [*rows, *together]),
        [f"{found.images_per_s:,.0f} images/s{by_all}; loading is not counted."],
    ]
    if found.latencies:
        times = [
            (str(size), f"{own.p50_ms:.3f}", f"{own.p90_ms:.3f}", f"{own.p99_ms:.3f}", own.executor)
            for size, own in found.latencies.items()
        ]
        table = columns(("batch", "p50", "p90", "p99", "executor"), times)
        of = " of the ensemble" if k > 1 else ""
        blocks.append([f"Latency of one answer{of}, in milliseconds:", *table])
    return "\n\n".join("\n".join(block) for block in blocks)


def as_plain(found: Prediction) -> dict[str, Any]:
    """Return everything but the probabilities, in plain values."""
    members = zip(found.models, found.accuracies, found.num_non_finite, strict=True)
    return {
        "models": [
            {
                "name": model.name, "file": str(model.file), "model": model.config.model.NAME, "accuracy": accuracy,
                "num_non_finite": count,
            }
            for model, accuracy, count in members
        ],
        "ensemble": {"accuracy": found.accuracy},
        "data": found.data,
        "num_samples": len(found.targets),
        "num_ignored": found.num_ignored,
        "num_classes": found.probabilities.shape[2],
        "num_architectures": found.num_architectures,
        "device": found.device,
        "executor": found.executor,
        "precision": found.precision,
        "batch_size": found.batch_size,
        "images_per_s": found.images_per_s,
        "latency": {str(size): dataclasses.asdict(own) for size, own in found.latencies.items()},
        "notes": list(found.notes),
        "versions": versions(),
    }  # fmt: skip


def write(found: Prediction, folder: Path) -> str:
    """Write both files into a folder that exists; says where. Raises UserError when it cannot be written.

    Probabilities are members `[K, N, C]` and ensemble `[N, C]`, with targets `[N]` and names `[K]`.
    """
    try:
        with replacing(folder / PROBABILITIES_FILE, synced=True) as partial, partial.open("wb") as file:
            np.savez(
                file, members=found.probabilities, ensemble=found.ensemble, targets=found.targets,
                names=np.array([model.name for model in found.models]),
            )  # fmt: skip
        write_json(folder / JSON_FILE, as_plain(found))
    except OSError as error:
        raise unwritable(folder, error) from error
    return f"Written to {folder / JSON_FILE} and {folder / PROBABILITIES_FILE}."
