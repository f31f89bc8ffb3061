"""Losses of the user's: which of them is the default in other clothes, and what they would train on without a word."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossbow_py.data.datasets import has_integers
from crossbow_py.data.labels import Classes
from crossbow_py.engine.label_smoothing import IGNORED
from crossbow_py.engine.rounds import Loss

_F = nn.functional
_ELEMENTWISE = (_F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.huber_loss)
_ELEMENTWISE_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_CLASS_DTYPES = (torch.int64, torch.uint8)


def settled_loss(loss: Loss) -> Loss:
    """`nn.CrossEntropyLoss()` as the function that it calls, which is checked more closely and fuses; others as given.

    One with weights, smoothing or another reduction stays what it is.
    """
    if type(loss) is not nn.CrossEntropyLoss:
        return loss
    plain = loss.weight is None and not loss.label_smoothing
    return _F.cross_entropy if plain and (loss.ignore_index, loss.reduction) == (IGNORED, "mean") else loss


def loss_on(device: torch.device, loss: Loss) -> Loss:
    """The settled loss; where it is a module its tensors, weights of classes for one, are moved to the device."""
    settled = settled_loss(loss)
    if isinstance(settled, nn.Module):
        settled.to(device)
    return settled


def classes_of(loss: Loss, output: Tensor, targets: Tensor) -> Classes | None:
    """The targets that the loss takes with such an output; None where they are no classes, or nobody knows."""
    if output.ndim < 2 or not has_integers(targets):
        return None
    if loss in (_F.cross_entropy, _F.nll_loss):
        return Classes(output.shape[1], IGNORED)
    return Classes(output.shape[1], loss.ignore_index) if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) else None


def untrained(loss: Loss) -> str | None:
    """The name of a parameter of the loss itself, which nothing would train; None where it has none."""
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    return next((name for name, parameter in named if parameter.requires_grad), None)


def misfit(loss: Loss, output: Tensor, targets: Tensor) -> str | None:
    """Why torch would take a loss of these and make nonsense of them, or refuse them for reasons of its own.

    One sentence with the remedy; None where nothing is known against them.
    """
    given = f"the loss cannot take the model's output {list(output.shape)} with targets {list(targets.shape)}"
    if loss is _F.cross_entropy:
        return _no_classes(given, output, targets)
    elementwise = loss in _ELEMENTWISE or isinstance(loss, _ELEMENTWISE_MODULES)
    if elementwise and output.shape != targets.shape:
        return f"{given}: it compares value by value and would repeat them; give targets of the output's shape."
    return None


def remarks(loss: Loss, output: Tensor, targets: Tensor) -> list[str]:
    """What cannot be told from shapes alone, and is to be said."""
    if loss is not _F.cross_entropy or output.ndim < 3 or output.shape[:-1] != targets.shape:
        return []
    return [
        f"The model's output is [batch, {', '.join(map(str, output.shape[1:]))}]: classes are in the second place. If "
        "the model has them in the last one, it trains on something else; then return output.movedim(-1, 1)."
    ]


def _no_classes(given: str, output: Tensor, targets: Tensor) -> str | None:
    kind = str(targets.dtype).removeprefix("torch.")
    if targets.dtype in _CLASS_DTYPES:
        if output.ndim > 2 and targets.shape == output.shape[:-1] != (len(output), *output.shape[2:]):
            return f"{given}: it takes the scores of classes from the second place; return output.movedim(-1, 1)."
        return None
    if has_integers(targets):
        return f"{given}: classes are int64, got {kind}; give targets.long()."
    if targets.is_floating_point() and targets.shape == output.shape and output.ndim > 1 and output.shape[1] > 1:
        return None  # probabilities of the classes
    return (
        f"{given}: it is cross-entropy, and targets of {kind} are no classes; give classes as int64, or, from Python, "
        "a loss for numbers, such as loss=nn.MSELoss()."
    )
