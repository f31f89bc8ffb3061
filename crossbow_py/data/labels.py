"""Which targets are classes: a label beyond a model's outputs would end a run in its middle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def counted(targets: Tensor, ignored: int) -> Tensor:
    """Return which targets are not `ignored`, a mask. Of bytes torch would take 156 for -100."""
    return (targets.long() if targets.dtype == torch.uint8 else targets) != ignored


@dataclass(frozen=True)
class Classes:
    """Labels from 0 to `num_classes` − 1, and `ignored`, which the loss leaves out."""

    num_classes: int
    ignored: int

    def first_outside(self, targets: Tensor) -> tuple[int, int] | None:
        """(sample, label) of the first integer target [N, ...] that is none of them; None where there is none."""
        if targets.is_floating_point() or targets.is_complex():
            return None
        outside = ((targets < 0) | (targets >= self.num_classes)) & counted(targets, self.ignored)
        if not outside.any():
            return None
        sample = int(outside.flatten(1).any(1).int().argmax() if outside.ndim > 1 else outside.int().argmax())
        return sample, int(targets[sample][outside[sample]].flatten()[0])

    def refusal(self, what: str, label: int) -> str:
        """One sentence on `what` that has such a label."""
        return (
            f"{what} has the class {label}, and the model tells {self.num_classes} classes apart, which are 0 to "
            f"{self.num_classes - 1} ({self.ignored} is left out of the loss); correct that target, give the model "
            f"more outputs, or, where {label} marks what is not to be learned, give the loss "
            f"nn.CrossEntropyLoss(ignore_index={label})."
        )
