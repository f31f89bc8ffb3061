"""A map-style data set as streamed data: worker processes fetch its items one by one.

The generators of Python, NumPy and torch, from which a data set may draw, are seeded before every item by the run's
seed, the epoch and the sample. So its own augmentation repeats bit for bit, whichever process fetches an item.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from crossbow_py.core.errors import UserError, one_line, raised_at
from crossbow_py.data.datasets import MapStyleDataset, is_image_batch
from crossbow_py.data.randomness import sample_words
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded, OnSample, StreamedData
from crossbow_py.data.streaming.worker_processes import says_no_shared_memory


class ItemData(StreamedData):
    """Items (input, target) of `dataset`. An item that raises is a bad sample, of which none is allowed."""

    def __init__(self, dataset: MapStyleDataset) -> None:
        self.dataset = dataset

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
                items.append(self.dataset[key.sample])
                samples.append(key.sample)
            except Exception as error:
                reason = one_line(error) + raised_at(error)
                bad.append(BadSample(key.sample, self.name_of(key.sample), reason, traceback.format_exc()))
        inputs, targets = _collate(items, samples) if items else (torch.empty(0), torch.empty(0))
        if is_image_batch(inputs):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return Loaded(inputs, targets, tuple(bad))

    def name_of(self, sample: int) -> str:
        return f"item {sample} of the data set"

    def subset(self, ids: npt.NDArray[np.int64]) -> ItemData:
        subset: Subset[Any] = Subset(self.dataset, ids.tolist())  # type: ignore[arg-type]  # narrower than it works
        return ItemData(subset)


def seed_generators(seed: int, key: Key) -> None:
    """Seed the global CPU generators of Python, NumPy and torch for one sample."""
    words = sample_words(seed, "item", key.epoch, key.sample, 3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1] >> np.uint64(32)))
    torch.default_generator.manual_seed(int(words[2] >> np.uint64(1)))


def _collate(items: list[Any], samples: list[int]) -> tuple[Tensor, Tensor]:
    """Stack items into (inputs, targets). Raises UserError if they cannot be stacked into two tensors."""
    try:
        batch = default_collate(items)
    except (TypeError, RuntimeError, ValueError) as error:
        if says_no_shared_memory(error):  # a worker process collates into shared memory
            raise
        reason, remedy = str(error).splitlines()[0], "return tensors of equal shape"
        if isinstance(error, TypeError):  # an entry is no array
            remedy = "return tensors and numbers: of an image, torch.from_numpy(numpy.array(image))"
        shapes = [[getattr(entry, "shape", ()) for entry in item] for item in items if isinstance(item, tuple | list)]
        odd = next((index for index, own in enumerate(shapes) if own != shapes[0]), 0)
        reason += f", which are items {samples[0]} and {samples[odd]}" if odd else ""
        raise UserError(f"the samples of the data set cannot be stacked into a batch ({reason}); {remedy}.") from error
    if len(batch) != 2 or not all(isinstance(entry, Tensor) for entry in batch):
        kinds = ", ".join(type(entry).__name__ for entry in items[0])
        raise UserError(
            f"the items of the data set must be (input tensor, target), one of each, got ({kinds}); return just these "
            "two."
        )
    return batch[0], batch[1]
