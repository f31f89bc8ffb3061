"""A map-style data set as streamed data: worker processes fetch its items one by one.

The generators of Python, NumPy and torch, from which a data set may draw, are seeded before every item by the run's
seed, the epoch and the sample, or its place in the epoch where samples are drawn by weights. So its own augmentation
repeats bit for bit, whichever process fetches an item.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from crossbow_py.core.errors import UserError, one_line, raised_at
from crossbow_py.core.trees import Tree, leaves, map_tree
from crossbow_py.data.datasets import Collated, MapStyleDataset, Pair, is_image_batch, split_item, take
from crossbow_py.data.randomness import sample_words
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded, OnSample, StreamedData
from crossbow_py.data.streaming.worker_processes import says_no_shared_memory


class ItemData(StreamedData):
    """Items of `dataset`, see `split_item`. An item that raises is a bad sample, of which none is allowed."""

    def __init__(self, dataset: MapStyleDataset) -> None:
        self.dataset = dataset
        self._items, self._collate = dataset, _collate
        if isinstance(dataset, Collated):
            self._items, self._collate = dataset.dataset, partial(_collate_by, dataset.collate)
            self.one_shape = dataset.one_shape

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(
        self, keys: Sequence[Key], *, seed: int, training: bool, on_sample: OnSample, out: Tensor | None = None
    ) -> Loaded:
        """See `StreamedData.fetch`. Raises UserError for items that cannot be stacked into two tensors."""
        items, samples, bad = [], [], []
        for key in keys:
            on_sample(key.sample)
            seed_generators(seed, key)
            try:
                item = self._items[key.sample]
            except Exception as error:
                reason = one_line(error) + raised_at(error)
                bad.append(BadSample(key.sample, self.name_of(key.sample), reason, traceback.format_exc()))
                continue
            items.append(self._prepared(item, key.sample, training))
            samples.append(key.sample)
        inputs, targets = self._collate(items, samples) if items else (torch.empty(0), torch.empty(0))
        inputs = map_tree(_in_memory_order, inputs)
        return Loaded(inputs, targets, tuple(bad))

    def _prepared(self, item: Any, sample: int, training: bool) -> Any:
        """Return what becomes of an item. Raises UserError."""
        return item

    def name_of(self, sample: int) -> str:
        return f"item {sample} of the data set"

    def subset(self, ids: npt.NDArray[np.int64]) -> ItemData:
        subset: Any = take(self.dataset, ids)
        return ItemData(subset)


_COMPARED = 64  # samples that are read twice
_READ = 256  # samples that are put together at once


def loaded(dataset: MapStyleDataset, memory_bytes: int) -> Pair:
    """Return all samples of a data set of items as tensors, inputs [N, ...] and targets [N, ...].

    Args:
        dataset: a data set that `check_data` has passed.
        memory_bytes: what the tensors may take.

    Raises:
        UserError: they take more; items cannot be read or put together; or one of up to 64, spread over the data, is
            another one when it is read again.
    """
    total = len(dataset)
    places = sorted(set(np.linspace(0, total - 1, min(total, _COMPARED)).astype(int).tolist()))
    first, again = (_read(dataset, places) for _ in range(2))
    pairs = zip(leaves(first), leaves(again), strict=True)
    if not all(torch.equal(own.nan_to_num(), other.nan_to_num()) for own, other in pairs):
        raise UserError(
            "a sample of the training data is another one when it is read again, as by a random transform, and members "
            "read each sample once; leave the transform out, or give augmentation=Augmentation(...)."
        )
    needed = total * sum(own.nbytes for own in leaves(first)) // len(places)
    if needed > memory_bytes:
        raise UserError(
            f"the training data take {needed / 2**30:.3g} GiB, and members learn from data in memory, of which there "
            f"are {memory_bytes / 2**30:.3g} GiB; give fewer samples."
        )
    found: Pair = pytree.tree_map(lambda own: own.new_empty(total, *own.shape[1:]), first)
    for begin in range(0, total, _READ):
        part = _read(dataset, range(begin, min(begin + _READ, total)))
        if [own.shape[1:] for own in leaves(part)] != [own.shape[1:] for own in leaves(first)]:
            raise UserError(f"items from {begin} on have other shapes than item 0; make them the same.")
        for own, values in zip(leaves(found), leaves(part), strict=True):
            own[begin : begin + _READ] = values
    return found


def _read(dataset: MapStyleDataset, places: Sequence[int]) -> Pair:
    """Return samples as tensors; numbers in float64 become float32, as arrays do. Raises UserError."""
    collate = partial(_collate_by, dataset.collate) if isinstance(dataset, Collated) else _collate
    items, every = [], dataset.dataset if isinstance(dataset, Collated) else dataset
    for place in places:
        try:
            items.append(every[place])
        except Exception as error:
            reason = one_line(error) + raised_at(error)
            raise UserError(f"item {place} of the data set cannot be read ({reason}).") from error
    pair: Pair = map_tree(lambda own: own.float() if own.dtype == torch.float64 else own, collate(items, [*places]))
    return pair


def _in_memory_order(inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if is_image_batch(inputs) else inputs


def seed_generators(seed: int, key: Key) -> None:
    """Seed the global CPU generators of Python, NumPy and torch for one sample."""
    words = sample_words(seed, "item", key.epoch, key.draw, 3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1] >> np.uint64(32)))
    torch.default_generator.manual_seed(int(words[2] >> np.uint64(1)))


def _collate(items: list[Any], samples: list[int]) -> tuple[Tree, Tensor]:
    """Stack items into (inputs, targets). Raises UserError if they cannot be stacked into tensors."""
    pairs = [split_item(item) for item in items]
    if any(pair is None for pair in pairs):
        sample, item = next((own, item) for own, item, pair in zip(samples, items, pairs, strict=True) if pair is None)
        found = f"item {sample} is of type {type(item).__name__}"
        raise UserError(f"the items of the data set must be (input, target), but {found}; return inputs and a target.")
    inputs, forms = zip(*(pytree.tree_flatten(_as_tree(pair[0])) for pair in pairs if pair), strict=True)
    if odd := next((index for index, form in enumerate(forms) if form != forms[0]), 0):
        numbers, entries = (f"{own[0]} and {own[odd]}" for own in (samples, list(map(_entries, forms))))
        raise UserError(f"the inputs of items {numbers} have different entries ({entries}); return the same.")
    stacked = [_stack(list(values), samples) for values in zip(*inputs, strict=True)]
    return forms[0].unflatten(stacked), _stack([_as_tree(pair[1]) for pair in pairs if pair], samples)


def _collate_by(collate: Callable[[list[Any]], Any], items: list[Any], samples: list[int]) -> tuple[Tree, Tensor]:
    """Return what a function of the user's makes of items. Raises UserError if it is no batch of so many samples."""
    try:
        batch = collate(items)
    except Exception as error:
        on = f"on {len(items)} items from item {samples[0]} on; have it make a batch of any number of items"
        raise UserError(f"the collate of the data set raised {one_line(error)}{raised_at(error)} {on}.") from error
    found = split_item(batch)
    inputs, targets = (None, None) if found is None else (_as_tree(found[0]), found[1])
    odd = next((own for own in pytree.tree_leaves((inputs, targets)) if not isinstance(own, Tensor)), None)
    if odd is not None or not isinstance(targets, Tensor):
        kind = type(batch if found is None else odd).__name__
        rule = "the collate of the data set must return tensors (inputs, targets), or a mapping with labels"
        raise UserError(f"{rule}, got {kind}; make tensors of what it stacks, and leave the rest out.")
    sizes = [len(own) if own.ndim else 0 for own in (*leaves(inputs), targets)]
    if sizes != [len(items)] * len(sizes):
        rule = "the collate of the data set must return a row for each item"
        raise UserError(f"{rule}, got {sizes} rows for {len(items)} items; stack samples along dimension 0.")
    return inputs, targets


