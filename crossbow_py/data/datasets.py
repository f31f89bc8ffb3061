"""Data sets: tensors or a map-style data set. Checks of inputs and labels, subsets, the validation split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from crossbow_py.core.errors import UserError, one_line, raised_at
from crossbow_py.core.trees import Tree, leaves, map_tree
from crossbow_py.data.randomness import permutation
from crossbow_py.data.streaming.streamed_data import StreamedData

_TARGET_KEYS = ("labels", "label")  # of items that are mappings, as those of Hugging Face

# The split into train and validation is a property of the data set, not of the run: the same for every seed.
_SPLIT_SEED = 0
_DIGESTED = 64  # samples
_HARDLY_COMPUTED = (torch.uint16, torch.uint32, torch.uint64)


class MapStyleDataset(Protocol):
    """A data set with a length whose items `split_item` takes, such as a `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""


Pair = tuple[Tree, Tensor]
_D = TypeVar("_D")
Data = Pair | MapStyleDataset  # or a mapping of tensors, as `as_pair` takes it


class Collated:
    """A data set whose batches `collate` makes of a list of items, as the `collate_fn` of torch's DataLoader does.

    Args:
        dataset: a map-style data set, whose items may be anything.
        collate: returns a batch's (inputs, targets), or a mapping with `labels`, see `split_item`. Worker processes
            call it.
        one_shape: whether all batches of a size have the same shapes, as if samples are padded to one length. Without
            it the shapes may differ, and learners run one by one: executor=fused puts their batches together.
    """

    def __init__(self, dataset: MapStyleDataset, collate: Callable[[list[Any]], Any], one_shape: bool = False) -> None:
        self.dataset, self.collate, self.one_shape = dataset, collate, one_shape
        if hasattr(dataset, "classes"):
            self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the batch of one item."""
        return self.collate([self.dataset[index]])

    def subset(self, ids: npt.NDArray[np.int64]) -> Collated:
        """Return the items `ids`, in that order."""
        own: Subset[Any] = Subset(self.dataset, ids.tolist())  # type: ignore[arg-type]  # narrower than it works
        return Collated(own, self.collate, self.one_shape)


def first_sample(data: MapStyleDataset) -> tuple[Tree, Any]:
    """Return the (inputs, target) of the first sample of a data set that `check_data` has passed."""
    inputs, target = split_item(data[0])  # type: ignore[misc]
    return map_tree(itemgetter(0), (inputs, target)) if isinstance(data, Collated) else (inputs, target)


def split_item(item: Any) -> tuple[Any, Any] | None:
    """Return the (inputs, target) of a sample, or of a batch of them; None if it has another form.

    Of a mapping the target is the entry `labels`, or `label`. Of a tuple or list it is the last entry: `(x, y)`,
    `(image, features, y)`, as of a TensorDataset; one entry before it is the input itself, several are a tuple.
    """
    if isinstance(item, Mapping):
        key = next((key for key in _TARGET_KEYS if key in item), None)
        return None if key is None or len(item) < 2 else ({k: v for k, v in item.items() if k != key}, item[key])
    if not isinstance(item, tuple | list) or len(item) < 2:
        return None
    return (item[0] if len(item) == 2 else tuple(item[:-1])), item[-1]


def has_named_inputs(data: Data) -> bool:
    """Return whether the inputs of data that `check_data` has passed are dicts."""
    if (pair := as_pair(data)) is not None:
        return isinstance(pair[0], Mapping)
    streamed: Any = data
    return not isinstance(streamed, StreamedData) and isinstance(first_sample(streamed)[0], Mapping)


class _Labelled:
    """A data set whose items have their targets among the inputs too, as the entry `labels`."""

    def __init__(self, dataset: MapStyleDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return _labelled(self.dataset[index])


def _labelled(item: Any) -> tuple[Any, Any]:
    inputs, target = split_item(item)  # type: ignore[misc]  # `check_data` was called
    return {**inputs, _TARGET_KEYS[0]: target}, target


def _labelled_batch(collate: Callable[[list[Any]], Any], items: list[Any]) -> tuple[Any, Any]:
    return _labelled(collate(items))


def with_labels(data: Data) -> Data:
    """Return data whose inputs, dicts, have the targets among them as `labels`, for `model_loss`."""
    if (pair := as_pair(data)) is not None:
        return _labelled(pair)
    if isinstance(data, Collated):
        return Collated(data.dataset, partial(_labelled_batch, data.collate), data.one_shape)
    return _Labelled(data)


def as_pair(data: Data) -> Pair | None:
    """Return (inputs, targets) if `data` is made of tensors, else None."""
    if isinstance(data, TensorDataset):
        return split_item(data.tensors)
    found = split_item(data)
    if found is None or not isinstance(found[1], Tensor) or not leaves(found[0]):
        return None
    return found if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found[0])) else None


def in_tensors(data: _D) -> _D | Data:
    """Return NumPy arrays as tensors, and the tensors of a `Subset`, a copy that is not loaded item by item.

    Arrays of float64, NumPy's default, become float32. Other data are returned as they are. Raises UserError for a
    `Subset` of booleans, which to torch are the places 0 and 1.
    """
    if not isinstance(data, Subset):
        pair: Any = split_item(data)
        is_of_numpy = pair is not None and isinstance(pair[1], np.ndarray) and not isinstance(data, Dataset)
        return pytree.tree_map(_as_tensor, pair) if is_of_numpy else data
    whole: Data = in_tensors(data.dataset)  # type: ignore[arg-type]  # a data set too
    ids = np.asarray(data.indices)
    if ids.dtype == np.bool_:
        raise UserError("a Subset takes places of samples, got booleans; give Subset(data, np.flatnonzero(mask)).")
    pair = as_pair(whole) if ids.ndim == 1 and ids.dtype.kind in "iu" else None
    is_held = pair is not None and len(ids) > 0 and ids.min() >= 0 and ids.max() < len(pair[1])
    return take(whole, ids.astype(np.int64)) if is_held else data


class _Unlabelled:
    """A data set of inputs alone, with zeros as targets."""

    def __init__(self, dataset: MapStyleDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self.dataset[index]
        is_tuple_of_one = isinstance(item, tuple | list) and len(item) == 1
        return item[0] if is_tuple_of_one else item, 0


def with_zeros(data: Any) -> Data | None:
    """Return inputs that are given alone with zeros as targets; None if the data may have targets themselves.

    Inputs are a tensor, an array, a dict of such, or a map-style data set whose items are inputs.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors[0] if len(data.tensors) == 1 else data
    if isinstance(data, Tensor | np.ndarray) or (isinstance(data, Mapping) and split_item(data) is None):
        inputs = pytree.tree_map(_as_tensor, dict(data) if isinstance(data, Mapping) else data)
        every = leaves(inputs)
        return inputs, torch.zeros(len(every[0]) if every and every[0].ndim else 0, dtype=torch.int64)
    is_items = _is_indexed(data) and not isinstance(data, tuple | StreamedData | Collated) and as_pair(data) is None
    try:
        return _Unlabelled(data) if is_items and len(data) and split_item(data[0]) is None else None
    except Exception:  # which `check_data` reports
        return None


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise UserError("a masked array has values that are none; fill them in, as array.filled(0), or leave them out.")
    native = value.dtype.newbyteorder("=")
    wide = native.kind == "u" and native.itemsize > 1  # which torch can hardly compute with
    found = torch.from_numpy(np.ascontiguousarray(value, np.int64 if wide else native))
    return found.float() if found.dtype == torch.float64 else found


def sample_digest(data: Data) -> str | None:
    """Return a short hash of up to 64 samples, spread over the data; None if they are items, which may cost to load."""
    pair = as_pair(data)
    if pair is None:
        return None
    chosen = torch.linspace(0, len(pair[1]) - 1, min(len(pair[1]), _DIGESTED)).long()
    found = hashlib.blake2b(digest_size=8)
    for leaf in (*leaves(pair[0]), pair[1]):
        found.update(
            leaf[chosen.to(leaf.device)].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def check_data(data: Any, what: str) -> None:
    """Check that `data`, called `what` in the message, is a data set. Raises UserError."""
    needs = f"{what} must be tensors (inputs, targets), inputs also as a tuple or dict, or a map-style data set of such"
    pair = as_pair(data)
    if pair is not None:
        _check_tensors(pair, what)
        return
    if isinstance(data, tuple | Mapping | TensorDataset):
        entries = data.tensors if isinstance(data, TensorDataset) else data
        own = [*(entries.items() if isinstance(entries, Mapping) else enumerate(entries))]
        kinds = ", ".join(f"{key}: {type(entry).__name__}" for key, entry in own)
        remedy = "make arrays of lists by np.asarray, and tensors of arrays by torch.from_numpy"
        if any(isinstance(each, np.ndarray) and each.dtype.kind not in "biufc" for _, each in own):
            kinds = ", ".join(f"{key}: {getattr(entry, 'dtype', type(entry).__name__)}" for key, entry in own)
            remedy = "give inputs as x.astype(np.float32), and names of classes as np.unique(y, return_inverse=True)[1]"
        if isinstance(data, Mapping) and not any(key in data for key in _TARGET_KEYS):
            remedy = f"call the targets {_TARGET_KEYS[0]}"
        raise UserError(f"{needs}, got ({kinds}); {remedy}.")
    if isinstance(data, Tensor | np.ndarray):
        raise UserError(f"{needs}, got one array of shape {[*data.shape]}; give a pair, as in (inputs, targets).")
    if isinstance(data, DataLoader):
        remedy = "give the data set in it, loader.dataset, with a collate of its own as Collated(dataset, collate)"
        raise UserError(f"{needs}, got a DataLoader; {remedy}.")
    if not _is_indexed(data):
        raise UserError(f"{needs}, got {type(data).__name__}; it needs __len__ and __getitem__.")
    count, size = len(data), getattr(data, "size", None)
    if isinstance(data, IterableDataset) and size not in (None, count):
        share = f"{type(data).__name__}, whose length {count} is one rank's share of {size}"
        raise UserError(f"{what} must have all samples on every rank, got {share}; wrap it in a class of that length.")
    if len(data) == 0:
        raise UserError(f"{what} must hold at least one sample, got none; check its path and filter.")
    _check_item(data, what)


def _is_indexed(data: Any) -> bool:
    """Return whether samples have numbers. An IterableDataset inherits a `__getitem__` that raises."""
    own = getattr(type(data), "__getitem__", None)
    return hasattr(data, "__len__") and own is not None and own is not Dataset.__getitem__


def has_integers(targets: Tensor) -> bool:
    """Return whether targets are integers, and so may be classes."""
    return not targets.is_floating_point() and not targets.is_complex()


def num_samples(data: Data) -> int:
    """Return the number of samples."""
    pair = as_pair(data)
    return len(data) if pair is None else len(pair[1])


def class_labels(data: Any) -> npt.NDArray[np.int64] | None:
    """Return the integer targets of all samples, [N, ...], without loading any; None if nothing tells them.

    A map-style data set tells them by an attribute `targets` or `labels`, as those of torchvision do.
    """
    pair = as_pair(data)
    if pair is not None:
        return pair[1].cpu().numpy().astype(np.int64) if has_integers(pair[1]) else None
    if isinstance(data, Subset):
        whole = class_labels(data.dataset)
        return None if whole is None else whole[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, Collated):
        return class_labels(data.dataset)
    for name in ("targets", "labels"):
        found = np.asarray(getattr(data, name, ()))
        if found.shape[:1] == (len(data),) and found.dtype.kind in "iu":
            return found.astype(np.int64)
    return None


def input_shape(data: Data) -> tuple[int, ...]:
    """Return the shape of one input without the batch axis; of several inputs, that of the first."""
    pair = as_pair(data)
    if pair is not None:
        return tuple(leaves(pair[0])[0].shape[1:])
    inputs, _ = first_sample(data)
    return tuple(int(extent) for extent in np.shape(pytree.tree_leaves(inputs)[0]))


def take(data: Data, ids: npt.NDArray[np.int64]) -> Data:
    """Return the samples `ids` in that order: a copy of a pair of tensors, a view of any other data set."""
    streamed: Any = data
    if isinstance(streamed, StreamedData):
        view: Any = streamed.subset(ids)
        return view  # type: ignore[no-any-return]
    if isinstance(data, Collated):
        return data.subset(ids)
    pair = as_pair(data)
    if pair is None:
        subset: Subset[Any] = Subset(data, ids.tolist())  # type: ignore[arg-type]  # typed narrower than it works
        return subset
    index = torch.from_numpy(ids)

    def select(values: Tensor) -> Tensor:
        return values.index_select(0, index.to(values.device))

    return map_tree(select, pair[0]), select(pair[1])


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
        remedy = f"choose a fraction between {1 / total:.2g} and {1 - 1 / total:.6g}, or 0"
        raise UserError(f"data.validation_fraction={fraction} of {total} samples leaves a part empty; {remedy}.")
    order = permutation(_SPLIT_SEED, "validation split", 0, total)
    return take(train, np.sort(order[held_out:])), take(train, np.sort(order[:held_out]))


def _check_tensors(pair: Pair, what: str) -> None:
    inputs, targets = pair
    for each in (*leaves(inputs), targets):
        if each.is_meta or each.is_nested or each.layout is not torch.strided:
            kind = "nested" if each.is_nested else "on meta" if each.is_meta else _word(each.layout)
            raise UserError(f"{what} must be dense tensors with values, got one that is {kind}; give x.to_dense().")
        if each.dtype in _HARDLY_COMPUTED:
            raise UserError(f"{what} has a tensor of {_word(each.dtype)}, which torch hardly computes; give x.long().")
    if targets.requires_grad:
        raise UserError(f"the targets of {what} require gradients, which nothing is trained by; give targets.detach().")
    fewest = 2 if isinstance(inputs, Tensor) else 1  # axes: a number a sample is one of several inputs, or a mistake
    for each in leaves(inputs):
        if each.ndim < fewest or targets.ndim < 1:
            shapes = f"{tuple(each.shape)} and {tuple(targets.shape)}"
            raise UserError(f"{what} must have inputs [N, ...] and targets [N], got shapes {shapes}; add an axis.")
        _check_extents(what, each.shape[1:], targets.shape[1:])
        if len(each) != len(targets) or len(each) == 0:
            remedy = "give it samples" if len(each) == len(targets) else "see that both are of the same samples"
            found = f"got {len(each)} and {len(targets)}; {remedy}"
            raise UserError(f"{what} must have as many inputs as targets and at least one, {found}.")


def _word(kind: torch.layout | torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _check_extents(what: str, *shapes: Sequence[int]) -> None:
    for name, shape in zip(("inputs", "targets"), shapes, strict=True):
        if 0 in shape:
            rule = f"{what} must have values in every sample, but its {name} are of shape {list(shape)}"
            raise UserError(f"{rule}; look at how they are cropped or selected.")


def _check_item(data: MapStyleDataset, what: str) -> None:
    try:
        item = data[0]
    except Exception as error:
        remedy = "have its __getitem__ return (input, target) for every number from 0 to len() - 1"
        raise UserError(f"item 0 of {what} raised {one_line(error)}{raised_at(error)}; {remedy}.") from error
    if (found := split_item(item)) is not None:
        target = getattr(found[1], "shape", ())
        for each in pytree.tree_leaves(found[0]):
            _check_extents(what, getattr(each, "shape", ()), target)
        return
    needs = f"the items of {what} must be (input, target), or mappings with {_TARGET_KEYS[0]}, but item 0 is"
    if isinstance(item, Mapping):
        keys = ", ".join(map(str, list(item)[:8]))
        remedy = f"call its target {_TARGET_KEYS[0]}, or wrap the data set in one that returns a pair"
        raise UserError(f"{needs} a mapping with the keys {keys}; {remedy}.")
    size = f" with {len(item)} entries" if isinstance(item, tuple | list) else ""
    raise UserError(f"{needs} of type {type(item).__name__}{size}; return inputs and a target.")


def counted(targets: Tensor, ignored: int) -> Tensor:
    """Return a mask of the targets that are not `ignored`. torch would compare uint8 targets with 156 for -100."""
    return (targets.long() if targets.dtype == torch.uint8 else targets) != ignored


@dataclass(frozen=True)
class Classes:
    """Labels from 0 to `num_classes` − 1, and `ignored`, which the loss leaves out; None if none may be left out."""

    num_classes: int
    ignored: int | None

    def first_outside(self, targets: Tensor) -> tuple[int, int] | None:
        """Return (sample, label) of the first integer target [N, ...] that is no such label, None if there is none."""
        if not has_integers(targets):
            return None
        outside = (targets < 0) | (targets >= self.num_classes)
        if self.ignored is not None:
            outside &= counted(targets, self.ignored)
        if not outside.any():
            return None
        sample = int(outside.flatten(1).any(1).int().argmax() if outside.ndim > 1 else outside.int().argmax())
        return sample, int(targets[sample][outside[sample]].flatten()[0])

    def refusal(self, what: str, label: int) -> str:
        """Return the error message for a `label` outside; `what` says where it is."""
        n = self.num_classes
        has = f"{what} has the class {label}, and the model tells {n} classes apart, 0 to {n - 1}"
        if self.ignored is None:
            mixed = "and mixing leaves no target out of the loss"
            return f"{has}, {mixed}; correct it, give the model more outputs, or set data.mixup=0 data.cutmix=0."
        remedy = f"correct it, give the model more outputs, or set nn.CrossEntropyLoss(ignore_index={label})"
        return f"{has} ({self.ignored} is left out of the loss); {remedy}."


def is_image_batch(inputs: Tensor) -> bool:
    """Return whether inputs are images: uint8 [N, C, H, W]."""
    return inputs.dtype == torch.uint8 and inputs.ndim == 4


def is_clip_batch(inputs: Tensor) -> bool:
    """Return whether inputs are clips: uint8 [N, C, T, H, W]."""
    return inputs.dtype == torch.uint8 and inputs.ndim == 5
