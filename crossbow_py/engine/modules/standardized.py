"""Models for targets of any unit: what they compute counts in standard deviations from the mean of the targets.

    training     loss(model(inputs), (targets − target_mean) / target_std)
    evaluation   prediction = target_mean + target_std · model(inputs)

Mean and deviation of each column are those of the samples that the model is trained on. They are two buffers of the
model, so that they are saved, loaded and copied with it, and models side by side have their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree
from crossbow_py.engine.modules.losses import Loss, scores_of

NAMES = ("target_mean", "target_std")


class Deviations(NamedTuple):
    """What a standardized model returns in training: values [B, D] or [B], and the targets' mean and deviation [D]."""

    values: Tensor
    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class StandardizedLoss:
    """A loss of standardized values and targets in training; in evaluation of predictions and targets as they are."""

    of_values: Loss

    def __call__(self, output: Tree, targets: Tensor) -> Tensor:
        """Return the loss of what a standardized model returns."""
        loss, output, targets = comparison(self, output, targets)
        return loss(output, targets)


def comparison(loss: Loss, output: Tree, targets: Tensor) -> tuple[Loss, Tree, Tensor]:
    """Return the loss, output and targets that `loss` compares: others than these if it is a `StandardizedLoss`.

    There may be a dimension of learners before those of batches.
    """
    if not isinstance(loss, StandardizedLoss):
        return loss, output, targets
    if not isinstance(output, Deviations):
        return loss.of_values, output, targets
    values, mean, std = output
    if targets.ndim > mean.ndim:
        mean, std = mean.unsqueeze(-2), std.unsqueeze(-2)
    return loss.of_values, values, (targets - mean) / std


def standardized(module: nn.Module, mean: Tensor, std: Tensor) -> nn.Module:
    """Return the module, whose output counts in `std` [D] from `mean` [D] from now on; D is 1 for targets [B].

    In training it returns `Deviations`, in evaluation mode predictions, a tensor.

    Raises:
        UserError: the module has something else of one of the buffers' names, or, when it is called, returns something
            other than a number for each column of the targets.
    """
    for name, value in zip(NAMES, (mean, std), strict=True):
        if hasattr(module, name):
            raise UserError(f"standardize_targets=True adds {name} to the model, which has one; rename it.")
        module.register_buffer(name, value.clone())
    module.register_forward_hook(_in_own_unit)
    return module


def _in_own_unit(module: nn.Module, _: Any, output: Any) -> Tensor | Deviations:
    mean, std = (getattr(module, name) for name in NAMES)
    values = scores_of(output)
    if not isinstance(values, Tensor) or math.prod(values.shape[1:]) != len(mean):
        shape = list(values.shape) if isinstance(values, Tensor) else type(output).__name__
        raise UserError(
            f"standardize_targets=True is for models that return as many numbers a sample as targets have, got {shape} "
            f"where each target has {len(mean)}; set it to False."
        )
    if module.training:
        return Deviations(values, mean, std)
    predictions: Tensor = values * std + mean
    return predictions


def statistics_of(
    targets: Tensor, places: npt.NDArray[np.int64] | None = None, weights: npt.NDArray[np.float64] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation [D] of targets [N] or [N, D], in float32; 1 where all are the same.

    Args:
        places: the samples that count, which may repeat; None for all.
        weights: how much each of these counts, not negative; None for all alike.

    Raises:
        UserError: they are not floating, have more dimensions, or are not finite.
    """
    if not targets.is_floating_point() or targets.ndim > 2:
        raise UserError(
            "standardize_targets=True is for floating targets of one or more columns, [N] or [N, D], got "
            f"{list(targets.shape)} of {str(targets.dtype).removeprefix('torch.')}; set it to False."
        )
    values = (targets if places is None else targets[torch.from_numpy(places)]).double()
    values = values.reshape(len(values), -1)
    if weights is None:
        std, mean = torch.std_mean(values, dim=0, correction=0)
    else:
        share = torch.from_numpy(weights / weights.sum()).unsqueeze(1)
        values, share = values[weights > 0], share[weights > 0]
        mean = (share * values).sum(0)
        std = (share * (values - mean).square()).sum(0).sqrt()
    if not mean.isfinite().all():
        raise UserError("targets are not all finite, and a model cannot learn from those; leave such samples out.")
    return mean.float(), torch.where(std > 1e-12 * mean.abs(), std, 1.0).float()


def remark_of(mean: Tensor, std: Tensor) -> str:
    """Return what the user is told of them."""
    columns = "" if len(mean) == 1 else f" in the first of {len(mean)} columns"
    return (
        f"The model's targets are standardized by a mean of {float(mean[0]):.4g} and a deviation of {float(std[0]):.4g}"
        f"{columns}, and so is the training loss; test losses, metrics and predictions are in the targets' own unit."
    )


def is_standardized(module: nn.Module) -> bool:
    """Return whether a module is one that `standardized` returned, or a copy."""
    return _in_own_unit in module._forward_hooks.values()


def standardizing(
    make_model: Callable[[], nn.Module], mean: Tensor, std: Tensor, asked: bool = True
) -> Callable[[], nn.Module]:
    """Return a function that makes the models of `make_model`, standardized if they are not.

    Unless the user `asked` for it, not those that have buffers of these names, which may do it themselves, and those
    with adapters of PEFT, which would be saved without it.
    """

    def make() -> nn.Module:
        module = make_model()
        is_done = not isinstance(module, nn.Module) or is_standardized(module)
        is_done = is_done or (not asked and any(hasattr(module, name) for name in (*NAMES, "peft_config")))
        return module if is_done else standardized(module, mean, std)

    return make if callable(make_model) else make_model


def standardize_as(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Have a module count as the one did whose values these are, to be loaded into it."""
    if all(name in values for name in NAMES) and not any(hasattr(module, name) for name in NAMES):
        standardized(module, *(values[name] for name in NAMES))
