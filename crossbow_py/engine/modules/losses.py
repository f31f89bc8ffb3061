"""Cross-entropy with label smoothing for each learner, and counts of right predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree, form_of, leaves
from crossbow_py.data.datasets import counted, has_integers

Loss = Callable[[Any, Tensor], Tensor]

IGNORED = -100  # targets that cross_entropy leaves out of its mean
_DISTANCES = tuple(getattr(nn.functional, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
_FUNCTIONS_OF_VALUES = (*_DISTANCES, nn.functional.binary_cross_entropy_with_logits)
_MODULES_OF_VALUES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss)
_SCORES = ("logits", "out")  # what models call their scores, those of Hugging Face and of torchvision


Part = Callable[[Tree], Tree]


def model_loss(output: Tree, targets: Tensor) -> Tensor:  # noqa: ARG001
    """Return the loss that the model has computed itself, its output's entry `loss`, as models of transformers do.

    Such a model gets the targets as its argument `labels`.
    """
    found: Tensor = output["loss"]
    return found


@dataclass(frozen=True)
class TokenLoss:
    """A loss of classes to which each token of scores [B, T, V] and targets [B, T] is a sample, also if V = T."""

    of_classes: Loss

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of scores [B·T, V] and classes [B·T]."""
        return self.of_classes(scores, targets)


def plain_loss(loss: Loss) -> Loss:
    """Return the loss of classes of a `TokenLoss`; another loss is returned as it is."""
    return loss.of_classes if isinstance(loss, TokenLoss) else loss


def _with_keywords(loss: Loss) -> tuple[Loss, Mapping[str, Any]]:
    """Return a loss without the keyword arguments of `partial`, and these."""
    loss = plain_loss(loss)
    return (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})


def part_for(loss: Loss) -> Part:
    """Return the function that gives what a loss needs of a model's output.

    Losses of torch take scores, `model_loss` the loss beside them, and others everything.
    """
    if loss is model_loss:
        return loss_and_scores
    function, _ = _with_keywords(loss)
    return scores_of if str(getattr(function, "__module__", "")).startswith(("torch.nn", __name__)) else whole_output


def whole_output(output: Tree) -> Tree:
    """Return the output."""
    return output


def loss_and_scores(output: Tree) -> Tree:
    """Return the loss and the scores of a model's output, without states of attention and the like."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise UserError(
            f"the model must return the loss that it computes, as an entry `loss`, got {form_of(output)}; give a loss, "
            "such as loss=nn.functional.cross_entropy."
        )
    return {"loss": found, "logits": scores_of(output)}


def takes_classes(loss: Loss) -> bool:
    """Return whether targets are classes to a loss, one of torch's."""
    function, _ = _with_keywords(loss)
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss, smoothed_cross_entropy)
    return function in functions or isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)


def scales_with_targets(loss: Loss) -> bool:
    """Return whether a loss is torch's squared or absolute error, which has no threshold in the targets' unit."""
    function, _ = _with_keywords(loss)
    return function in (nn.functional.mse_loss, nn.functional.l1_loss) or isinstance(function, nn.MSELoss | nn.L1Loss)


def loss_of_rows(loss: Loss) -> Loss | None:
    """Return the function of outputs and targets [K, B, ...] that gives the losses [K] of all rows in one call.

    Only losses of torch that are means over values have one; others, None, are computed row by row.
    """
    function, given = _with_keywords(loss)
    if type(function) in _MODULES_OF_VALUES:
        each: Any = copy.copy(function)  # which shares its weights
        reduction, each.reduction = each.reduction, "none"
    elif function in _FUNCTIONS_OF_VALUES and not {"size_average", "reduce", "weight"} & {*given}:
        reduction, each = given.get("reduction", "mean"), partial(function, **{**given, "reduction": "none"})
    else:
        return None
    return (lambda outputs, targets: each(outputs, targets).flatten(1).mean(1)) if reduction == "mean" else None


def is_mean_nll(loss: Loss) -> bool:
    """Return whether a loss is the plain mean of −log p of the targets, whose exponential is the perplexity."""
    function, given = _with_keywords(loss)
    if isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss):
        smoothed = getattr(function, "label_smoothing", 0.0)
        return function.weight is None and not smoothed and function.reduction == "mean"
    return function in (nn.functional.cross_entropy, nn.functional.nll_loss) and set(given) <= {"ignore_index"}


def scores_of(output: Tree) -> Tree:
    """Return the scores of a model's output: its entry `logits` or `out`, or its only tensor; else all of it."""
    if isinstance(output, Tensor):
        return output
    for name in _SCORES:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    found = leaves(output)
    return found[0] if len(found) == 1 else output


