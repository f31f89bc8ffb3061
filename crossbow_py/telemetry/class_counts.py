"""The confusion matrix of an evaluation, and precision, recall, F1 and IoU of every class. Pure."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Counts = np.ndarray[Any, np.dtype[np.int64]]

_CORNER, _NOT_FINITE = "class", "not finite"  # of the file's header
_NONE = "–"
MEAN = "mean of the classes"


@dataclass(frozen=True)
class ClassFigures:
    """The figures of a class; None where there is nothing to divide by.

    Attributes:
        name: the class's name, or its number.
        precision: share of the predictions of this class that are right; None without any.
        recall: share of the samples of this class that were predicted as it; None without any.
        f1: harmonic mean of both, 2·TP / (2·TP + FP + FN).
        support: samples (or pixels, tokens) of this class.
        iou: intersection over union, TP / (TP + FP + FN), for masks.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    iou: float | None = None


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """The confusion matrix of an evaluation of C classes.

    Attributes:
        counts: int64 [C, C + 1]: by class, how often each was predicted; the last column counts non-finite outputs.
        class_names: names by class; empty, or shorter, if they are not known.
        of_positions: whether positions of samples are counted, such as the pixels of masks.
    """

    counts: Counts
    class_names: tuple[str, ...] = ()
    of_positions: bool = False

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.counts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all classes, or their numbers; a name that several classes have with its number."""
        known, often = self.class_names[: self.num_classes], Counter(self.class_names)
        own = (name if often[name] == 1 else f"{name} ({label})" for label, name in enumerate(known))
        return (*own, *map(str, range(len(known), self.num_classes)))

    @property
    def num_non_finite(self) -> int:
        """The number of samples whose outputs are not finite."""
        return int(self.counts[:, -1].sum())

    def figures(self) -> tuple[ClassFigures, ...]:
        """Return the figures of every class."""
        support, predicted, right = self.counts.sum(1), self.counts[:, :-1].sum(0), self.counts.diagonal()
        return tuple(
            ClassFigures(
                name=name, precision=_share(tp, p), recall=_share(tp, n), f1=_share(2 * tp, p + n), support=n,
                iou=_share(tp, p + n - tp) if self.of_positions else None,
            )
            for name, n, p, tp in zip(self.names, support.tolist(), predicted.tolist(), right.tolist(), strict=True)
        )  # fmt: skip

    def confusions(self, most: int) -> list[tuple[int, int, int]]:
        """Return the most frequent mistakes as (count, class, predicted class), the most frequent first."""
        wrong = self.counts[:, :-1].copy()
        np.fill_diagonal(wrong, 0)
        largest = np.argsort(-wrong, axis=None, kind="stable")[:most]
        places = [divmod(int(place), self.num_classes) for place in largest]
        return [(int(wrong[place]), *place) for place in places if wrong[place]]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def mean_figures(figures: Sequence[ClassFigures]) -> ClassFigures:
    """Return the plain means over the classes that have a value, and all support: macro F1, mean IoU, and so on."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return ClassFigures(
        name=MEAN,
        precision=mean(each.precision for each in figures),
        recall=mean(each.recall for each in figures),
        f1=mean(each.f1 for each in figures),
        support=sum(each.support for each in figures),
        iou=mean(each.iou for each in figures),
    )


def written_share(value: float | None) -> str:
    """Return a share for a table; a dash for None."""
    return _NONE if value is None else f"{value:.4f}"


def class_rows(figures: Sequence[ClassFigures]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table of classes, and their means below."""
    has_iou = any(each.iou is not None for each in figures)
    rows = []
    for each in (*figures, mean_figures(figures)):
        shares = (each.precision, each.recall, each.f1, *([each.iou] if has_iou else []))
        rows.append([each.name, *map(written_share, shares), f"{each.support:,}"])
    return ["class", "precision", "recall", "F1", *(["IoU"] if has_iou else []), "support"], rows


def markdown_table(figures: Sequence[ClassFigures]) -> str:
    """Return the figures as a table in Markdown, and their means."""
    heads, rows = class_rows(figures)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *([_escaped(name), *rest] for name, *rest in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(name: str) -> str:
    return " ".join(name.split()).replace("\\", "\\\\").replace("|", "\\|")


def as_csv(counts: ClassCounts) -> str:
    """Return the matrix as a CSV file: a row for each class, a column for each predicted one."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_CORNER, *counts.names, _NOT_FINITE])
    writer.writerows([name, *row] for name, row in zip(counts.names, counts.counts.tolist(), strict=True))
    return file.getvalue()


def from_csv(text: str) -> ClassCounts:
    """Return the matrix in a CSV file, as `as_csv` writes it. Raises ValueError for anything else."""
    try:
        header, *rows = csv.reader(io.StringIO(text))
        names = [name for name, *_ in rows]
        counts = np.array([[int(value) for value in row] for _, *row in rows], dtype=np.int64)
    except (csv.Error, ValueError, OverflowError) as error:
        raise ValueError("no confusion matrix") from error
    if header != [_CORNER, *names, _NOT_FINITE] or counts.shape != (len(names), len(names) + 1) or counts.min() < 0:
        raise ValueError("no confusion matrix")
    return ClassCounts(counts, tuple(names))
