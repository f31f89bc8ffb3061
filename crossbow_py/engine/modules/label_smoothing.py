"""Cross-entropy with label smoothing, of which every learner may have its own share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossbow_py.data.datasets import counted

IGNORED = -100  # targets that cross_entropy leaves out of its mean


def smoothed_cross_entropy(outputs: Tensor, targets: Tensor, smoothing: Tensor) -> Tensor:
    """Losses `[...]` of outputs `[..., B, C]` and classes `[..., B]`, batch means, with smoothing ε `[...]`.

        (1 − ε)·(−log p_target) + ε·mean_c(−log p_c)

    (Szegedy et al. 2016, section 7, as `torch.nn.functional.cross_entropy` has it.) Learners are the leading dimension,
    or there is none.
    """
    log_p = outputs.log_softmax(-1)
    each = nn.functional.nll_loss(log_p.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    counts = counted(targets, IGNORED)
    uniform = log_p.mean(-1).neg() * counts
    share = smoothing.to(outputs.dtype).unsqueeze(-1)
    return torch.lerp(each, uniform, share.expand_as(each)).sum(-1) / counts.sum(-1)