def smoothed_cross_entropy(
    outputs: Tensor, targets: Tensor, smoothing: Tensor, whole: Tensor | None = None
) -> Tensor:
    """Return losses `[...]`, batch means, of outputs `[..., B, C]` and classes `[..., B]` with smoothing ε `[...]`.

    Targets may also be shares of the classes, floating `[..., B, C]`, as `Mixing` gives them.

        (1 − ε)·(−log p_target) + ε·mean_c(−log p_c)

    (Szegedy et al. 2016, section 7, as in `torch.nn.functional.cross_entropy`.) The leading dimension is that of
    learners, or missing. Of a micro-batch it is the share of the mean over `whole` targets.
    """
    log_p = outputs.log_softmax(-1)
    if targets.is_floating_point():
        each = (log_p * targets).sum(-1).neg()
        counts = torch.ones_like(each)
    else:
        each = nn.functional.nll_loss(log_p.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
        counts = counted(targets, IGNORED)
    uniform = log_p.mean(-1).neg() * counts
    share = smoothing.to(outputs.dtype).unsqueeze(-1)
    return torch.lerp(each, uniform, share.expand_as(each)).sum(-1) / (counts.sum(-1) if whole is None else whole)


def is_classification(outputs: Tree, targets: Tensor, lead: int = 0) -> bool:
    """Return whether these are scores `[..., B, classes]` and classes `[..., B]`, with `lead` dimensions before B.

    A single output is no score of a class: it is a logit or a number. Several outputs are none either.
    """
    if not isinstance(outputs, Tensor):
        return False
    shaped = (outputs.ndim, targets.ndim) == (lead + 2, lead + 1) and outputs.shape[-1] > 1
    return shaped and not targets.is_floating_point()


def has_classes(loss: Loss, outputs: Tree, targets: Tensor, lead: int = 0) -> bool:
    """Return whether these are `is_classification`, or a class for each position, `[..., B, C, *]` and `[..., B, *]`.

    The latter only to a loss of classes; others may compare anything.
    """
    if is_classification(outputs, targets, lead):
        return True
    if not isinstance(outputs, Tensor) or not has_integers(targets) or not takes_classes(loss):
        return False
    at = lead + 1  # of the classes
    around = (*outputs.shape[:at], *outputs.shape[at + 1 :])
    return outputs.ndim > at + 1 and outputs.shape[at] > 1 and around == targets.shape


def confusion_indices(scores: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    """Return where each prediction counts in confusion matrices [K, C, C + 1] that are flat, with one place more each.

    A row is a class, a column a prediction, the last one of scores that are not finite. Targets that are no class, or
    `ignored`, count at the additional place. Nothing waits for the device.

    Args:
        scores: scores [K, B, C, ...].
        targets: classes [B, ...].
    """
    num_classes = scores.shape[2]
    largest, predicted = scores.max(2)
    predicted = predicted.masked_fill(~largest.isfinite(), num_classes)
    counts = (targets >= 0) & (targets < num_classes)
    if ignored is not None:
        counts &= counted(targets, ignored)
    places = targets.long() * (num_classes + 1) + predicted
    return places.masked_fill(~counts, num_classes * (num_classes + 1)).flatten(1)


def ignored_target(loss: Loss) -> int | None:
    """Return the target that the loss leaves out of its mean; None if there is none, or if it is unknown."""
    function, given = _with_keywords(loss)
    if isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss):
        return function.ignore_index
    known = function in (nn.functional.cross_entropy, nn.functional.nll_loss)
    return int(given.get("ignore_index", IGNORED)) if known else None


def correct_predictions(outputs: Tree, targets: Tensor, lead: int = 0, ignored: int | None = None) -> Tensor | None:
    """Return the number of right predictions of each batch, with `lead` dimensions; None without classes.

    A sample whose largest score is not finite is predicted wrongly, but classes may be ruled out by a score of minus
    infinity. `ignored` targets have no right prediction. The result stays on the device.
    """
    scores: Tensor = scores_of(outputs)
    if not is_classification(scores, targets, lead):
        return None
    largest, predicted = scores.max(lead + 1)
    right: Tensor = (predicted == targets) & largest.isfinite()
    return (right if ignored is None or ignored < 0 else right & counted(targets, ignored)).sum(lead)


class Share(NamedTuple):
    """A micro-batch's share of its batch's mean loss, `own / whole`: what the mean divides by, of part and whole."""

    own: Tensor
    whole: Tensor

    def at(self, row: int) -> Share:
        """Return that of one of several learners, who may share one."""
        return self if self.own.ndim == 0 else Share(self.own[row], self.whole[row])

    def of(self, loss: Callable[[], Tensor], output: Tree) -> Tensor:
        """Return the share of a part's mean loss, a function, of its output. Host–device synchronisation on CUDA.

        Without targets that count there is no mean, nor a gradient of it: the share is zero.
        """
        if not self.own > 0:
            return torch.stack([own.sum() for own in leaves(output) if own.is_floating_point()]).sum() * 0
        found = loss()
        return found * (self.own.double() / self.whole.double()).to(found.dtype)


def num_averaged(loss: Loss, targets: Tensor, lead: int = 0) -> Tensor:
    """Return what the mean loss of each batch divides by, with `lead` dimensions of batches.

    With classes these are the targets that are not ignored, each times the weight of its class. The loss that a model
    computes of labels is taken for a mean over those that are not -100, as transformers do, and others for means over
    samples.
    """
    if not (takes_classes(loss) or loss is model_loss) or targets.is_floating_point():
        return targets.new_full(targets.shape[:lead], targets.shape[lead], dtype=torch.int64)
    function, given = _with_keywords(loss)
    counts = counted(targets, given.get("ignore_index", getattr(function, "ignore_index", IGNORED)))
    weight: Tensor | None = given.get("weight", getattr(function, "weight", None))
    each = counts if weight is None else weight[targets.long().clamp(min=0) * counts] * counts
    return each.flatten(lead).sum(lead)


class Compared(NamedTuple):
    """The arguments of a loss: outputs [B, ...], or a tree of such, and targets [B, ...]; B counts tokens if any."""

    outputs: Tree
    targets: Tensor


def compared(loss: Loss, output: Tree, targets: Tensor, lead: int = 0) -> Compared:
    """Return what a loss takes of a model's output, see `part_for`.

    Where a loss of classes meets the scores of tokens [B, T, V] and targets [B, T], each token is a sample to it. That
    is how language models have them; torch's own order is [B, V, T], which is left as it is. If V = T only a
    `TokenLoss` tells them apart.
    """
    output = part_for(loss)(output)
    if not has_tokens(loss, output, targets, lead):
        return Compared(output, targets)
    return Compared(output.flatten(lead, lead + 1), targets.flatten(lead, lead + 1))


def has_tokens(loss: Loss, output: Tree, targets: Tensor, lead: int = 0) -> bool:
    """Return whether a loss of classes meets the scores of tokens [..., B, T, V] and targets [..., B, T]."""
    output = part_for(loss)(output)
    if not isinstance(output, Tensor) or output.ndim != lead + 3 or output.shape[:-1] != targets.shape:
        return False
    is_known = isinstance(loss, TokenLoss) or output.shape[-1] != output.shape[-2]
    return is_known and takes_classes(loss) and has_integers(targets)


def correct_of_batch(
    outputs: Tree, targets: Tensor, ignored: int | None, size: int, lead: int = 0
) -> Tensor | None:
    """Return `correct_predictions` by the scores of the outputs, scaled by `scaled_to_batch`."""
    return correct_of_parts([(outputs, targets)], ignored, size, lead)


def correct_of_parts(
    parts: Sequence[Compared | tuple[Tree, Tensor]], ignored: int | None, size: int, lead: int = 0
) -> Tensor | None:
    """Return `correct_of_batch` of a batch in micro-batches."""
    found = [correct_predictions(outputs, targets, lead, ignored) for outputs, targets in parts]
    correct = [each for each in found if each is not None]
    if not correct:
        return None
    if len(parts) == 1:
        return scaled_to_batch(correct[0], parts[0][1], ignored, size, lead)
    targets = torch.cat([own for _, own in parts], lead)
    return scaled_to_batch(torch.stack(correct).sum(0), targets, ignored, size, lead)


def scaled_to_batch(correct: Tensor, targets: Tensor, ignored: int | None, size: int, lead: int = 0) -> Tensor:
    """Return correct · B / V for batches of `size` = B samples whose targets have V that are not ignored.

    Divided by B this is the accuracy over the targets that count, as the loss is a mean over them.
    """
    if ignored is None:
        return correct if targets.shape[lead] == size else correct.double() * size / targets.shape[lead]
    return correct.double() * size / counted(targets, ignored).sum(lead).clamp(min=1)


def non_finite_outputs(outputs: Tree, lead: int = 0) -> Tensor:
    """Return the number of samples of outputs `[..., B, ...]` whose largest value is not finite, `lead` dimensions.

    So minus infinity is an ordinary value, unless a sample has no other. Of several outputs the first one counts.
    """
    own = leaves(scores_of(outputs))[0]
    if own.ndim <= lead or own.numel() == 0 or not own.is_floating_point():
        return own.new_zeros(own.shape[:lead], dtype=torch.int64)
    return (~own.reshape(*own.shape[: lead + 1], -1).amax(-1).isfinite()).sum(lead)


def count_correct(output: Tree, targets: Tensor, ignored: int | None = None) -> float | None:
    """Return `correct_predictions` of one batch on the host."""
    correct = correct_predictions(output, targets, ignored=ignored)
    return None if correct is None else float(correct.item())  # host–device synchronisation on CUDA
