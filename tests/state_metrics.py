"""Metrics with states by the interface of torchmetrics, which need not be installed. NumPy says what they must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def dim_zero_sum(every: Tensor) -> Tensor:
    return every.sum(0)


def dim_zero_cat(every: list[Tensor]) -> Tensor:
    return torch.cat(every)


def dim_zero_mean(every: Tensor) -> Tensor:
    return every.mean(0)


class StateMetric:
    """As `torchmetrics.Metric`: states with a reduction each, lists or tensors, which `reset` sets back."""

    def __init__(self) -> None:
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}

    def add_state(self, name: str, default: Any, dist_reduce_fx: Callable[..., Any] | None = None) -> None:
        self._defaults[name], self._reductions[name] = default, dist_reduce_fx
        setattr(self, name, list(default) if isinstance(default, list) else default.clone())

    def reset(self) -> None:
        for name, default in self._defaults.items():
            setattr(self, name, list(default) if isinstance(default, list) else default.clone())


class MacroF1(StateMetric):
    """The plain mean of the classes' F1 scores; with `average=None` those of all classes."""

    def __init__(self, num_classes: int, average: str | None = "macro") -> None:
        super().__init__()
        self.num_classes, self.average = num_classes, average
        for name in ("right", "predicted", "actual"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.int64), dim_zero_sum)

    def update(self, preds: Tensor, target: Tensor) -> None:
        if preds.ndim != 2 or preds.shape[1] != self.num_classes:
            raise ValueError(f"preds must be [B, {self.num_classes}]")
        found = preds.argmax(1)
        self.right += torch.bincount(target[found == target], minlength=self.num_classes)
        self.predicted += torch.bincount(found, minlength=self.num_classes)
        self.actual += torch.bincount(target, minlength=self.num_classes)

    def compute(self) -> Tensor:
        each = 2 * self.right / (self.predicted + self.actual)
        return each if self.average is None else each.mean()


class Ranking(StateMetric):
    """The area under the ROC curve of class 1, of two classes, which takes all scores at once."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dim_zero_cat)
        self.add_state("targets", [], dim_zero_cat)

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.scores.append(preds[:, 1] - preds[:, 0])  # type: ignore[attr-defined]
        self.targets.append(target)  # type: ignore[attr-defined]

    def compute(self) -> dict[str, float]:
        scores, targets = torch.cat(self.scores).double(), torch.cat(self.targets)  # type: ignore[attr-defined]
        above = scores[targets == 1][:, None] - scores[targets == 0][None]
        return {"area": float(((above > 0).double() + (above == 0).double() / 2).mean()), "samples": len(targets)}


class Counting(StateMetric):
    """What it must not be on several ranks: a count beside the states."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dim_zero_sum)
        self.calls = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total += preds.sum()
        self.calls += 1

    def compute(self) -> Tensor:
        return self.total / self.calls


class Meaning(StateMetric):
    """A state that is averaged over ranks, which have unequal shares; it stays as it is if it is `constant`."""

    def __init__(self, constant: bool = False, reduction: Callable[..., Any] | None = dim_zero_mean) -> None:
        super().__init__()
        self.add_state("value", torch.ones(()), reduction)
        self.constant = constant

    def update(self, preds: Tensor, target: Tensor) -> None:
        if not self.constant:
            self.value += preds.mean()

    def compute(self) -> Tensor:
        return self.value


class Bare:
    """The interface alone: nothing says how states would be put together."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.largest.append(float(preds.max()))

    def compute(self) -> float:
        return max(self.largest)

    def reset(self) -> None:
        self.largest = []


class Curve(Bare):
    """A metric that computes no number."""

    def compute(self) -> Any:
        return torch.zeros(2), torch.zeros(2)


def f1_scores(outputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each class's F1 score in NumPy: 2·TP / (2·TP + FP + FN)."""
    found, classes = outputs.argmax(1), np.arange(outputs.shape[1])[:, None]
    true = ((found == classes) & (targets == classes)).sum(1)
    wrong = ((found == classes) != (targets == classes)).sum(1)
    scores: np.ndarray[Any, Any] = 2 * true / (2 * true + wrong)
    return scores


def area_under_curve(scores: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> float:
    """By ranks (Mann–Whitney U), for scores that all differ."""
    ranks = scores.argsort().argsort() + 1
    positive, negative = (targets == 1).sum(), (targets == 0).sum()
    return float((ranks[targets == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))
