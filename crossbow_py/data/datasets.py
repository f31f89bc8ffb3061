"""Data sets: a pair of tensors or a map-style data set. Checks of inputs and labels, subsets, the validation split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from crossbow_py.core.errors import UserError, one_line, raised_at
from crossbow_py.data.randomness import permutation
from crossbow_py.data.streaming.streamed_data import StreamedData

# The split into train and validation is a property of the data set, not of the run: the same for every seed.
_SPLIT_SEED = 0


class MapStyleDataset(Protocol):
    """A data set with a length whose items are (input, target), such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the (input, target) of one sample."""


Pair = tuple[Tensor, Tensor]
Data = Pair | MapStyleDataset


def as_pair(data: Data) -> Pair | None:
    """Return (inputs, targets) if `data` is a pair of tensors or a TensorDataset of two, else None."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    return (data[0], data[1]) if _is_tensor_pair(data) else None


def check_data(data: Any, what: str) -> None:
    """Check that `data`, called `what` in the message, is a data set. Raises UserError."""
    needs = f"{what} must be a pair of tensors (inputs, targets) or a map-style data set of (input, target) items"
    if _is_tensor_pair(data) or isinstance(data, TensorDataset):
        _check_tensors(data.tensors if isinstance(data, TensorDataset) else data, what, needs)
        return
    if isinstance(data, tuple):
        kinds = ", ".join(type(entry).__name__ for entry in data)
        raise UserError(f"{needs}, got a tuple of ({kinds}); NumPy arrays become tensors by torch.from_numpy.")
    if isinstance(data, DataLoader):
        raise UserError(f"{needs}, got a DataLoader; give the data set in it, loader.dataset.")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"{needs}, got {type(data).__name__}; it needs __len__ and __getitem__.")
    if len(data) == 0:
        raise UserError(f"{what} must hold at least one sample, got none; check its path and filter.")
    _check_item(data, what)


def has_integers(targets: Tensor) -> bool:
    """Return whether targets are integers, and so may be classes."""
    return not targets.is_floating_point() and not targets.is_complex()


def num_samples(data: Data) -> int:
    """Return the number of samples."""
    pair = as_pair(data)
    return len(data) if pair is None else len(pair[0])


def input_shape(data: Data) -> tuple[int, ...]:
    """Return the shape of one input without the batch axis; the first item's for a map-style data set."""
    pair = as_pair(data)
    shape = np.shape(data[0][0]) if pair is None else pair[0].shape[1:]
    return tuple(int(extent) for extent in shape)


def take(data: Data, ids: npt.NDArray[np.int64]) -> Data:
    """Return the samples `ids` in that order: a copy of a pair of tensors, a view of any other data set."""
    streamed: Any = data
    if isinstance(streamed, StreamedData):
        view: Any = streamed.subset(ids)
        return view  # type: ignore[no-any-return]
    pair = as_pair(data)
    if pair is None:
        subset: Subset[Any] = Subset(data, ids.tolist())  # type: ignore[arg-type]  # typed narrower than it works
        return subset
    index = torch.from_numpy(ids).to(pair[0].device)
    return pair[0].index_select(0, index), pair[1].index_select(0, index.to(pair[1].device))


def split_validation(train: Data, fraction: float) -> tuple[Data, Data | None]:
    """Split the training data into (train, validation), always in the same way, each part in the data set's order.

    The validation part of a map-style data set goes through that data set's own transforms. It is None for a `fraction`
    of 0.

    Raises:
        UserError: a part would be empty.
    """
    if fraction == 0:
        return train, None
    total = num_samples(train)
    held_out = round(fraction * total)
    if not 0 < held_out < total:
        raise UserError(
            f"data.validation_fraction={fraction} of {total} training samples leaves a part empty; choose a fraction "
            f"between {1 / total:.2g} and {1 - 1 / total:.6g}, or 0."
        )
    order = permutation(_SPLIT_SEED, "validation split", 0, total)
    return take(train, np.sort(order[held_out:])), take(train, np.sort(order[:held_out]))


def _is_tensor_pair(data: Any) -> TypeGuard[Pair]:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(entry, Tensor) for entry in data)


