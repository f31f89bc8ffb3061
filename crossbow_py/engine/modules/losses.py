"""Cross-entropy with label smoothing for each learner, and counts of right predictions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from crossbow_py.data.datasets import counted

Loss = Callable[[Tensor, Tensor], Tensor]

IGNORED = -100  # targets that cross_entropy leaves out of its mean


def smoothed_cross_entropy(outputs: Tensor, targets: Tensor, smoothing: Tensor) -> Tensor:
    """Return losses `[...]`, batch means, of outputs `[..., B, C]` and classes `[..., B]` with smoothing ε `[...]`.

        (1 − ε)·(−log p_target) + ε·mean_c(−log p_c)

    (Szegedy et al. 2016, section 7, as in `torch.nn.functional.cross_entropy`.) The leading dimension is that of
    learners, or missing.
    """
    log_p = outputs.log_softmax(-1)
    each = nn.functional.nll_loss(log_p.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    counts = counted(targets, IGNORED)
    uniform = log_p.mean(-1).neg() * counts
    share = smoothing.to(outputs.dtype).unsqueeze(-1)
    return torch.lerp(each, uniform, share.expand_as(each)).sum(-1) / counts.sum(-1)


def is_classification(outputs: Tensor, targets: Tensor, lead: int = 0) -> bool:
    """Return whether these are scores `[..., B, classes]` and classes `[..., B]`, with `lead` dimensions before B.

    A single output is no score of a class: it is a logit or a number.
    """
    shaped = (outputs.ndim, targets.ndim) == (lead + 2, lead + 1) and outputs.shape[-1] > 1
    return shaped and not targets.is_floating_point()


def ignored_target(loss: Loss) -> int | None:
    """Return the target that the loss leaves out of its mean; None if there is none, or if it is unknown."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index
    return IGNORED if loss in (nn.functional.cross_entropy, nn.functional.nll_loss) else None


def correct_predictions(outputs: Tensor, targets: Tensor, lead: int = 0, ignored: int | None = None) -> Tensor | None:
    """Return the number of right predictions of each batch, with `lead` dimensions; None without classes.

    A sample whose largest score is not finite is predicted wrongly, but classes may be ruled out by a score of minus
    infinity. `ignored` targets have no right prediction. The result stays on the device.
    """
    if not is_classification(outputs, targets, lead):
        return None
    largest, predicted = outputs.max(lead + 1)
    right = (predicted == targets) & largest.isfinite()
    return (right if ignored is None or ignored < 0 else right & counted(targets, ignored)).sum(lead)


def correct_of_batch(outputs: Tensor, targets: Tensor, ignored: int | None, lead: int = 0) -> Tensor | None:
    """Return `correct_predictions`, scaled by `scaled_to_batch`."""
    correct = correct_predictions(outputs, targets, lead, ignored)
    return None if correct is None else scaled_to_batch(correct, targets, ignored, lead)


def scaled_to_batch(correct: Tensor, targets: Tensor, ignored: int | None, lead: int = 0) -> Tensor:
    """Return correct · B / V for batches of B samples of which V are not ignored, or `correct` if none can be.

    Divided by B this is the accuracy over the samples that count, as the loss is a mean over them.
    """
    if ignored is None:
        return correct
    return correct.double() * targets.shape[lead] / counted(targets, ignored).sum(lead).clamp(min=1)


def non_finite_outputs(outputs: Tensor, lead: int = 0) -> Tensor:
    """Return the number of samples of outputs `[..., B, ...]` whose largest value is not finite, `lead` dimensions.

    So minus infinity is an ordinary value, unless a sample has no other.
    """
    if outputs.ndim <= lead or outputs.numel() == 0 or not outputs.is_floating_point():
        return outputs.new_zeros(outputs.shape[:lead], dtype=torch.int64)
    return (~outputs.reshape(*outputs.shape[: lead + 1], -1).amax(-1).isfinite()).sum(lead)


def count_correct(output: Tensor, targets: Tensor, ignored: int | None = None) -> float | None:
    """Return `correct_predictions` of one batch on the host."""
    correct = correct_predictions(output, targets, ignored=ignored)
    return None if correct is None else float(correct.item())  # host–device synchronisation on CUDA
