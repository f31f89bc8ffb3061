"""Checks of the user's loss: whether it is cross-entropy in another form, and whether it fits outputs and targets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, map_tree
from crossbow_py.data.datasets import Classes, Data, as_pair, has_integers
from crossbow_py.engine.modules.losses import (
    IGNORED,
    Loss,
    ignored_target,
    model_loss,
    scales_with_targets,
    scores_of,
    takes_classes,
)
from crossbow_py.engine.modules.standardized import NAMES, comparison, is_standardized, remark_of, statistics_of
from crossbow_py.engine.trust.side_effects import graph_nodes

L = TypeVar("L", bound=Callable[..., Any])
_F = nn.functional
_ELEMENTWISE = (
    _F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.huber_loss, _F.poisson_nll_loss, _F.kl_div, _F.soft_margin_loss,
)  # fmt: skip
_ELEMENTWISE_MODULES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss,
)  # fmt: skip
_TOLERANCE = 0.02  # for sums of probabilities, which in bfloat16 have two digits, and for equal means
_EXACT = 1e-4
_IS_A_SUM = (
    "a loss or metric must be the mean over a batch, and this one is twice as large for a batch that is there twice, "
    "as a sum is; divide it by the number of its samples, or leave reduction='sum' out."
)
_LARGE = 1000.0  # of targets that are numbers
_AS_CLASSES = "give targets.long(), or an array as y.astype(np.int64)"
_CLASS_DTYPES = (torch.int64, torch.uint8)


def settled_loss(loss: Loss) -> Loss:
    """Return `cross_entropy` for a plain `nn.CrossEntropyLoss()`, as it is checked more closely and fuses.

    Every other loss is returned as given, also one with weights, smoothing or another reduction.
    """
    if type(loss) is not nn.CrossEntropyLoss:
        return loss
    plain = loss.weight is None and not loss.label_smoothing
    return _F.cross_entropy if plain and (loss.ignore_index, loss.reduction) == (IGNORED, "mean") else loss


def loss_on(device: torch.device, loss: Loss) -> Loss:
    """Return the settled loss. Tensors of a module, such as class weights, are moved to the device."""
    settled = settled_loss(loss)
    if isinstance(settled, nn.Module):
        settled.to(device)
    return settled


def remarks_on_targets(data: Data, loss: Loss, template: nn.Module | None = None) -> list[str]:
    """Return what a model standardizes by, or whether targets are so large that weights take long to get there."""
    pair = as_pair(data)
    if template is not None and is_standardized(template):
        return [remark_of(*(getattr(template, name) for name in NAMES))]
    if pair is None or takes_classes(loss) or not pair[1].is_floating_point() or pair[1].ndim > 2:
        return []
    mean, deviation = float(pair[1].double().mean()), float(pair[1].double().std(correction=0))
    if not max(abs(mean), deviation) > _LARGE:
        return []
    return [
        f"The targets have a mean of {mean:.3g} and a standard deviation of {deviation:.3g}, which weights take long "
        "to reach; standardize_targets=True has the model compute in deviations from the mean."
    ]


def standardizes(asked: bool | Literal["auto"], data: Data, loss: Loss | None) -> bool:
    """Return whether models are standardized by the targets: what was asked for, or where it can be.

    Raises UserError for something else than the three.
    """
    if asked not in (True, False, "auto"):
        raise UserError(f"standardize_targets must be True, False or 'auto', got {asked!r}.")
    if asked != "auto":
        return asked
    pair = as_pair(data)
    fits = pair is not None and pair[1].is_floating_point() and pair[1].ndim <= 2
    return fits and loss is not None and scales_with_targets(loss)


def target_statistics(
    data: Data, loss: Loss | None, places: npt.NDArray[np.int64] | None = None,
    weights: npt.NDArray[np.float64] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean and standard deviation [D] of the targets of training data, or of the samples `places` alone.

    Each counts by its weight in `weights`, if there are any.

    Raises UserError where models cannot be standardized by them.
    """
    pair = as_pair(data)
    if pair is None:
        raise UserError(
            "standardize_targets=True needs training data that are tensors, whose targets are known before training; "
            "standardise those of this data set where it is made."
        )
    if loss is None or takes_classes(loss):
        raise UserError("standardize_targets=True is for regression, got cross-entropy; leave it out, or set loss.")
    return statistics_of(pair[1], places, weights)


def classes_of(loss: Loss, output: Tree, targets: Tensor) -> Classes | None:
    """Return the targets that the loss takes for this output; None if they are not classes, or it is unknown."""
    if loss is model_loss and has_integers(targets):  # of labels that may be shifted
        scores = scores_of(output)
        fits = isinstance(scores, Tensor) and scores.shape[:-1] == targets.shape and scores.shape[-1] > 1
        return Classes(scores.shape[-1], IGNORED) if fits else None
    if not isinstance(output, Tensor) or output.ndim < 2 or not has_integers(targets):
        return None
    ignored = ignored_target(loss)
    return None if ignored is None else Classes(output.shape[1], ignored)