def _check_tensors(tensors: tuple[Tensor, ...], what: str, needs: str) -> None:
    if len(tensors) != 2:
        raise UserError(f"{needs}, got a TensorDataset of {len(tensors)} tensors; give it inputs and targets alone.")
    inputs, targets = tensors
    if inputs.ndim < 2 or targets.ndim < 1:
        raise UserError(
            f"{what} must have inputs [N, ...] and targets [N], got shapes {tuple(inputs.shape)} and "
            f"{tuple(targets.shape)}; add the missing axis."
        )
    _check_extents(what, inputs.shape[1:], targets.shape[1:])
    if len(inputs) != len(targets) or len(inputs) == 0:
        remedy = "give it samples" if len(inputs) == len(targets) else "see that both are of the same samples"
        raise UserError(
            f"{what} must have as many inputs as targets and at least one, got {len(inputs)} and {len(targets)}; "
            f"{remedy}."
        )


def _check_extents(what: str, *shapes: Sequence[int]) -> None:
    for name, shape in zip(("inputs", "targets"), shapes, strict=True):
        if 0 in shape:
            raise UserError(
                f"{what} must have values in every sample, but its {name} are of shape {list(shape)}; look at how they "
                "are cropped or selected."
            )


def _check_item(data: MapStyleDataset, what: str) -> None:
    try:
        item = data[0]
    except Exception as error:
        raise UserError(
            f"{what} must give an item for index 0, but raised {one_line(error)}{raised_at(error)}; have its "
            "__getitem__ return (input, target) for every number from 0 to len() - 1."
        ) from error
    if isinstance(item, tuple | list) and len(item) == 2:
        _check_extents(what, *(getattr(entry, "shape", ()) for entry in item))
        return
    needs = f"the items of {what} must be (input, target), but item 0 is"
    if isinstance(item, Mapping):
        keys = list(item)
        entries = ", ".join(f"item[{key!r}]" for key in (keys[:1] + keys[-1:] if len(keys) > 1 else keys))
        raise UserError(
            f"{needs} a mapping with the keys {', '.join(map(str, keys[:8]))}; wrap the data set in one that returns a "
            f"pair, as in: return {entries or '...'}."
        )
    size = f" with {len(item)} entries" if isinstance(item, tuple | list) else ""
    raise UserError(f"{needs} of type {type(item).__name__}{size}; return one input and one target.")


def counted(targets: Tensor, ignored: int) -> Tensor:
    """Return a mask of the targets that are not `ignored`. torch would compare uint8 targets with 156 for -100."""
    return (targets.long() if targets.dtype == torch.uint8 else targets) != ignored


@dataclass(frozen=True)
class Classes:
    """Labels from 0 to `num_classes` − 1, and `ignored`, which the loss leaves out."""

    num_classes: int
    ignored: int

    def first_outside(self, targets: Tensor) -> tuple[int, int] | None:
        """Return (sample, label) of the first integer target [N, ...] that is no such label, None if there is none."""
        if not has_integers(targets):
            return None
        outside = ((targets < 0) | (targets >= self.num_classes)) & counted(targets, self.ignored)
        if not outside.any():
            return None
        sample = int(outside.flatten(1).any(1).int().argmax() if outside.ndim > 1 else outside.int().argmax())
        return sample, int(targets[sample][outside[sample]].flatten()[0])

    def refusal(self, what: str, label: int) -> str:
        """Return the error message for a `label` outside; `what` says where it is."""
        return (
            f"{what} has the class {label}, and the model tells {self.num_classes} classes apart, which are 0 to "
            f"{self.num_classes - 1} ({self.ignored} is left out of the loss); correct that target, give the model "
            f"more outputs, or, if {label} marks targets to be left out, give the loss "
            f"nn.CrossEntropyLoss(ignore_index={label})."
        )


def is_image_batch(inputs: Tensor) -> bool:
    """Return whether inputs are images: uint8 [N, C, H, W]."""
    return inputs.dtype == torch.uint8 and inputs.ndim == 4


def is_clip_batch(inputs: Tensor) -> bool:
    """Return whether inputs are clips: uint8 [N, C, T, H, W]."""
    return inputs.dtype == torch.uint8 and inputs.ndim == 5
