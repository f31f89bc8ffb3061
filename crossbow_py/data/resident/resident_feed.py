"""The feed of data that lives on the device: batches are made there, in the thread that asks for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import map_tree
from crossbow_py.data.augmentation import Augmentation, Ids, check_shapes
from crossbow_py.data.datasets import Classes, counted, has_integers
from crossbow_py.data.feed import Batch, EpochCache, Feed, MemoryOrder
from crossbow_py.data.resident.inputs import ResidentInputs
from crossbow_py.data.sampler import SampleOrder, segments

_AHEAD = 16  # rounds whose picks are put together at once on a CPU, where learners' batches lie apart
_MOST_AHEAD = 2**20  # picks that are kept
STREAM = 2**48  # positions of one stream, more than the samples of any run


class Variant(NamedTuple):
    """The augmentation of one of several streams, and its seed; and its samples, None for those of the feed."""

    seed: int
    augmentation: Augmentation
    order: SampleOrder | None = None


class ResidentFeed(Feed):
    """The feed of a data set whose tensors live on the device. A batch takes only gathers and arithmetic.

    There may be several streams over one data set, each with an augmentation of its own, and perhaps with samples and
    an order of its own. Stream s has the positions from s·STREAM on. `set_variant` adds streams; without it there is
    one.

    Batches can also be made in two steps, the second of which may be part of a CUDA graph:

        picks, batches = feed.new_picks(K), feed.new_batches(K)    once
        feed.write_picks(starts, picks)                            every round, before the graph
        feed.take(picks, batches)                                  inside the graph

    The batches are the same to the bit, but not mixed. Picks and batches belong to the caller, which must not let
    `write_picks` or `take` overwrite what another stream or thread still reads.

    Args:
        inputs, targets: all samples, on the device.
        batch_size: samples a batch.
        seed: seed of the augmentation, and of the sample order unless `order` is given.
        order: the sample order.
    """

    def __init__(
        self, inputs: ResidentInputs, targets: Tensor, batch_size: int, seed: int, order: SampleOrder | None = None
    ) -> None:
        super().__init__(len(targets), batch_size)
        self._inputs, self._targets, self._seed = inputs, targets, seed
        self._order = order or SampleOrder(seed, len(targets))
        self._variants: dict[int, Variant] = {}
        self._evaluated: Ids | None = None  # None for all samples
        self._plain: Variant | None = None  # that of streams without their own
        self._has_target: dict[int, bool] = {}
        # Picks int64 [R, N] in stream order, on the device: an epoch of the streams with the same variant.
        self._tables: EpochCache[tuple[Variant | None, int], Tensor] = EpochCache(self._epoch_picks)
        self._ahead: dict[tuple[int, ...], Tensor] = {}  # picks [R, n] by starts

    @property
    def data(self) -> ResidentInputs:
        """The inputs of all samples, which copies share."""
        return self._inputs

    @property
    def is_plain(self) -> bool:
        """Return whether a sample is the same in every batch: no stream can augment it, and nothing mixes it."""
        return self.mixing is None and not self._inputs.augments

    @property
    def has_kernel(self) -> bool:
        """Return whether a Triton kernel makes the batches of `take`."""
        return self._inputs.has_kernel

    def with_batch_size(self, batch_size: int) -> ResidentFeed:
        """Return a feed of the same streams with another batch size, which shares the tables of epochs."""
        other = self._copied()
        other._variants = {}  # each copy has streams of its own
        Feed.__init__(other, self.num_samples, batch_size)
        return other

    def serve(self, num_learners: int) -> None:
        """Keep tables for `num_learners` learners at different positions of the streams."""
        self._tables.serve(id(self), num_learners)

    def close(self) -> None:
        self._tables.serve(id(self), 0)

    def without_augmentation(self) -> ResidentFeed:
        """Return a feed of the same streams in which only streams with a variant are augmented."""
        other = self._copied()
        other._plain = Variant(self._seed, Augmentation())
        return other

    def only(self, ids: Ids) -> ResidentFeed:
        """Return a feed that evaluates the samples `ids` alone, in that order, for nothing else."""
        other = self._copied()
        other._evaluated, other.num_samples = ids, len(ids)
        return other

    def _copied(self) -> ResidentFeed:
        other = copy.copy(self)
        other._ahead, other._variants = {}, dict(self._variants)
        return other

    def set_variant(self, stream: int, variant: Variant) -> None:
        """Set the augmentation and the samples of stream `stream` from now on. Called between rounds.

        Raises UserError if its crops need more padding than the images were stored with.
        """
        self._inputs.check_augmentation(variant.augmentation)
        check_shapes(variant.augmentation, self._inputs.shape, self._targets.shape[1:])
        self._variants[stream], self._ahead = variant, {}

    def batch(self, start: int) -> Batch:
        """See `Feed.batch`. Copies from the host only once an epoch, in the first call that reaches it."""
        return self.mixed(self.gathered(self.picks((start,))), start)

    def batches(self, starts: Sequence[int]) -> Batch:
        """See `Feed.batches`. One gather for all learners, unless each batch is mixed.

        4-D inputs keep their memory format within each batch.
        """
        if self.mixing is not None:
            return super().batches(starts)
        return self.gathered(self.picks(tuple(starts)), len(starts))

    def gathered(self, picks: Tensor, rows: int | None = None) -> Batch:
        """Return the batch `[n, ...]` of picks [R, n], not mixed; with `rows` = K as K batches `[K, n/K, ...]`."""
        inputs = map_tree(lambda own: in_rows(own, rows), self._inputs.take(picks))
        return Batch(inputs, self.targets_of(picks, rows))

    def targets_of(self, picks: Tensor, rows: int | None = None) -> Tensor:
        """Return the targets of `gathered`."""
        return in_rows(self._inputs.take_targets(picks, self._targets), rows)

    def picks(self, starts: tuple[int, ...]) -> Tensor:
        """Return the picks [R, n] of the batches, whose first row is sample ids."""
        found = self._ahead.get(starts)
        if found is not None:
            return found
        runs = self._joined(starts, self.batch_size)
        if len(runs) == 1 or self._targets.device.type == "cuda":  # where another stream may read what one has written
            parts = self._slices(runs)
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        count = _AHEAD * self.batch_size
        parts = self._slices([(start, count) for start in starts])
        apart = torch.cat(parts, dim=1).view(-1, len(starts), _AHEAD, self.batch_size)
        rounds = apart.transpose(1, 2).flatten(2).unbind(1)
        known = self._ahead if len(self._ahead) * rounds[0].numel() < _MOST_AHEAD else {}
        later = (tuple(start + n * self.batch_size for start in starts) for n in range(_AHEAD))
        self._ahead = known | dict(zip(later, rounds, strict=True))
        return rounds[0]

    def new_picks(self, num_batches: int) -> Tensor:
        """Return int64 zeros [R, num_batches·B] on the device for `write_picks`; they pick the first sample."""
        shape = self._inputs.num_rows, num_batches * self.batch_size
        return torch.zeros(shape, dtype=torch.int64, device=self._targets.device)

    def new_batches(self, num_batches: int, order: MemoryOrder = "stacked") -> Batch:
        """Return zeros for `take`: inputs [num_batches, B, ...] and targets [num_batches, B, ...].

        The order "channels" is for images only. Their memory is `[B, H, W, num_batches, C]`, so that
        `inputs.transpose(0, 1).flatten(1, 2)`, the input of a grouped convolution, is a view.
        """
        targets = self._targets.new_zeros(num_batches, self.batch_size, *self._targets.shape[1:])
        return Batch(self._inputs.new(num_batches, self.batch_size, order), targets)

    def write_picks(self, starts: Sequence[int], out: Tensor) -> None:
        """Write the picks of the batches at `starts` into `out`, by one copy on the current stream, outside a capture.

        The host blocks only once an epoch, in the first call that reaches it. `out` is from `new_picks(len(starts))`.
        """
        assert out.shape[1] == len(starts) * self.batch_size, "picks are for a fixed number of batches"
        torch.cat(self._slices(self._joined(starts, self.batch_size)), dim=1, out=out)

    def take(self, picks: Tensor, out: Batch) -> None:
        """Make the picked batches, enqueued on the current stream; the host does not block.

        Reads only `picks` and data on the device, so a CUDA graph may capture it. `out` comes from `new_batches`; a
        single batch may also be given as `[B, ...]`.
        """
        inputs, targets = out
        if targets.ndim == self._targets.ndim:
            inputs, targets = map_tree(lambda each: each.unsqueeze(0), inputs), targets.unsqueeze(0)
        self._inputs.fill(picks, inputs, self._targets, targets)

    def _joined(self, starts: Sequence[int], count: int) -> list[tuple[int, int]]:
        """Return the (start, count) of batches of `count`; one that begins where the last one ends prolongs it."""
        joined: list[tuple[int, int]] = []
        for start in starts:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + count)
            else:
                joined.append((start, count))
        return joined

    def _slices(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the picks of (start, count) as slices [R, n] of epochs' tables."""
        runs = [run for start, count in spans for run in self._runs(start, count)]
        tables = {key: self._tables(key) for key, _, _ in runs}
        if self._targets.device.type == "cuda":
            for table in tables.values():  # the cache may drop a table while this stream still reads it
                table.record_stream(torch.cuda.current_stream())
        return [tables[key][:, first:last] for key, first, last in runs]

    def _runs(self, start: int, count: int) -> list[tuple[tuple[Variant | None, int], int, int]]:
        stream, position = divmod(start, STREAM)
        variant = self._variants.get(stream, self._plain)
        order = self._order if variant is None or variant.order is None else variant.order
        found = segments(position, count, order.num_samples)
        return [((variant, epoch), first, last) for epoch, first, last in found]

    def check_labels(self, classes: Classes, what: str) -> None:
        """See `Feed.check_labels`. A host–device synchronisation, once."""
        if found := classes.first_outside(self._targets):
            sample, label = found
            raise UserError(classes.refusal(f"sample {sample} of the {what} data", label))

    def may_have_target(self, target: int) -> bool:
        """See `Feed.may_have_target`. A host–device synchronisation, once."""
        if target not in self._has_target:
            found = has_integers(self._targets) and not bool(counted(self._targets, target).all())
            self._has_target[target] = found
        return self._has_target[target]

    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        for begin in range(first * batch_size, self.num_samples, step * batch_size):
            ids = np.arange(begin, min(begin + batch_size, self.num_samples), dtype=np.int64)
            own = ids if self._evaluated is None else self._evaluated[ids]
            yield self.gathered(self._upload(self._inputs.plain_picks(own)))

    def _epoch_picks(self, key: tuple[Variant | None, int]) -> Tensor:
        variant, epoch = key
        seed, augmentation, order = variant or (self._seed, None, None)
        order = order or self._order
        ids = order.ids(epoch)
        picks = self._inputs.epoch_picks(seed, epoch, order.in_data(ids), order.draws(ids), augmentation)
        return self._upload(picks)

    def _upload(self, picks: Ids) -> Tensor:
        # A host–device synchronisation on purpose: from pageable memory the copy is done when this returns, so the
        # streams of all threads may read the table without waiting for the stream of the thread that built it.
        return torch.from_numpy(picks).to(self._targets.device)


def in_rows(values: Tensor, rows: int | None) -> Tensor:
    """Return values `[n, ...]`, or with `rows` = K as `[K, n/K, ...]`, a view."""
    return values if rows is None else values.view(rows, -1, *values.shape[1:])
