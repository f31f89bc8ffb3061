"""Inputs that live on the device, addressed by *picks*: int64 [R, B] on the device, whose first row is sample ids.

The picks of a whole epoch are computed once, and a batch is a slice of them. So a batch costs a few gathers, and
nothing is copied from the host.

Batches of all learners go to one tensor `[K, B, *shape]`. Images may be stored in it as `[B, H, W, K, C]`, the memory
order in which grouped operators take `[B, K·C, H, W]`, so that they need no copy.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree, leaves
from crossbow_py.data.augmentation import Augmentation, Ids, PaddedImages, flipped
from crossbow_py.data.erasing import NUM_EDGES
from crossbow_py.data.feed import MemoryOrder
from crossbow_py.data.normalisation import IDENTITY, BatchFormat, PixelNormaliser

Fill = Callable[[Tensor, Tensor, Tensor, Tensor], None]

_NUM_PIXEL_ROWS, _MIRRORED = 3, 2  # rows of the picks of images that say where pixels come from, and the last of them


def num_picks(augmentation: Augmentation) -> int:
    """Return R, the rows of the picks of images that are stored for `augmentation`; see `ImageInputs`."""
    return _NUM_PIXEL_ROWS + (NUM_EDGES if augmentation.random_erasing else 0)


class ResidentInputs(ABC):
    """Base of inputs on the device. Read-only after construction; any thread may call it.

    Attributes:
        shape: shape of one sample in a batch.
        dtype: dtype of batches.
        num_rows: R, the rows of the picks.
        has_kernel: whether `fill` is one launch of a Triton kernel.
        augments: whether a sample may differ from epoch to epoch.
    """

    num_rows: int = 1
    has_kernel: bool = False
    augments: bool = False

    def __init__(self, shape: torch.Size, form: BatchFormat) -> None:
        self.shape, self.dtype, self._device = shape, form.dtype, form.device
        self._channels_last = form.channels_last and len(shape) == 3

    def new(self, num_batches: int, batch_size: int, order: MemoryOrder) -> Tree:
        """Return zeros [K, B, *shape] for `fill`, in the memory format of batches. Only images take "channels"."""
        shape, last = (num_batches, batch_size, *self.shape), (0, 1, 3, 4, 2)
        # In the order in memory, then viewed as [K, B, ...].
        axes = (1, 3, 4, 0, 2) if order == "channels" else last if self._channels_last else range(len(shape))
        zeros = torch.zeros([shape[axis] for axis in axes], dtype=self.dtype, device=self._device)
        return zeros.permute(*np.argsort(axes).tolist())

    def check_augmentation(self, augmentation: Augmentation) -> None:
        """Raise UserError if `epoch_picks` cannot augment like that."""
        if augmentation.active:
            raise UserError(f"{augmentation} need uint8 images; set {Augmentation()}.")

    @abstractmethod
    def epoch_picks(
        self, seed: int, epoch: int, order: Ids, draws: Ids, augmentation: Augmentation | None = None
    ) -> Ids:
        """Return the picks, int64 [R, N], of epoch `epoch` in stream order, on the host.

        Args:
            seed: seed of the augmentation.
            epoch: the epoch.
            order: sample ids [N] in stream order.
            draws: the numbers [N] by which their augmentation is drawn, see `SampleOrder.draws`.
            augmentation: replaces the one that the inputs were made with.
        """

    @abstractmethod
    def plain_picks(self, ids: Ids) -> Ids:
        """Return the picks, int64 [R, B], of samples `ids` without augmentation, on the host."""

    @abstractmethod
    def take(self, picks: Tensor) -> Tree:
        """Return the inputs [B, ...], enqueued on the current stream; the host does not block."""

    def take_targets(self, picks: Tensor, all_targets: Tensor) -> Tensor:
        """Return the targets [B, ...] out of [N, ...] by sample id, flipped as the inputs are; enqueued likewise."""
        return all_targets.index_select(0, picks[0])

    def fill(self, picks: Tensor, inputs: Tree, all_targets: Tensor, targets: Tensor) -> None:
        """Write the results of `take` and `take_targets` into given memory, so that a CUDA graph may capture it.

        Args:
            picks: [R, K·B], batch by batch.
            inputs: [K, B, *shape] from `new`, written.
            all_targets: [N, ...] by sample id.
            targets: [K, B, ...], contiguous, written.
        """
        self.fill_inputs(picks, inputs)
        torch.index_select(all_targets, 0, picks[0], out=targets.flatten(0, 1))

    def fill_inputs(self, picks: Tensor, inputs: Tree) -> None:
        """Write the result of `take` into given memory; see `fill`."""
        inputs.copy_(self.take(picks).view(inputs.shape))


class RowInputs(ResidentInputs):
    """Inputs without augmentation: floating ones, cast and normalised once at construction, and integers."""

    def __init__(self, inputs: Tensor, form: BatchFormat) -> None:
        rows = inputs.to(form.device)
        if rows.is_floating_point():
            rows = rows.to(form.dtype) if form.normalisation is None else form.normalisation.apply(rows, form.dtype)
        super().__init__(rows.shape[1:], form._replace(dtype=rows.dtype))
        # index_select gives contiguous results, so channels-last rows are stored as [N, H, W, C].
        self._rows = (rows.permute(0, 2, 3, 1) if self._channels_last else rows).contiguous()

    def epoch_picks(
        self, seed: int, epoch: int, order: Ids, draws: Ids, augmentation: Augmentation | None = None
    ) -> Ids:
        return order[np.newaxis]

    def plain_picks(self, ids: Ids) -> Ids:
        return ids[np.newaxis]

    def take(self, picks: Tensor) -> Tensor:
        rows = self._rows.index_select(0, picks[0])
        return rows.permute(0, 3, 1, 2) if self._channels_last else rows

    def fill_inputs(self, picks: Tensor, inputs: Tensor) -> None:
        rows = inputs.permute(0, 1, 3, 4, 2) if self._channels_last else inputs
        if rows.is_contiguous() and rows.dtype == self._rows.dtype:
            torch.index_select(self._rows, 0, picks[0], out=rows.flatten(0, 1))
        else:
            super().fill_inputs(picks, inputs)


class ClipInputs(RowInputs):
    """uint8 clips without augmentation, stored as uint8, a quarter of float32's memory, and normalised when taken."""

    def __init__(self, clips: Tensor, form: BatchFormat) -> None:
        super().__init__(clips, form)
        normalisation, self.dtype = form.normalisation or IDENTITY, form.dtype
        normalisation.check_channels(clips.shape[1])
        # Made once, as a CUDA graph cannot capture a copy from the host.
        self._mean, self._std = normalisation.constants(self._rows, form.dtype)

    def take(self, picks: Tensor) -> Tensor:
        # Also `fill` comes here, as stored bytes have not the dtype of batches.
        return super().take(picks).to(self._mean.dtype).sub_(self._mean).div_(self._std).to(self.dtype)