def _as_tree(value: Any) -> Any:
    """Return an item's inputs: dicts with sorted keys for mappings, arrays for lists of numbers (Hugging Face)."""
    if isinstance(value, Mapping):
        return {key: _as_tree(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        if value and all(isinstance(own, bool | int | float | list) for own in value):
            return _as_array(value)
        return [_as_tree(own) for own in value]
    return value


def _entries(form: pytree.TreeSpec) -> str:
    """Return the form of an item's inputs for a message: `{ids: *, mask: *}`, `(*, *)`."""
    if form.is_leaf():
        return "*"
    own = [_entries(child) for child in form.children()]
    if form.type is dict:
        return "{" + ", ".join(f"{key}: {child}" for key, child in zip(form.context, own, strict=True)) + "}"
    return "(" + ", ".join(own) + ")"


def _as_array(values: list[Any]) -> Any:
    """Return a tensor of numbers, or of lists of them; the list itself if these are of different lengths."""
    try:
        array = np.asarray(values)
    except ValueError:
        return values
    return torch.from_numpy(array) if array.dtype.kind in "biuf" else values


def _stack(values: list[Any], samples: list[int]) -> Tensor:
    try:
        stacked = default_collate(values)
    except (TypeError, RuntimeError, ValueError) as error:
        if says_no_shared_memory(error):  # a worker process collates into shared memory
            raise
        reason = str(error).splitlines()[0]
        remedy = "return tensors of equal shape, or pad them in a collate function: Collated(dataset, collate)"
        if isinstance(error, TypeError):  # an entry is no array
            remedy = "return tensors and numbers: of an image, torch.from_numpy(numpy.array(image))"
        shapes = [getattr(value, "shape", ()) for value in values]
        odd = next((index for index, own in enumerate(shapes) if own != shapes[0]), 0)
        reason += f", which are items {samples[0]} and {samples[odd]}" if odd else ""
        raise UserError(f"the samples of the data set cannot be stacked into a batch ({reason}); {remedy}.") from error
    if not isinstance(stacked, Tensor):
        found = f"{type(values[0]).__name__} in item {samples[0]}; make a tensor of it, or leave it out"
        raise UserError(f"the items of the data set must be tensors, arrays and numbers, got {found}.")
    return stacked
