"""Data sets whose images worker processes transform: in one way for training, in another one to evaluate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UserError
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, map_tree
from crossbow_py.data.datasets import Collated, Data, MapStyleDataset, Pair, as_pair, class_labels, split_item, take
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.images.transforms import Form, Transforms
from crossbow_py.data.streaming.items import ItemData, seed_generators
from crossbow_py.data.streaming.streamed_data import Key


class TransformedData(ItemData):
    """Items of `dataset` with their images transformed, and Pillow images as bytes [C, H, W].

    It is also a map-style data set of the items as they are evaluated. The image of an item is its only input, or the
    only Pillow image or array [., ., .] among several; there may be other images if none is transformed.

    Attributes:
        form: shape and dtype of the images, None if an item has several.

    Raises UserError if the first item cannot be transformed.
    """

    def __init__(self, dataset: MapStyleDataset, transforms: Transforms, form: Form | None = None) -> None:
        super().__init__(dataset)
        self._transforms, self.labels = transforms, class_labels(dataset)
        if hasattr(dataset, "classes"):
            self.classes = dataset.classes
        self.form = form
        inputs, _ = split_item(dataset[0])  # type: ignore[misc]  # it was checked
        if form is None and len(self._places(pytree.tree_leaves(inputs), 0, training=True)) == 1:
            self.form = transforms.form(self._first_image)

    def __getitem__(self, index: int) -> Any:
        """Return an item as it is evaluated."""
        with kept_generators():  # those of whoever looks at it
            seed_generators(0, Key(0, index))
            return self._prepared(self.dataset[index], index, training=False)

    def subset(self, ids: npt.NDArray[np.int64]) -> TransformedData:
        part: Any = take(self.dataset, ids)
        return TransformedData(part, self._transforms, self.form)

    def _prepared(self, item: Any, sample: int, training: bool) -> Any:
        found = split_item(item)
        if found is None:
            return item
        inputs, target = found
        values, tree = pytree.tree_flatten(inputs)
        for place in self._places(values, sample, training):
            values[place] = self._transforms(values[place], training, self.name_of(sample), self.form)
        return tree.unflatten(values), target

    def _places(self, values: list[Any], sample: int, training: bool) -> list[int]:
        """Return which of an item's inputs are images. Raises UserError if there is not one to transform."""
        places = [0] if len(values) == 1 else [place for place, value in enumerate(values) if _is_image(value)]
        transforms = self._transforms
        if len(places) != 1 and (transforms.changes(training=True) or transforms.changes(training=False)):
            has = f"{self.name_of(sample)} has {len(places)} among its inputs; transform them inside the data set"
            raise UserError(f"{transforms.name(training)} transforms one image of a sample, and {has}.")
        return places

    def _first_image(self, training: bool) -> Tensor:
        seed_generators(0, Key(0, 0))
        inputs, _ = split_item(self._prepared(self.dataset[0], 0, training))  # type: ignore[misc]  # it was checked
        values = pytree.tree_leaves(inputs)
        image: Tensor = values[self._places(values, 0, training)[0]]
        return image


def transformed(data: Data, transforms: Transforms, training: bool) -> Data:
    """Return a data set, to train on or to evaluate, with its images transformed. Raises UserError if that cannot be.

    Tensors become items that workers transform, unless there is nothing to do.
    """
    given: Any = data
    if isinstance(given, ImageFolderData):
        return given.with_transforms(transforms)
    if isinstance(data, Collated):
        raise UserError(
            f"{transforms.name(training)} is for single images, and the data set makes batches by its own collate; "
            "transform them there, or inside the data set."
        )
    pair = as_pair(data)
    if pair is None:
        return TransformedData(given, transforms)
    return TransformedData(_Rows(pair), transforms) if transforms.changes(training) else data


class _Rows:
    """Tensors (inputs, targets) as items."""

    def __init__(self, pair: Pair) -> None:
        self._pair, self.targets = pair, pair[1]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tree, Tensor]:
        inputs, targets = self._pair
        return map_tree(lambda values: values[index], inputs), targets[index]


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 3)
