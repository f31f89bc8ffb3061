"""Images in folders as a data set: batches of crops, which worker processes make when they are needed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.data.images.cache import ImageCache
from crossbow_py.data.images.crops import random_resized_box
from crossbow_py.data.images.decoding import UnreadableImage, centre_cropped, crop_resized, decode, shrunk
from crossbow_py.data.images.folder import ImageFiles
from crossbow_py.data.images.transforms import Form, Transforms
from crossbow_py.data.streaming.items import seed_generators
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded, OnSample, StreamedData


class ImageFolderData(StreamedData):
    """Crops uint8 [3, size, size] of images: random and resized ones for training, the centre for evaluation.

    It is also a map-style data set of (centre crop, class), as used for evaluation.

    Args:
        files: the image files.
        size: height and width of the crops.
        resize: short side of the image whose centre is taken for evaluation, and of images in a cache.
        min_area: smallest share of an image's area that a training crop shows.
        max_bad: see `StreamedData`; at most N - 1 of N images.
        timeout_s: see `StreamedData`.
        shrinks: first shrink images to a short side of at most `resize`, then crop. They come from `cache`, and are
            shrunk when needed if it does not have them; the pixels are the same.
        cache: the cache of shrunk images, None for no cache.
        notes: sentences for the user on how this was loaded.

    Attributes:
        form: shape and dtype of the images.
    """

    patience_remedy = ", or allow more by data.worker_timeout_s"
    remedy = "replace the file, or allow more of them by data.max_bad_images"

    def __init__(
        self,
        files: ImageFiles,
        *,
        size: int,
        resize: int,
        min_area: float,
        max_bad: int = 0,
        timeout_s: float = 120.0,
        shrinks: bool = False,
        cache: ImageCache | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.files, self.classes, self.notes = files, files.classes, notes
        self.size, self.resize, self.min_area = size, resize, min_area
        self.timeout_s, self._allowed_bad = timeout_s, max_bad
        self._shrinks, self._cache = shrinks, cache
        self._ids: npt.NDArray[np.int64] | None = None
        self._transforms, self.form = Transforms(), Form((3, size, size), torch.uint8)

    @property
    def max_bad(self) -> int:  # type: ignore[override]
        return min(self._allowed_bad, len(self) - 1)

    @property
    def labels(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        found = np.asarray(self.files.labels, dtype=np.int64)
        return found if self._ids is None else found[self._ids]

    @property
    def has_cache(self) -> bool:
        """Return whether there is a cache to read from."""
        return self._cache is not None

    @property
    def image_shape(self) -> tuple[int, int, int] | None:  # type: ignore[override]
        channels, height, width = self.form.shape
        return (channels, height, width) if self.form.dtype == torch.uint8 else None

    def __len__(self) -> int:
        return len(self.files) if self._ids is None else len(self._ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image, class) of a sample as it is evaluated, or of the next readable one if `max_bad` allows that.

        Raises:
            UserError: more images in a row than allowed cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample, pixels = self._first_readable(index)
        image = self._slots(1)
        with kept_generators():  # those of whoever looks at it
            self._write(pixels, Key(0, sample), 0, False, image)
        return image[0], self._label(sample)

    def with_transforms(self, transforms: Transforms) -> ImageFolderData:
        """Return the same images transformed. The user's own transforms take a whole image, in place of a crop.

        Raises UserError if the first image cannot be transformed.
        """
        part = copy.copy(self)
        part._transforms = transforms
        sample, pixels = self._first_readable(0)
        part.form = transforms.form(lambda training: part._transformed(pixels, Key(0, sample), 0, training, None))
        return part

    def _first_readable(self, index: int) -> tuple[int, Tensor]:
        """Return the first readable sample from `index` on, with its pixels. Raises UserError if there is none."""
        bad: dict[int, BadSample] = {}
        found = self._readable(index, self.max_bad + 1, bad, on_sample=lambda _: None)
        if found is None:
            first, allowed = bad[index], f"data.max_bad_images={self._allowed_bad}"
            raise UserError(f"image {first.name} cannot be read ({first.reason}), and {allowed}; {self.remedy}.")
        return found

    def fetch(
        self, keys: Sequence[Key], *, seed: int, training: bool, on_sample: OnSample, out: Tensor | None = None
    ) -> Loaded:
        """See `StreamedData.fetch`.

        In training the next readable image in the order of files replaces a bad one, with the bad one's random crop. If
        more than `max_bad` bad ones follow each other, training must end, and the image stays black.
        """
        inputs, targets = self._slots(len(keys)) if out is None else out, list[int]()
        bad: dict[int, BadSample] = {}
        attempts = self.max_bad + 1 if training else 1
        for key in keys:
            found = self._readable(key.sample, attempts, bad, on_sample)
            if found is None and not training:
                continue
            slot = inputs[len(targets) : len(targets) + 1]
            if found is None:
                slot.zero_()
            else:
                self._write(found[1], key, seed, training, slot)
            targets.append(self._label(key.sample if found is None else found[0]))
        return Loaded(inputs[: len(targets)], torch.tensor(targets, dtype=torch.int64), tuple(bad.values()))

    def name_of(self, sample: int) -> str:
        return self.files.path(self._file(sample))

    def subset(self, ids: npt.NDArray[np.int64]) -> ImageFolderData:
        part = copy.copy(self)
        part._ids = ids.copy() if self._ids is None else self._ids[ids]
        return part

    def _write(self, pixels: Tensor, key: Key, seed: int, training: bool, slot: Tensor) -> None:
        """Write the image that is made of `pixels` into a slot [1, ...] of a batch. Raises UserError."""
        if self._transforms.changes(training):
            slot[0].copy_(self._transformed(pixels, key, seed, training, self.form))
        else:
            self._crop(pixels, key, seed, training, slot)

    def _transformed(self, pixels: Tensor, key: Key, seed: int, training: bool, form: Form | None) -> Tensor:
        """Return an image, transformed if that is asked for. Raises UserError if it is of another form than `form`."""
        image: Any = Image.fromarray(pixels.numpy())
        if self._transforms.own(training) is None:
            slot = _empty(1, Form((3, self.size, self.size), torch.uint8))
            self._crop(pixels, key, seed, training, slot)
            image = slot[0]
        seed_generators(seed, key)
        return self._transforms(image, training, self.name_of(key.sample), form)

    def _crop(self, pixels: Tensor, key: Key, seed: int, training: bool, slot: Tensor) -> None:
        """Write a random crop of training, or the centre, into a slot uint8 [1, 3, size, size]."""
        if not training:
            centre_cropped(pixels, self.resize, slot)
            return
        height, width, _ = pixels.shape
        box = random_resized_box(seed, key.epoch, key.draw, width, height, self.min_area)
        crop_resized(pixels, box, slot)

    def _slots(self, count: int) -> Tensor:
        return _empty(count, self.form)

    def _file(self, sample: int) -> int:
        return sample if self._ids is None else int(self._ids[sample])

    def _label(self, sample: int) -> int:
        return int(self.files.labels[self._file(sample)])

    def _readable(
        self, sample: int, attempts: int, bad: dict[int, BadSample], on_sample: OnSample
    ) -> tuple[int, Tensor] | None:
        """Return the first readable of `attempts` samples from this one on, with its pixels. Others go to `bad`."""
        for step in range(attempts):
            candidate = (sample + step) % len(self)
            on_sample(candidate)
            try:
                return candidate, self._pixels(self._file(candidate))
            except UnreadableImage as error:
                bad[candidate] = BadSample(candidate, error.path, error.reason)
        return None

    def _pixels(self, file: int) -> Tensor:
        """Return the pixels to crop from, uint8 [H, W, 3]."""
        if not self._shrinks:
            return decode(self.files.path(file))
        cached = None if self._cache is None else self._cache.pixels(file)
        return shrunk(decode(self.files.path(file)), self.resize) if cached is None else cached


def _empty(count: int, form: Form) -> Tensor:
    """Return that many uninitialised images, channels last."""
    return torch.empty((count, *form.shape), dtype=form.dtype, memory_format=torch.channels_last)