def copied_loss(loss: L) -> L:
    """Return a copy to measure with, so that the loss's own state does not change; the loss if it cannot be copied."""
    try:
        return copy.deepcopy(loss)
    except Exception:
        return loss


def untrained(loss: Loss) -> str | None:
    """Return the name of a parameter of the loss itself, which nothing would train; None if it has none."""
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    return next((name for name, parameter in named if parameter.requires_grad), None)


def hidden_parameter(value: Tensor, outputs: Sequence[Tensor]) -> Tensor | None:
    """Return a parameter besides the leaves `outputs` that the loss's value depends on; None if there is none."""
    own = {id(each) for each in outputs}
    found = (getattr(node, "variable", None) for node in graph_nodes(value))
    return next((leaf for leaf in found if leaf is not None and id(leaf) not in own), None)


def misfit(loss: Callable[[Any, Tensor], Any], output: Tree, targets: Tensor) -> str | None:
    """Return why the loss does not fit, if torch would compute nonsense or raise an error that is hard to read.

    One sentence with the remedy; None if nothing is known against it.
    """
    loss, output, targets = comparison(loss, output, targets)
    return (_unfit(loss, output, targets) if isinstance(output, Tensor) else None) or _sum(loss, output, targets)


def _unfit(loss: Callable[[Any, Tensor], Tensor | float], output: Tensor, targets: Tensor) -> str | None:
    given = f"the loss cannot take the model's output {list(output.shape)} with targets {list(targets.shape)}"
    if loss in (_F.nll_loss, _F.cross_entropy) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        squeezed = targets.ndim > 1 and targets.shape[1] == 1 and (*targets.shape[:1], *targets.shape[2:])
        if has_integers(targets) and squeezed == (*output.shape[:1], *output.shape[2:]) and output.shape[1:2] != (1,):
            return f"{given}: classes have no dimension of channels; give targets.squeeze(1)."
        if isinstance(loss, nn.NLLLoss) and has_integers(targets) and targets.dtype not in _CLASS_DTYPES:
            return f"{given}: classes are int64, got {_kind(targets)}; {_AS_CLASSES}."
    if loss is _F.cross_entropy:
        return _no_classes(given, output, targets)
    if _is_of(loss, (_F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)) and not targets.is_floating_point():
        return f"{given}: it takes numbers from 0 to 1, got {_kind(targets)}; give targets.float()."
    elementwise = loss in _ELEMENTWISE or isinstance(loss, _ELEMENTWISE_MODULES)
    if elementwise and output.shape != targets.shape:
        return f"{given}: it compares value by value and would broadcast them; give targets of the output's shape."
    return None


@torch.no_grad()
def _sum(loss: Callable[[Any, Tensor], Tensor | float], output: Tree, targets: Tensor) -> str | None:
    """Return why the loss is no mean over a batch, if it is as large as the batch; None if it is not, or unknown.

    Three times the batch as well, as log B of contrastive losses also doubles from two samples to four.
    """
    if loss is _F.cross_entropy or loss is model_loss:
        return None
    loss = copied_loss(loss)

    def of_times(n: int) -> float:
        return float(loss(map_tree(lambda own: torch.cat([own] * n), output), torch.cat([targets] * n)))

    try:
        with kept_generators(targets.device):
            once = of_times(1)
            is_sum = once != 0 and all(math.isclose(of_times(n), n * once, rel_tol=_TOLERANCE) for n in (2, 3))
    except Exception:  # of a number of samples that it does not take, or of outputs that are not of samples
        return None
    return _IS_A_SUM if is_sum else None


@torch.no_grad()
def remarks_on_parts(loss: Loss, output: Tree, targets: Tensor, count: int) -> list[str]:
    """Return warnings if the loss of `targets` is not the mean of those of `count` parts, as micro-batches have it.

    Losses whose micro-batches are weighed by what their mean divides by have none. `output` has any samples, which are
    repeated. The parts differ as much as they can: those of ignored targets are together.
    """
    loss, output, targets = comparison(loss, output, targets)
    if takes_classes(loss) or loss is model_loss:
        return []
    places, loss = targets.reshape(len(targets), -1).double().sum(1).argsort(), copied_loss(loss)

    def of(where: Tensor) -> float:
        return float(loss(map_tree(lambda own: own[where % len(own)], output), targets[where]))

    try:
        with kept_generators(targets.device):
            whole, parts = of(places), [len(own) * of(own) for own in torch.tensor_split(places, count)]
    except Exception:  # of a number of samples that it does not take, or of outputs that are not of samples
        return []
    mean = sum(parts) / len(targets)
    if not math.isfinite(whole) or math.isclose(whole, mean, rel_tol=_EXACT):
        return []
    return [
        "The loss of a batch is not the mean of those of its micro-batches: gradients are not those of the whole "
        "batch. If the loss leaves out or weighs targets, give nn.CrossEntropyLoss(ignore_index=..., weight=...), "
        "whose micro-batches are weighed alike; or set accumulate=1."
    ]