class ImageInputs(ResidentInputs):
    """uint8 images: cropped, flipped, normalised, erased. Picks are (sample id, first pixel of the crop, mirrored).

    With random erasing, picks have four more rows: (top, bottom, left, right) of the erased rectangle. With `kernels`,
    for channels-last images, `fill` is one launch of a Triton kernel and gives the same bits.
    """

    def __init__(self, images: Tensor, augmentation: Augmentation, form: BatchFormat, kernels: bool) -> None:
        super().__init__(images.shape[1:], form)
        self._augmentation, self.num_rows = augmentation, num_picks(augmentation)
        self.augments = augmentation.active
        self._images = PaddedImages(images, augmentation.crop_padding, form.device)
        channels, height, width = images.shape[1:]
        self._normalise = PixelNormaliser((channels, height, width), form)
        self._kernel: Fill | None = None
        if kernels and form.channels_last:
            # Imported here, as this module must be importable without Triton.
            from crossbow_py.data.resident.image_kernels import PixelTable, gather_images  # noqa: PLC0415

            table = PixelTable(self._images.pixels, self._images.row, self._normalise.table())
            self._kernel = partial(gather_images, table)
            self.has_kernel = True

    def check_augmentation(self, augmentation: Augmentation) -> None:
        stored = self._augmentation
        crops_more = augmentation.crop_padding > stored.crop_padding
        moves_more = augmentation.moves_pixels and not stored.moves_pixels
        if crops_more or moves_more or (augmentation.random_erasing and not stored.random_erasing):
            beyond = f"{augmentation} go beyond what the images were stored for, {stored}"
            raise UserError(f"{beyond}; make the feed with an augmentation that does all of it.")

    def epoch_picks(
        self, seed: int, epoch: int, order: Ids, draws: Ids, augmentation: Augmentation | None = None
    ) -> Ids:
        """See `ResidentInputs.epoch_picks`. Drawn by `draws`, then brought into stream order."""
        own = augmentation or self._augmentation
        top, left, mirrored = own.draw(seed, epoch, len(order))
        inset = self._augmentation.crop_padding - own.crop_padding
        top, left = top + inset, left + inset
        picks = np.stack([order, self._images.first_pixel(order, top[draws], left[draws]), mirrored[draws]])
        if self.num_rows == _NUM_PIXEL_ROWS:
            return picks
        erased = own.draw_erased(seed, epoch, len(order), self._images.extent)
        return np.concatenate([picks, erased[:, draws]])

    def plain_picks(self, ids: Ids) -> Ids:
        corner = np.full(len(ids), self._augmentation.crop_padding, dtype=np.int64)
        picks = np.zeros((self.num_rows, len(ids)), dtype=np.int64)
        picks[:_MIRRORED] = ids, self._images.first_pixel(ids, corner, corner)
        return picks

    def take(self, picks: Tensor) -> Tensor:
        """Return the images [B, C, H, W], gathered by pixels, or whole if they are neither cropped nor flipped."""
        moves = self._augmentation.moves_pixels
        pixels = self._images.crops(picks[1], picks[2]) if moves else self._images.whole(picks[0])
        return self._normalise(pixels, picks[_NUM_PIXEL_ROWS:] if self._augmentation.random_erasing else None)

    def take_targets(self, picks: Tensor, all_targets: Tensor) -> Tensor:
        targets = super().take_targets(picks, all_targets)
        return flipped(targets, picks[_MIRRORED].bool()) if self._moves(all_targets) else targets

    def fill(self, picks: Tensor, inputs: Tensor, all_targets: Tensor, targets: Tensor) -> None:
        if self._kernel is None:
            super().fill(picks, inputs, all_targets, targets)
        else:
            self._kernel(picks, inputs, all_targets, targets)
        if self._moves(all_targets):
            targets.copy_(self.take_targets(picks, all_targets).view(targets.shape))

    def _moves(self, all_targets: Tensor) -> bool:
        """Return whether the targets are masks of images that are flipped."""
        return bool(self._augmentation.flip) and all_targets.ndim > 2


