"""The feed of data that lives on the device: batches are made there, in the thread that asks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation, Ids, check_shapes
from crossbow_py.data.datasets import Classes, counted
from crossbow_py.data.feed import Batch, EpochCache, Feed, MemoryOrder, PickedFeed
from crossbow_py.data.resident.inputs import ResidentInputs
from crossbow_py.data.sampler import epoch_order, segments

STREAM = 2**48  # positions a stream has: more samples than any run takes


class Variant(NamedTuple):
    """How one of several streams augments its images: the seed, and what is done."""

    seed: int
    augmentation: Augmentation


class _Epoch(NamedTuple):
    """An epoch of the streams that augment alike."""

    variant: Variant | None
    epoch: int


class ResidentFeed(PickedFeed):
    """Both tensors live on the device; only gathers and arithmetic are done per batch.

    There may be several streams over the one data set: the samples in the same order, augmented in a way of each one's
    own. They lie one behind the other: stream s has the positions from s·STREAM on. `set_variant` adds streams; without
    it there is one.

    Args:
        inputs, targets: of all samples, on the device.
        batch_size: samples a batch.
        seed: of the augmentation, and of the sample order unless `order_seed` is given.
        order_seed: of the sample order.
    """

    def __init__(
        self, inputs: ResidentInputs, targets: Tensor, batch_size: int, seed: int, order_seed: int | None = None
    ) -> None:
        super().__init__(len(targets), batch_size)
        self._inputs, self._targets, self._seed = inputs, targets, seed
        self._order_seed = seed if order_seed is None else order_seed
        self._variants: dict[int, Variant] = {}
        self._plain: Variant | None = None  # of streams without one
        self._has_target: dict[int, bool] = {}
        # The picks [R, N] of a stream's epoch in stream order, on the device.
        self._tables: EpochCache[_Epoch, Tensor] = EpochCache(self._epoch_picks)

    def with_batch_size(self, batch_size: int) -> ResidentFeed:
        """Batches of another size of the same streams; what is worked out for either is there for both."""
        other = copy.copy(self)
        other._variants = {}  # each copy has streams of its own
        Feed.__init__(other, self.num_samples, batch_size)
        return other

    def serve(self, num_learners: int) -> None:
        """Have so many learners at places of their own in the streams."""
        self._tables.serve(id(self), num_learners)

    def close(self) -> None:
        """See Feed."""
        self._tables.serve(id(self), 0)

    def without_augmentation(self) -> ResidentFeed:
        """The same streams, of which only those with a variant augment."""
        other = copy.copy(self)
        other._plain = Variant(self._seed, Augmentation())
        return other

    def set_variant(self, stream: int, variant: Variant) -> None:
        """What stream `stream` does to images from now on; between rounds.

        Raises UserError when its crops need more padding than the images were stored with.
        """
        self._inputs.check_augmentation(variant.augmentation)
        check_shapes(variant.augmentation, self._inputs.shape, self._targets.shape[1:])
        self._variants[stream] = variant

    def batch(self, start: int) -> Batch:
        """See `Feed.batch`. Nothing is copied from the host except once an epoch, in the first call that reaches it."""
        return self._take(self._picks([start]))

    def batches(self, starts: Sequence[int]) -> Batch:
        """See `Feed.batches`; one gather for all learners. 4-D inputs keep their memory format within each batch."""
        together = self._take(self._picks(starts))
        return Batch(*(tensor.view(len(starts), -1, *tensor.shape[1:]) for tensor in together))

    def new_picks(self, num_batches: int) -> Tensor:
        """See `PickedFeed.new_picks`."""
        shape = self._inputs.num_rows, num_batches * self.batch_size
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
        runs = [run for start, count in stretches for run in self._runs(start, count)]
        tables = {key: self._tables(key) for key, _, _ in runs}
        if self._targets.device.type == "cuda":
            for table in tables.values():  # the cache may drop it while this stream still reads it
                table.record_stream(torch.cuda.current_stream())
        return [tables[key][:, first:last] for key, first, last in runs]

    def _runs(self, start: int, count: int) -> list[tuple[_Epoch, int, int]]:
        stream, position = divmod(start, STREAM)
        variant = self._variants.get(stream, self._plain)
        found = segments(position, count, self.num_samples)
        return [(_Epoch(variant, epoch), first, last) for epoch, first, last in found]

    def check_labels(self, classes: Classes, what: str) -> None:
        """See `Feed.check_labels`. A host–device synchronisation, once."""
        if found := classes.first_outside(self._targets):
            sample, label = found
            raise UserError(classes.refusal(f"sample {sample} of the {what} data", label))

    def may_have_target(self, target: int) -> bool:
        """See `Feed.may_have_target`. A host–device synchronisation, once."""
        if target not in self._has_target:
            is_whole = not (self._targets.is_floating_point() or self._targets.is_complex())
            self._has_target[target] = is_whole and not bool(counted(self._targets, target).all())
        return self._has_target[target]

    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """See `Feed.evaluation_batches`."""
        for begin in range(first * batch_size, self.num_samples, step * batch_size):
            ids = np.arange(begin, min(begin + batch_size, self.num_samples), dtype=np.int64)
            yield self._take(self._upload(self._inputs.plain_picks(ids)))

    def _take(self, picks: Tensor) -> Batch:
        return Batch(self._inputs.take(picks), self._inputs.take_targets(picks, self._targets))

    def _epoch_picks(self, key: _Epoch) -> Tensor:
        order = epoch_order(self._order_seed, key.epoch, self.num_samples)
        seed, augmentation = key.variant or (self._seed, None)
        return self._upload(self._inputs.epoch_picks(seed, key.epoch, order, augmentation))

    def _upload(self, picks: Ids) -> Tensor:
        # A host-device synchronisation, on purpose: from pageable memory the copy is done when this returns, so the
        # streams of all threads may read the table without waiting for the stream of the thread that built it.
        return torch.from_numpy(picks).to(self._targets.device)


def _adjoined(starts: Sequence[int], batch_size: int) -> list[tuple[int, int]]:
    """Batches in order as stretches (start, count) of the stream; one that begins where another ends prolongs it."""
    stretches: list[tuple[int, int]] = []
    for start in starts:
        if stretches and sum(stretches[-1]) == start:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + batch_size)
        else:
            stretches.append((start, batch_size))
    return stretches