def not_shares(targets: Tensor) -> str | None:
    """Return why floating targets [N, C, ...] are no shares of classes, as cross-entropy takes them; None if they are.

    Host–device synchronisation on CUDA.
    """
    if ((targets.sum(1) - 1).abs() < _TOLERANCE).all():
        return None
    given = (
        "cross-entropy, the loss where none is given, takes a class or shares of classes that sum to 1, got targets "
        f"{list(targets.shape)}"
    )
    if ((targets == 0) | (targets == 1)).all():
        return f"{given} with several labels a sample; give loss=nn.BCEWithLogitsLoss()."
    return f"{given} that do not; give a loss for numbers, such as loss=nn.MSELoss()."


def remarks(loss: Loss, output: Tree, targets: Tensor) -> list[str]:
    """Return warnings about what looks wrong but may be intended."""
    loss, output, targets = comparison(loss, output, targets)
    if not isinstance(output, Tensor):
        return []
    output = output.detach().float()
    shape = f"[batch, {', '.join(map(str, output.shape[1:]))}]"
    if takes_classes(loss) and output.ndim > 2 and output.shape[:-1] == targets.shape:
        return [
            f"The model's output is {shape}: classes are in dimension 1. If the model has them in the last one, it "
            "trains on something else; then return output.movedim(-1, 1)."
        ]
    if _is_of(loss, (_F.cross_entropy, nn.CrossEntropyLoss)) and are_probabilities(output):
        return [
            "The model's outputs are probabilities, and cross-entropy takes scores, of which it takes the softmax "
            "itself: leave the softmax out of the model."
        ]
    if _is_of(loss, (_F.nll_loss, nn.NLLLoss)) and not are_probabilities(output.exp()):
        return [
            "The model's outputs are not logarithms of probabilities, which nll_loss takes: end the model with "
            "log_softmax, or leave the loss out for cross-entropy."
        ]
    return [] if loss is _F.cross_entropy else _remarks_on_mean(loss, output, targets)


@torch.no_grad()
def _remarks_on_mean(loss: Loss, output: Tensor, targets: Tensor) -> list[str]:
    """Return warnings if a batch's loss is not the mean of its samples' losses."""
    try:
        loss = copied_loss(loss)
        whole = float(loss(output, targets))
        each = [float(loss(*one)) for one in zip(torch.split(output, 1), torch.split(targets, 1), strict=True)]
    except Exception:  # the loss may need several samples
        return []
    if len(each) < 2 or math.isclose(whole, sum(each) / len(each), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        return []
    fewer, more = sorted([tuple(output.shape), tuple(targets.shape)], key=len)
    if more != (*fewer, 1):
        return []
    return [
        f"The loss of a batch is not the mean of its samples': it takes outputs {list(output.shape)} and targets "
        f"{list(targets.shape)}, and compares every sample with every other, it seems; give both the same shape."
    ]


def _is_of(loss: Callable[[Any, Tensor], Tensor | float], kinds: tuple[Loss, type[nn.Module]]) -> bool:
    function, module = kinds
    return loss is function or isinstance(loss, module)


def are_probabilities(output: Tensor) -> bool:
    """Return whether outputs are probabilities of at least two classes, along dimension 1."""
    if output.ndim < 2 or output.shape[1] < 2 or bool((output < 0).any()):
        return False
    return bool(((output.sum(1) - 1).abs() < _TOLERANCE).all())


def _kind(targets: Tensor) -> str:
    return str(targets.dtype).removeprefix("torch.")


def _no_classes(given: str, output: Tensor, targets: Tensor) -> str | None:
    kind = _kind(targets)
    if targets.dtype in _CLASS_DTYPES:
        if output.ndim > 2 and targets.shape == output.shape[:-1] != (len(output), *output.shape[2:]):
            return f"{given}: it takes the scores of classes from dimension 1; return output.movedim(-1, 1)."
        return None
    if has_integers(targets):
        return f"{given}: classes are int64, got {kind}; {_AS_CLASSES}."
    if targets.is_floating_point() and targets.shape == output.shape and output.ndim > 1 and output.shape[1] > 1:
        return not_shares(targets)
    return (
        f"{given}: it is cross-entropy, and targets of {kind} are not classes; give classes as int64, or, from Python, "
        "a loss for numbers, such as loss=nn.MSELoss()."
    )
