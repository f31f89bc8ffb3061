"""The choice of a feed for a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import leaves
from crossbow_py.data.augmentation import Augmentation, check_shapes
from crossbow_py.data.datasets import (
    Data,
    MapStyleDataset,
    Pair,
    as_pair,
    check_data,
    first_sample,
    is_clip_batch,
    is_image_batch,
    num_samples,
)
from crossbow_py.data.feed import Feed
from crossbow_py.data.normalisation import BatchFormat, Normalisation, digits_lost, not_finite
from crossbow_py.data.resident.inputs import ClipInputs, ImageInputs, ResidentInputs, RowInputs, TreeInputs
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.data.sampler import SampleOrder
from crossbow_py.data.streaming.items import ItemData
from crossbow_py.data.streaming.streamed_data import StreamedData
from crossbow_py.data.streaming.streaming_feed import StreamingFeed


def make_feed(
    data: Data,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    augmentation: Augmentation | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
    kernels: bool = False,
    num_workers: int = 0,
    num_ranks: int = 1,
    order_seed: int | None = None,
    sample_weights: npt.NDArray[np.float64] | None = None,
) -> Feed:
    """Build the feed for `data`: resident for tensors, streaming for every other data set.

    uint8 inputs [N, C, H, W] are images: augmented, scaled to [0, 1] and normalised. uint8 [N, C, T, H, W] are clips:
    scaled and normalised, not augmented. Floating inputs are cast to `dtype`, and normalised if `mean` and `std` are
    given, unless they are among several inputs. Other inputs and all targets pass unchanged, except for masks
    [N, ..., H, W], which are flipped with images.

    Args:
        data: tensors or a map-style data set, see `split_item`.
        batch_size: samples a batch.
        seed: seed of the sample order and the augmentation.
        device: device of the batches.
        augmentation: for uint8 images in tensors; None for none, as for test data.
        mean: one value a channel, or one for all.
        std: one value a channel, or one for all.
        channels_last: whether 4-D inputs are channels last in memory.
        dtype: dtype of floating inputs.
        kernels: let Triton, which must run on the device, make batches of channels-last images in `Feed.take`.
        num_workers: processes that load streamed data; 0 loads in the caller.
        num_ranks: ranks that take batches of the stream in turn; 1 if learners share every batch.
        order_seed: seed of the sample order; None for `seed`.
        sample_weights: [N], to draw samples by, with replacement; None for permutations.

    Raises:
        UserError: the batch is larger than the data set, or the data set cannot be augmented or normalised like that.
    """
    check_data(data, "the data set")
    form = BatchFormat(torch.device(device), dtype, channels_last, Normalisation.of(mean, std))
    pair, augmentation = as_pair(data), augmentation or Augmentation()
    order = SampleOrder(seed if order_seed is None else order_seed, num_samples(data), sample_weights)
    if pair is not None:
        inputs = _resident_inputs(pair, augmentation, form, kernels)
        feed = ResidentFeed(inputs, pair[1].to(form.device), batch_size, seed, order)
        is_cast = form.normalisation is None or not isinstance(pair[0], Tensor)
        if (sample := not_finite(pair[0])) is not None:
            feed.note(f"The inputs of sample {sample} hold NaN or an infinity; fill them, or leave such samples out.")
        feed.note_rounding(digits_lost(pair[0] if is_cast else (), pair[1], dtype), dtype)
        return feed
    streamed = data if isinstance(data, StreamedData) else ItemData(data)
    _check_streamed(data, augmentation)
    return StreamingFeed(streamed, batch_size, seed, form, augmentation, num_workers, num_ranks, order)


def _resident_inputs(pair: Pair, augmentation: Augmentation, form: BatchFormat, kernels: bool) -> ResidentInputs:
    inputs, targets = pair
    if not isinstance(inputs, Tensor):
        values, tree = pytree.tree_flatten(inputs)
        if augmentation.active and not any(map(is_image_batch, values)):
            raise UserError(_needs_images(augmentation, f"set {Augmentation()}"))
        parts = []
        for each in values:
            moved = augmentation if is_image_batch(each) else Augmentation()
            parts.append(_resident_inputs((each, targets), moved, form.of_several(each), kernels))
        return TreeInputs(parts, tree)
    is_images = is_image_batch(inputs)
    if augmentation.active and not is_images:
        raise UserError(_needs_images(augmentation, f"set {Augmentation()}"))
    check_shapes(augmentation, inputs.shape[1:], targets.shape[1:])
    if is_images:
        return ImageInputs(inputs, augmentation, form, kernels)
    return ClipInputs(inputs, form) if is_clip_batch(inputs) else RowInputs(inputs, form)


def _check_streamed(data: MapStyleDataset, augmentation: Augmentation) -> None:
    if not augmentation.active:
        return
    inputs, target = first_sample(data)
    images = [each for each in leaves(inputs) if is_image_batch(each.unsqueeze(0))]
    if not images:
        raise UserError(_needs_images(augmentation, f"set {Augmentation()} and augment inside the data set"))
    if augmentation.random_erasing and len({each.shape[1:] for each in images}) > 1:
        got = " and ".join(str(list(each.shape)) for each in images)
        raise UserError(f"data.random_erasing needs images of one size, got {got}; set data.random_erasing=0.")
    for each in images:
        check_shapes(augmentation, each.shape, np.shape(target))


def _needs_images(augmentation: Augmentation, remedy: str) -> str:
    return f"{augmentation} need uint8 image tensors [N, C, H, W]; {remedy}."
