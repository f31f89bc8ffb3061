"""The user's own data: a function, named by its dotted path, that returns train, test and perhaps validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.core.targets import call_target
from crossbow_py.data.datasets import Collated, Data, as_pair, check_data, has_integers, in_tensors
from crossbow_py.data.sources.base import SourceSettings

_MOST_CLASSES = 2**24  # larger targets are numbers, not classes


@dataclass(frozen=True)
class Custom(SourceSettings):
    """Data from `target(**args)`: (train, test) or (train, test, validation), pairs of tensors or map-style data."""

    NAME = "custom"

    target: str = setting("", "dotted path pkg.module.function; it returns (train, test), or validation data too")
    args: dict[str, Any] = setting({}, "keyword arguments of that function")
    num_classes: int | None = setting(None, "number of classes; null takes it from the data set", minimum=1)

    def read(self, progress: bool) -> tuple[Data, Data] | tuple[Data, Data, Data]:
        result = call_target("data", self.target, self.args)
        if not isinstance(result, tuple | list) or len(result) not in (2, 3):
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            rule = f"data.target={self.target} must return (train, test), got {type(result).__name__}{size}"
            raise UserError(f"{rule}; end it with `return train, test`.")
        train, test, *validation = found = [in_tensors(data) for data in result]
        for data, what in zip(found, ("train", "test", "validation"), strict=False):
            check_data(data, f"the {what} data of data.target={self.target}")
        if len(result) == 3 and self.validation_fraction:
            raise UserError(
                f"data.target={self.target} returns validation data, and data.validation_fraction="
                f"{self.validation_fraction} holds out some; set it to 0."
            )
        return (train, test, validation[0]) if validation else (train, test)

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Return None: inputs are not normalised (uint8 images are scaled to [0, 1])."""
        return None, None

    def count_classes(self, train: Data, test: Data) -> int | None:
        """Return the number that was set, else `len(dataset.classes)`, else the largest integer target + 1, else None.

        Raises UserError for targets too large for the outputs of any model.
        """
        if self.num_classes is not None:
            return self.num_classes
        counts = [_classes_of(data) for data in (train, test)]
        known = [count for count in counts if count is not None]
        if known and not 0 < max(known) <= _MOST_CLASSES:
            found = f"the targets of data.target={self.target} are taken for classes up to {max(known) - 1}"
            raise UserError(f"{found}; number them from 0 to at most {_MOST_CLASSES - 1}, or set data.num_classes.")
        return max(known) if known else None


def _classes_of(data: Any) -> int | None:
    pair = as_pair(data)
    while pair is None and isinstance(data, Subset | Collated):
        data = data.dataset
    if pair is None and hasattr(data, "classes"):
        return len(data.classes)
    targets = getattr(data, "targets", None) if pair is None else pair[1]
    if isinstance(targets, Tensor):
        return int(targets.max()) + 1 if has_integers(targets) else None
    if isinstance(targets, list) and targets and all(isinstance(target, int) for target in targets):
        return int(max(targets)) + 1
    return None
