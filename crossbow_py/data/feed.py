"""Feeds: batches by position in the sample stream, ready on the device, made in the thread that asks.

A feed keeps no cursor. `batch(start)` is a function of the stream position (and the seed), so learners ask in any order
and from any thread, and a resumed run needs nothing but the number of samples seen.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from crossbow_py.data.augmentation import Augmentation, Ids
from crossbow_py.data.datasets import Data, MapStyleDataset, as_pair, check_data
from crossbow_py.data.epoch_cache import EpochCache
from crossbow_py.data.inputs import ImageInputs, MemoryOrder, ResidentInputs, RowInputs, is_image_batch
from crossbow_py.data.normalisation import IDENTITY, Normalisation
from crossbow_py.data.sampler import epoch_order, segments, stream_ids
from crossbow_py.errors import UserError


class Batch(NamedTuple):
    """inputs [B, ...] and targets [B, ...], on the feed's device."""

    inputs: Tensor
    targets: Tensor


class Feed(ABC):
    """Base of all feeds. Thread-safe: every method may be called from several threads at once."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        """Raises UserError when a batch would be larger than the data set."""
        if not 1 <= batch_size <= num_samples:
            raise UserError(
                f"batch_size={batch_size} must be between 1 and the size of the data set, which has {num_samples} "
                f"samples; choose at most {num_samples}."
            )
        self.num_samples, self.batch_size = num_samples, batch_size

    @abstractmethod
    def batch(self, start: int) -> Batch:
        """The training batch at stream positions [start, start + batch_size), augmented.

        On CUDA it is enqueued on the calling thread's current stream; the host does not wait for it.
        """

    def batches(self, starts: Sequence[int]) -> Batch:
        """The batches at `starts`, one a learner, stacked: inputs [K, B, ...] and targets [K, B, ...]."""
        each = [self.batch(start) for start in starts]
        return Batch(torch.stack([batch.inputs for batch in each]), torch.stack([batch.targets for batch in each]))

    @abstractmethod
    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        """All samples once, in the data set's order and not augmented by the feed; the last batch may be partial."""


class PickedFeed(Feed):
    """A feed that also loads in two steps, so that a CUDA graph can make the batch.

        picks, batches = feed.new_picks(K), feed.new_batches(K)    once
        feed.write_picks(starts, picks)                            every round, before the graph
        feed.take(picks, batches)                                  inside the graph

    Both give the same batches to the bit. Picks and batches are the caller's: it keeps one `write_picks` or `take` from
    overwriting what another stream or thread still reads.
    """

    @abstractmethod
    def new_picks(self, num_batches: int) -> Tensor:
        """Int64 [R, num_batches·B] on the device, for `write_picks`; until then they pick the first sample."""

    @abstractmethod
    def new_batches(self, num_batches: int, order: MemoryOrder = "stacked") -> Batch:
        """Zeros for `take`: inputs [num_batches, B, ...] and targets [num_batches, B, ...].

        The order "channels" is for images alone: their memory is `[B, H, W, num_batches, C]`, so that
        `inputs.transpose(0, 1).flatten(1, 2)` is what a grouped convolution takes, and a view.
        """

    @abstractmethod
    def write_picks(self, starts: Sequence[int], out: Tensor) -> None:
        """Write what makes up the batches at `starts`; one copy on the current stream, never inside a capture.

        The host waits only once an epoch, in the first call that reaches it. `out` is of `new_picks(len(starts))`.
        """

    @abstractmethod
    def take(self, picks: Tensor, out: Batch) -> None:
        """Make the batches that were picked; enqueued on the current stream, the host does not wait.

        Reads nothing but `picks` and what lies on the device, so a CUDA graph may hold it. `out` is of `new_batches`;
        a single batch may also be given as `[B, ...]`.
        """


