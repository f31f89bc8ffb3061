"""Classes that are not equally frequent: weights by which samples are drawn, and weights of classes in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import Data, class_labels, num_samples
from crossbow_py.data.sampler import balanced_weights

_UNKNOWN = (
    "needs the class of every sample, and the training data do not tell them; give the data set an attribute targets "
    "with whole numbers [N]"
)


def sample_weights(
    data: Data, given: npt.ArrayLike | None, sampling: Literal["shuffle", "balanced"]
) -> npt.NDArray[np.float64] | None:
    """Return the weights [N] to draw the training data by, None to shuffle it. Raises UserError."""
    if given is None:
        if sampling == "shuffle":
            return None
        labels = class_labels(data)
        if labels is None or labels.ndim != 1:
            raise UserError(f"sampling=balanced {_UNKNOWN}, or Trainer(sample_weights=...).")
        return balanced_weights(labels)
    if sampling != "shuffle":
        raise UserError(f"sample_weights and sampling={sampling} both say how samples are drawn; leave one out.")
    return checked_weights(given, num_samples(data))


def checked_weights(given: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    """Return the weights of as many samples, [count]. Raises UserError if they are none."""
    try:
        weights = torch.as_tensor(given, dtype=torch.float64).detach().cpu().numpy().copy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"sample_weights must be numbers, one a sample, got {type(given).__name__}.") from error
    if weights.shape != (count,):
        raise UserError(
            f"sample_weights must be one number for each of the {count} training samples, got the shape "
            f"{list(weights.shape)}; give as many."
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and 0 < weights.sum() < np.inf):
        raise UserError("sample_weights must be finite, not negative and not all 0; correct them.")
    return weights


def weighted_loss(
    weights: Literal["balanced"] | Sequence[float], labels: npt.NDArray[np.int64] | None, num_classes: int | None
) -> nn.CrossEntropyLoss:
    """Return cross-entropy with a weight for each class, as torch has it: Σ w_y·loss / Σ w_y over a batch.

    `balanced` is N / (C·N_c) for a class of N_c of N samples, and 1 for one without samples.

    Args:
        weights: the weights, or `balanced`.
        labels: the classes of all training samples, for `balanced`.
        num_classes: C, the width of the model's output; None if it has no such output.

    Raises UserError for weights that do not fit the model.
    """
    if num_classes is None:
        raise UserError("class_weights are for outputs [batch, classes, ...] and classes as targets; leave them out.")
    if weights != "balanced":
        if len(weights) != num_classes:
            raise UserError(
                f"class_weights must be one number for each of the model's {num_classes} classes, got {len(weights)}; "
                "give as many."
            )
        return nn.CrossEntropyLoss(torch.tensor(weights))
    if labels is None:
        raise UserError(f"class_weights=balanced {_UNKNOWN}, or a list of weights.")
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)[:num_classes]
    shares = counts.sum() / (num_classes * counts.clip(min=1))
    return nn.CrossEntropyLoss(torch.from_numpy(np.where(counts > 0, shares, 1.0)).float())