class TreeInputs(ResidentInputs):
    """Several inputs: a tree of them. Picks are those of each part, one below the other.

    Images among them are augmented alike, as draws are by sample. Masks as targets follow the first.
    """

    def __init__(self, parts: Sequence[ResidentInputs], tree: pytree.TreeSpec) -> None:
        self._parts, self._tree = parts, tree
        ends = [0, *itertools.accumulate(part.num_rows for part in parts)]
        self._rows = [slice(first, last) for first, last in itertools.pairwise(ends)]
        self.num_rows = ends[-1]
        self._lead = next((index for index, part in enumerate(parts) if isinstance(part, ImageInputs)), 0)
        self.shape, self.dtype = parts[self._lead].shape, parts[self._lead].dtype
        self.augments = any(part.augments for part in parts)

    def new(self, num_batches: int, batch_size: int, order: MemoryOrder) -> Tree:
        return self._tree.unflatten([part.new(num_batches, batch_size, "stacked") for part in self._parts])

    def check_augmentation(self, augmentation: Augmentation) -> None:
        self._parts[self._lead].check_augmentation(augmentation)

    def epoch_picks(
        self, seed: int, epoch: int, order: Ids, draws: Ids, augmentation: Augmentation | None = None
    ) -> Ids:
        return np.concatenate([part.epoch_picks(seed, epoch, order, draws, augmentation) for part in self._parts])

    def plain_picks(self, ids: Ids) -> Ids:
        return np.concatenate([part.plain_picks(ids) for part in self._parts])

    def take(self, picks: Tensor) -> Tree:
        return self._tree.unflatten([part.take(picks[own]) for part, own in zip(self._parts, self._rows, strict=True)])

    def take_targets(self, picks: Tensor, all_targets: Tensor) -> Tensor:
        return self._parts[self._lead].take_targets(picks[self._rows[self._lead]], all_targets)

    def fill(self, picks: Tensor, inputs: Tree, all_targets: Tensor, targets: Tensor) -> None:
        of_parts = zip(self._parts, self._rows, leaves(inputs), strict=True)
        for index, (part, own, each) in enumerate(of_parts):
            if index == self._lead:
                part.fill(picks[own], each, all_targets, targets)
            else:
                part.fill_inputs(picks[own], each)