class ResidentFeed(PickedFeed):
    """Both tensors live on the device; only gathers and arithmetic are done per batch."""

    def __init__(self, inputs: ResidentInputs, targets: Tensor, batch_size: int, seed: int) -> None:
        super().__init__(len(targets), batch_size)
        self._inputs, self._targets, self._seed = inputs, targets, seed
        # The picks [R, N] of an epoch in stream order, on the device.
        self._tables = EpochCache(self._epoch_picks)

    def batch(self, start: int) -> Batch:
        """See `Feed.batch`. Nothing is copied from the host except once an epoch, in the first call that reaches it."""
        return self._take(self._picks([start]))

    def batches(self, starts: Sequence[int]) -> Batch:
        """See `Feed.batches`; one gather for all learners. 4-D inputs keep their memory format within each batch."""
        together = self._take(self._picks(starts))
        return Batch(*(tensor.view(len(starts), -1, *tensor.shape[1:]) for tensor in together))

    def new_picks(self, num_batches: int) -> Tensor:
        """See `PickedFeed.new_picks`."""
        shape = self._inputs.NUM_ROWS, num_batches * self.batch_size
        return torch.zeros(shape, dtype=torch.int64, device=self._targets.device)

    def new_batches(self, num_batches: int, order: MemoryOrder = "stacked") -> Batch:
        """See `PickedFeed.new_batches`."""
        targets = self._targets.new_zeros(num_batches, self.batch_size, *self._targets.shape[1:])
        return Batch(self._inputs.new(num_batches, self.batch_size, order), targets)

    def write_picks(self, starts: Sequence[int], out: Tensor) -> None:
        """See `PickedFeed.write_picks`."""
        assert out.shape[1] == len(starts) * self.batch_size, "picks are for a fixed number of batches"
        torch.cat(self._slices(starts), dim=1, out=out)

    def take(self, picks: Tensor, out: Batch) -> None:
        """See `PickedFeed.take`; one launch for images where there are kernels."""
        inputs, targets = out if out.targets.ndim > self._targets.ndim else (each.unsqueeze(0) for each in out)
        self._inputs.fill(picks, inputs, self._targets, targets)

    def _picks(self, starts: Sequence[int]) -> Tensor:
        parts = self._slices(starts)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _slices(self, starts: Sequence[int]) -> list[Tensor]:
        """The picks of the batches, as slices [R, n] of the tables of epochs: few, as learners' batches adjoin."""
        stretches = _adjoined(starts, self.batch_size)
        runs = [run for start, count in stretches for run in segments(start, count, self.num_samples)]
        tables = {epoch: self._tables(epoch) for epoch, _, _ in runs}
        if self._targets.device.type == "cuda":
            for table in tables.values():  # the cache may drop it while this stream still reads it
                table.record_stream(torch.cuda.current_stream())
        return [tables[epoch][:, first:last] for epoch, first, last in runs]

    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        """See `Feed.evaluation_batches`."""
        for first in range(0, self.num_samples, batch_size):
            ids = np.arange(first, min(first + batch_size, self.num_samples), dtype=np.int64)
            yield self._take(self._upload(self._inputs.plain_picks(ids)))

    def _take(self, picks: Tensor) -> Batch:
        return Batch(self._inputs.take(picks), self._targets.index_select(0, picks[0]))

    def _epoch_picks(self, epoch: int) -> Tensor:
        order = epoch_order(self._seed, epoch, self.num_samples)
        return self._upload(self._inputs.epoch_picks(self._seed, epoch, order))

    def _upload(self, picks: Ids) -> Tensor:
        # A host-device synchronisation, on purpose: from pageable memory the copy is done when this returns, so the
        # streams of all threads may read the table without waiting for the stream of the thread that built it.
        return torch.from_numpy(picks).to(self._targets.device)


