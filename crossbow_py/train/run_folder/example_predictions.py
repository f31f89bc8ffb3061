"""What an evaluation has to show: some images of the data set as they were, and what the model says they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossbow_py.data.normalisation import IDENTITY, Normalisation
from crossbow_py.telemetry.events import Predictions
from crossbow_py.train.evaluation.evaluator import Examples

_CHANNELS = (1, 3)


def example_predictions(
    examples: Examples | None, normalisation: Normalisation | None, class_names: Sequence[str] = ()
) -> Predictions | None:
    """Images and answers; None for images that are neither grey nor of three colours, and for values not finite.

    `normalisation` is undone, and values are stretched to what a screen has, those of all images alike.
    """
    if examples is None or examples.inputs.shape[1] not in _CHANNELS:
        return None
    if not _are_finite(examples.inputs) or not _are_finite(examples.outputs):
        return None
    values = examples.inputs.float()
    if values.ndim == 5:
        values = values[:, :, values.shape[2] // 2]
    mean, std = (normalisation or IDENTITY).constants(values, torch.float32)
    values = values * std + mean
    low, high = float(values.min()), float(values.max())
    values = (values - low) / (high - low) if high > low else values
    probabilities, predicted = examples.outputs.float().softmax(1).max(1)
    return Predictions(
        images=values.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).contiguous().numpy(),
        targets=tuple(map(int, examples.targets)),
        predicted=tuple(map(int, predicted)),
        probabilities=tuple(map(float, probabilities)),
        class_names=tuple(class_names),
    )


def _are_finite(values: Tensor) -> bool:
    return values.is_floating_point() and bool(values.isfinite().all())
