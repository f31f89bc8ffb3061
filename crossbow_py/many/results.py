"""The results of `train_many`: what became of each member, as tables, models and out-of-fold predictions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.intervals import Estimate, estimate
from crossbow_py.core.printing import columns
from crossbow_py.data.feed import Feed
from crossbow_py.many.members import Ids
from crossbow_py.train.evaluation.evaluator import Evaluator

State = Mapping[str, Tensor]
FEW = 12  # members that are shown one by one; more are a band
BAND = (10, 90)  # percentiles
_MOST_GROUPS = 8  # curves that can be told apart
_BEST, _WORST = 10, 3  # lines of a table that does not show all
Status = Literal["finished", "stopped early", "failed", "not finished"]


@dataclass(frozen=True, eq=False)
class MemberResult:
    """What became of a member.

    Attributes:
        name, group: its name, and the group that it is summed up with.
        seed: its seed.
        status: `finished`; `stopped early` by its patience; `failed`, see `reason`; or `not finished`, as Ctrl-C ended
            the call before.
        epochs: passes over its samples.
        best_epoch: the epoch of the weights that it returns.
        test_loss, test_accuracy, test_metrics: on the test data; None without, accuracy also without classes.
        validation_loss, validation_accuracy, validation_metrics: at `best_epoch`, on its own validation samples or the
            validation data.
        history: a dict for each evaluation on the way: epoch, samples, train_loss, and what was measured.
        reason: why it failed.
        held_out: its own validation samples.
        state: the model's weights and buffers by name, on the host; empty if it failed. Frozen parameters that
            members share are one memory: copy a state before it is written.
    """

    name: str
    seed: int
    status: Status
    epochs: float = 0.0
    best_epoch: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_metrics: dict[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validation_metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list, repr=False)
    reason: str | None = None
    state: State = field(default_factory=dict, repr=False)
    group: str | None = None
    held_out: int = 0
    _module: Callable[[], nn.Module] | None = field(default=None, repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in float32 and evaluation mode, which shares no memory. Raises UserError if it failed."""
        if self._module is None:
            why = f"it failed: {self.reason}" if self.status == "failed" else "it was stopped before it began"
            raise UserError(f"member {self.name} has no model, as {why}.")
        return self._module()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but the model, whose weights are in `state`."""
        kept = {name: value for name, value in vars(self).items() if name != "model"}
        return {**kept, "_module": self._module and _not_pickled}

    @property
    def has_ended(self) -> bool:
        """Whether it was trained to its end, by itself or by its patience."""
        return self.status in ("finished", "stopped early")

    def figures(self) -> dict[str, float]:
        """Return what was measured, by name, such as `test_loss`, without what is not there."""
        found = {}
        for what in ("validation", "test"):
            for name in ("loss", "accuracy"):
                found[f"{what}_{name}"] = getattr(self, f"{what}_{name}")
            found |= {f"{what}_{name}": value for name, value in getattr(self, f"{what}_metrics").items()}
        return {name: value for name, value in found.items() if value is not None}


class Results(Sequence[MemberResult]):
    """The results of all members, in their order; `print` shows the table.

    Attributes:
        num_samples: N, the training samples.
        images_per_s: samples a second of training, all members together.
        wall_s: seconds that the call took.
        notes: what was said on the way.
        path: the folder that has them; None if nothing was written.
    """

    def __init__(
        self, members: Sequence[MemberResult], num_samples: int, images_per_s: float, wall_s: float,
        notes: Sequence[str] = (), path: Path | None = None,
        held_out: Callable[[], Iterator[tuple[int, Ids, Evaluator, Feed]]] | None = None,
        together: Callable[[Sequence[MemberResult], Sequence[int]], dict[str, float] | None] | None = None,
        selected: Callable[[Sequence[MemberResult], int], list[int]] | None = None,
    ) -> None:  # fmt: skip
        self._members, self.num_samples = tuple(members), num_samples
        self.images_per_s, self.wall_s, self.notes, self.path = images_per_s, wall_s, tuple(notes), path
        self._held_out, self._together, self._selected = held_out, together, selected

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but models and data, which `ensemble` and `out_of_fold` need."""
        without = {name: getattr(self, name) and _not_pickled for name in ("_held_out", "_together", "_selected")}
        return {**vars(self), **without}

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> MemberResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MemberResult]: ...
    def __getitem__(self, index: int | slice) -> MemberResult | Sequence[MemberResult]:
        return self._members[index]

    @property
    def models(self) -> list[nn.Module]:
        """The models of the members that have one."""
        return [each.model for each in self if each.state]

    def summary(self) -> dict[str, Estimate]:
        """Return the mean of what was measured over the members, with its 95 % confidence interval by Student's t.

        Only members that have ended count, here and in groups, `ensemble` and `out_of_fold`. Members of one fold or
        data set are not independent: their interval says how far seeds go, no more.
        """
        return _means(self)

    def groups(self) -> dict[str, dict[str, Estimate]]:
        """Return the summary of each group of members; empty without groups."""
        names = dict.fromkeys(each.group for each in self if each.group is not None)
        return {name: _means([each for each in self if each.group == name]) for name in names}

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dict for each member, as `pandas.DataFrame` takes a list of them."""
        return [
            {
                "name": each.name,
                "group": each.group,
                "seed": each.seed,
                "status": each.status,
                "epochs": each.epochs,
                "best_epoch": each.best_epoch,
                "reason": each.reason,
                **each.figures(),
            }
            for each in self
        ]

    def best_first(self) -> list[MemberResult]:
        """Return the members that have ended, the best first: by accuracy, then by loss.

        Both are those of the validation data where there is some, else of the test data, else the training loss, if
        all members have the targets' unit. Members that lack what others have come after these, in the same way.
        """
        ended = [each for each in self if each.has_ended]
        units = {tuple(each.state["target_std"].tolist()) for each in ended if "target_std" in each.state}
        parts = ("validation", "test") if len(units) > 1 else ("validation", "test", "train")

        def key(each: MemberResult) -> list[float]:
            own = each.figures()
            own |= {name: value for name, value in (each.history or [{}])[-1].items() if name == "train_loss"}
            pairs = [(-own.get(f"{part}_accuracy", 0.0), own.get(f"{part}_loss", math.inf)) for part in parts]
            return [value for pair in pairs for value in pair]

        return sorted(ended, key=key)

    def table(self, most: int = 40) -> str:
        """Return a table: a line for each member, and for the mean of each group, or of all without several groups.

        Of more than `most` members it shows the best, the worst, and how many ended how; groups likewise.
        """
        means = self.summary()
        names, ranked = list(dict.fromkeys(name for each in self for name in each.figures())), self.best_first()
        head = ["member", "epochs", *(name.replace("_", " ") for name in names)]

        def line(each: MemberResult) -> list[str]:
            own = each.figures()
            shown = [f"{own[name]:.4g}" if name in own else "–" for name in names]
            epochs = round(each.epochs, 1 if each.epochs >= 1 else 3)
            return [f"{each.name}{'' if each.has_ended else f' ({each.status})'}", f"{epochs:g}", *shown]

        groups = self.groups() if len(self) > 1 else {}
        if len(groups) > most:  # by their best members
            groups = {each.group: groups[each.group] for each in ranked if each.group is not None}
        lines = _ends([line(each) for each in (self if len(self) <= most else ranked)], most, "members")
        means_of = [
            [f"mean of {group}", "", *(str(its.get(name, "–")) for name in names)] for group, its in groups.items()
        ]
        lines += _ends(means_of, most, "groups")
        if means and len(groups) < 2:
            lines.append([f"mean of {len(ranked)}", "", *(str(means.get(name, "–")) for name in names)])
        text = columns(head, lines)
        if len(self) > most:
            how = ", ".join(f"{count} {status}" for status, count in Counter(each.status for each in self).items())
            text.insert(0, f"  {len(self)} members: {how}; the best first")
        return "\n".join(text)

    __str__ = table

    def __repr__(self) -> str:
        ended = sum(each.has_ended for each in self)
        means = ", ".join(f"{name} {own}" for name, own in self.summary().items())
        return f"<Results of {len(self)} members, {ended} finished: {means or 'nothing was measured'}>"

    def ensemble(self, members: Sequence[MemberResult] | None = None) -> dict[str, float] | None:
        """Return what members together have on the test data: accuracy, loss and metrics of their mean prediction.

        Metrics get it as scores, logarithms of mean probabilities where the loss is cross-entropy.
        None without test data, or with fewer than two models of all.

        Args:
            members: some of these results, as of `selected`; one that is there twice weighs twice. By default all.

        Raises UserError for a member of other results.
        """
        given = [each for each in (self if members is None else members) if each.has_ended]
        weights = [sum(own is each for own in given) for each in self]
        if sum(weights) != len(given):
            raise UserError("ensemble takes members of these results; got one of others.")
        enough = len(given) >= (2 if members is None else 1)
        return self._together(self, weights) if self._together is not None and enough else None

    def selected(self, most: int = 16) -> list[MemberResult]:
        """Return members that predict the validation data best together, found by greedy ensemble selection.

        From the best member on, each step adds the one after which the loss of the mean prediction is the least, also
        one that is there already; Caruana et al. (2004). `ensemble(selected())` says what they have on the test data.

        Args:
            most: how many at most, with repetitions; often much fewer are different.

        Raises UserError unless all members share validation samples.
        """
        if self._selected is None or most < 1 or not any(each.has_ended for each in self):
            raise UserError(f"selected(most={most}) needs most of 1 or more, and members that have ended.")
        return [self[number] for number in self._selected(self, most)]

    def out_of_fold(self) -> Tensor:
        """Return predictions [N, ...] of the training samples by the members that were measured on them, on the host.

        A sample that several members held out, as with several seeds a fold, has the mean of their outputs, scores as
        probabilities where the loss is cross-entropy; one that none held out is NaN.

        Raises UserError if no member has validation samples of its own.
        """
        total: Tensor | None = None
        counts = torch.zeros(self.num_samples)
        for number, ids, evaluator, feed in self._held_out() if self._held_out is not None else ():
            found = evaluator.predict(self[number].state, feed).cpu()
            if total is None:
                total = torch.zeros(self.num_samples, *found.shape[1:], dtype=found.dtype)
            places = torch.from_numpy(ids)
            total[places] += found
            counts[places] += 1
        if total is None:
            raise UserError("no member has validation samples of its own; give Member(subset=fold) of folds(...).")
        shape = (-1, *[1] * (total.ndim - 1))
        return torch.where((counts > 0).view(shape), total / counts.clamp(min=1).view(shape), math.nan)


def _not_pickled(*_: object) -> Any:
    raise UserError("results that were pickled have figures and weights alone; ask for models and predictions before.")


def _ends(lines: list[list[str]], most: int, what: str) -> list[list[str]]:
    """Return the lines of a table; of more than `most` the first and the last."""
    if len(lines) <= max(most, _BEST + _WORST):
        return lines
    between = [f"... {len(lines) - _BEST - _WORST} {what} between", *[""] * (len(lines[0]) - 1)]
    return [*lines[:_BEST], between, *lines[-_WORST:]]


def _means(members: Sequence[MemberResult]) -> dict[str, Estimate]:
    every = [each.figures() for each in members if each.has_ended]
    names = dict.fromkeys(name for own in every for name in own)
    found = {name: estimate([own[name] for own in every if name in own]) for name in names}
    return {name: own for name, own in found.items() if own is not None}


@dataclass(frozen=True)
class Curve:
    """The median of a figure over several members, and its band, by epoch."""

    epochs: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]


def curve(members: Sequence[MemberResult], name: str) -> Curve:
    """Return the percentiles of a figure over members, at the evaluations that at least half of them have.

    Epochs of members of unequal folds end a batch apart, so the first evaluation of each goes with that of the others.
    """
    points = [[(entry["epoch"], entry[name]) for entry in each.history if name in entry] for each in members]
    rows = zip_longest(*points)  # by evaluation
    found = [[point for point in row if point is not None] for row in rows]
    kept = [list(zip(*own, strict=True)) for own in found if 2 * len(own) >= len(members)]
    epochs = [float(np.median(at)) for at, _ in kept]
    low, middle, high = ([float(np.percentile(own, share)) for _, own in kept] for share in (BAND[0], 50, BAND[1]))
    return Curve(epochs, low, middle, high)


def by_group(results: Results) -> dict[str, list[MemberResult]]:
    """Return the members with a history by their group; all as one where there are more groups than curves may be."""
    found: dict[str, list[MemberResult]] = defaultdict(list)
    for each in results:
        if each.history:
            found[each.group or ""].append(each)
    return found if len(found) <= _MOST_GROUPS else {"": [each for own in found.values() for each in own]}