class MapStyleFeed(Feed):
    """Fetches the items of a map-style data set one by one on every call, so that its own transforms stay alive.

    Data sets are rarely made for several threads (one file handle, one decoder), so items are fetched under a lock;
    collating, copying to the device and normalising are not. What the data set draws at random from global generators
    is outside the promise of bit-exact reruns.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        batch_size: int,
        seed: int,
        device: torch.device,
        normalisation: Normalisation | None,
        channels_last: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(len(dataset), batch_size)
        self._dataset, self._device = dataset, device
        self._normalisation, self._channels_last, self._dtype = normalisation, channels_last, dtype
        self._orders = EpochCache(lambda epoch: epoch_order(seed, epoch, self.num_samples))
        self._lock = threading.Lock()

    def batch(self, start: int) -> Batch:
        """See `Feed.batch`. The host does wait for the copy from pageable memory."""
        return self._fetch(stream_ids(self._orders, start, self.batch_size, self.num_samples).tolist())

    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        """See `Feed.evaluation_batches`."""
        for first in range(0, self.num_samples, batch_size):
            yield self._fetch(range(first, min(first + batch_size, self.num_samples)))

    def _fetch(self, ids: Sequence[int]) -> Batch:
        with self._lock:
            items = [self._dataset[index] for index in ids]
        inputs, targets = _collate(items)
        return Batch(self._prepare(inputs.to(self._device)), targets.to(self._device))

    def _prepare(self, inputs: Tensor) -> Tensor:
        image, normalisation = is_image_batch(inputs), self._normalisation
        if image or (normalisation is not None and inputs.is_floating_point()):
            inputs = (normalisation or IDENTITY).apply(inputs, self._dtype)
        elif inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        last = self._channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if last else inputs


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
) -> Feed:
    """The feed for `data`: resident for a pair of tensors, item by item for a map-style data set.

    uint8 inputs [N, C, H, W] are images: augmented, scaled to [0, 1] and normalised. Floating inputs are cast to
    `dtype`, and normalised when `mean` and `std` are given. Other inputs and all targets pass unchanged.

    Args:
        data: a pair of tensors or a map-style data set.
        batch_size: samples a batch.
        seed: of the sample order and the augmentation.
        device: where batches are needed.
        augmentation: for uint8 images in tensors; None for none, as for test data.
        mean: one value a channel, or one for all.
        std: likewise.
        channels_last: memory format of 4-D inputs.
        dtype: of floating inputs.
        kernels: let Triton make batches of channels-last images in `Feed.take`; it must run on the device.

    Raises:
        UserError: the batch is larger than the data set, or the data set cannot be augmented or normalised so.
    """
    check_data(data, "the data set")
    device, augmentation = torch.device(device), augmentation or Augmentation()
    normalisation = Normalisation.of(mean, std)
    pair = as_pair(data)
    if augmentation.active and not (pair is not None and is_image_batch(pair[0])):
        raise UserError(
            f"data.crop_padding={augmentation.crop_padding} and data.flip={augmentation.flip} need uint8 image tensors "
            "[N, C, H, W]; set data.crop_padding=0 data.flip=false and augment inside the data set."
        )
    if pair is None:
        return MapStyleFeed(data, batch_size, seed, device, normalisation, channels_last, dtype)
    inputs: ResidentInputs
    if is_image_batch(pair[0]):
        inputs = ImageInputs(pair[0], augmentation, normalisation or IDENTITY, device, channels_last, dtype, kernels)
    else:
        inputs = RowInputs(pair[0], normalisation, device, channels_last, dtype)
    return ResidentFeed(inputs, pair[1].to(device), batch_size, seed)


def _adjoined(starts: Sequence[int], batch_size: int) -> list[tuple[int, int]]:
    """Batches in order as stretches (start, count) of the stream; one that begins where another ends prolongs it."""
    stretches: list[tuple[int, int]] = []
    for start in starts:
        if stretches and sum(stretches[-1]) == start:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + batch_size)
        else:
            stretches.append((start, batch_size))
    return stretches


def _collate(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Stack items into (inputs, targets). Raises UserError when they cannot be stacked into two tensors."""
    try:
        batch = default_collate(items)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the samples of the data set cannot be stacked into a batch ({reason}); return tensors of equal shape."
        ) from error
    if len(batch) != 2 or not all(isinstance(entry, Tensor) for entry in batch):
        raise UserError("the items of the data set must be (input tensor, target), one of each; return just these two.")
    return batch[0], batch[1]
