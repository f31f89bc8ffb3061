"""Independent learners side by side: the settings that each has of its own, what was measured of it, the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crossbow_py.telemetry.figures import number

MOST_LEARNERS = 32  # that have a curve each in TensorBoard, and a line on the terminal
_MEASURED = {
    "validation_accuracy": "validation accuracy", "validation_loss": "validation loss",
    "test_accuracy": "test accuracy", "test_loss": "test loss",
}  # fmt: skip
_LONG_LOSS = 1e5  # from which on four decimals mean nothing


@dataclass(frozen=True, kw_only=True)
class LearnerFigures:
    """An independent learner, whose number is its place in the list.

    Attributes:
        settings: the optimizer's settings that are lists, by name, such as `learning_rate`.
        validation_accuracy, validation_loss, test_accuracy, test_loss: of the learner's model as it was saved; None
            where it was not measured.
        is_best: whether no other has a higher accuracy or, without classes or between equals, a lower loss: on
            validation data, if there are any, else on test data.
    """

    settings: dict[str, float] = field(default_factory=dict)
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    is_best: bool = False


def with_best(learners: Sequence[LearnerFigures]) -> tuple[LearnerFigures, ...]:
    """Return the learners with the best one marked; none if all losses are not finite."""
    which = "validation" if any(each.validation_loss is not None for each in learners) else "test"

    def rank(place: int) -> tuple[float, float]:
        accuracy, loss = (getattr(learners[place], f"{which}_{name}") for name in ("accuracy", "loss"))
        return (0.0 if accuracy is None else accuracy), -loss

    losses = [getattr(each, f"{which}_loss") for each in learners]
    finite = [place for place, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    best = max(finite, key=rank, default=None)
    return tuple(replace(each, is_best=place == best) for place, each in enumerate(learners))


def learner_rows(learners: Sequence[LearnerFigures]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table of learners; the best one has a `*`."""
    settings = list(dict.fromkeys(name for each in learners for name in each.settings))
    measured = [name for name in _MEASURED if any(getattr(each, name) is not None for each in learners)]
    rows = []
    for place, each in enumerate(learners):
        own = [_setting(each.settings[name]) if name in each.settings else "" for name in settings]
        values = [_written(getattr(each, name)) for name in measured]
        rows.append([f"{'* ' if each.is_best else ''}{place}", *own, *values])
    return ["learner", *settings, *(_MEASURED[name] for name in measured)], rows


def learner_table(learners: Sequence[LearnerFigures]) -> str:
    """Return the learners as a table in Markdown."""
    heads, rows = learner_rows(learners)
    lines = [heads, ["---:"] * len(heads), *([row[0].replace("*", "\\*"), *row[1:]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _setting(value: object) -> str:
    found = number(value)  # a file may have anything
    return str(value) if found is None else f"{found:.4g}"


def _written(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < _LONG_LOSS else f"{value:.4g}"
