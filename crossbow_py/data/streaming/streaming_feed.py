"""The feed of data that worker processes load while learners train: decoded ahead, copied ahead, used once.

    workers ──Loaded──► producer ──copy stream──► prefetch buffer ──Staged──► preparation ──Batch──► learners

The producer thread keeps the prefetch buffer filled: a round's batches and the next round's (double buffers), uint8 on
the device, each with the draws of its augmentation. Preparing a batch, when learners take it, crops, flips, normalises
and erases. One feed serves all learners of a rank, even if they share every batch, and makes no other rank's batches. A
batch depends only on its position in the stream, so the number of workers may change at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossbow_py.core.errors import BadDataError, BadSampleError, DataError
from crossbow_py.core.trees import Tree, form_of, joined, leaves, map_tree
from crossbow_py.data.augmentation import Augmentation, Ids, cropped, flipped
from crossbow_py.data.datasets import Classes, is_clip_batch, is_image_batch
from crossbow_py.data.erasing import NUM_EDGES
from crossbow_py.data.feed import Batch, EpochCache, Feed
from crossbow_py.data.normalisation import IDENTITY, BatchFormat, Normalisation, PixelNormaliser
from crossbow_py.data.sampler import Positions, RankPositions, SampleOrder, cut_up, segments
from crossbow_py.data.streaming.loader import Loader
from crossbow_py.data.streaming.producer import PrefetchBuffer, Prefetcher, Producer, Staged
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded, StreamedData

_EVALUATION_CHUNK = 16  # samples a worker loads at a time, so that a small test set keeps all workers busy


class LoadingTimes(NamedTuple):
    """The number of training batches loaded so far, and the seconds that processes spent on them in all."""

    num_batches: int
    seconds: float


class StreamingFeed(Feed):
    """A feed of samples that worker processes load ahead of the learners.

    The training loop calls `announce` and `wait`; any thread may call `batch`, which then does not block.

    Args:
        data: the data set.
        batch_size: samples a batch.
        seed: seed of the sample order and the augmentation.
        form: the form of the batches.
        augmentation: crops, flips and erasing are done here.
        num_workers: worker processes; 0 loads in the thread that waits.
        num_ranks: ranks that take batches of the stream in turn, each as many as this one.
        order: the sample order; None for permutations by `seed`.

    Attributes:
        loading_times: those of training batches over the life of the feed.
        sample_bytes: bytes of the inputs of one sample as loaded; 0 before the first `first_samples`.
        through_shared: whether worker processes hand inputs over through /dev/shm.
    """

    STREAMS = True

    def __init__(
        self,
        data: StreamedData,
        batch_size: int,
        seed: int,
        form: BatchFormat,
        augmentation: Augmentation,
        num_workers: int,
        num_ranks: int = 1,
        order: SampleOrder | None = None,
    ) -> None:
        super().__init__(len(data), batch_size)
        self._data, self._seed, self._device = data, seed, form.device
        self._prepare = Preparation(form, augmentation)
        self.num_workers, self._num_ranks = num_workers, num_ranks
        self.one_shape = data.one_shape
        self.through_shared = data.image_shape is None
        self._order = order or SampleOrder(seed, len(data))
        self._orders = EpochCache[int, Ids](self._order.ids)

        def draws(key: tuple[int, tuple[int, int]]) -> Tensor:
            epoch, extent = key
            return self._prepare.draws(seed, epoch, self.num_samples, extent)

        self._draws = EpochCache(draws)
        self._copies = _copy_stream(form.device) if form.device.type == "cuda" else None
        self._buffer = PrefetchBuffer()
        self._unannounced = threading.Lock()
        self._producer: Producer | None = None
        self._last_round: frozenset[int] = frozenset()
        self._round: frozenset[int] = frozenset()
        self._bad: dict[int, BadSample] = {}
        self.loading_times = LoadingTimes(0, 0.0)
        self._evaluating: Prefetcher | None = None
        self._classes: Classes | None = None
        self._measuring: Feed | None = None
        self.sample_bytes, self._has_floats = 0, False

    def use_workers(self, num_workers: int) -> None:
        """Change the number of worker processes, which changes no batch. Called between rounds."""
        if num_workers != self.num_workers:
            self._stop()
            self.num_workers = num_workers

    def announce(self, starts: Sequence[int]) -> bool:
        """See `Feed.announce`. Without worker processes nothing is made ahead."""
        wanted = frozenset(starts)
        if wanted != self._round:
            self._last_round, self._round = self._round, wanted
        positions = RankPositions(tuple(sorted(wanted)), self.batch_size, self._num_ranks)
        num_ahead = max(2, len(wanted)) if self.num_workers else 0
        held = [positions[index] for index in range(len(wanted) + num_ahead)]
        self._buffer.keep(self._last_round.union(held))
        there = self._buffer.starts()
        if self.num_workers:
            missing = (index for index, start in enumerate(held) if start not in there)
            self._produce(positions, next(missing, len(held)))
            self._buffer.allow(held[-1])
        return wanted <= there

    def wait(self, starts: Sequence[int], until: Callable[[], bool] = lambda: False) -> None:
        for start in sorted(set(starts)):
            if self._producer is None:
                if self._buffer.get(start) is None:
                    loader = self._new_loader([self._keys(start)], 0, training=True)
                    self._buffer.put(start, self._stage(start, next(loader)))
                continue
            self._producer.wait_for(start, until)

    def batch(self, start: int) -> Batch:
        (one,) = self._take([start])
        return self.mixed(self._prepare(one.batch, one.draws), start)

    def batches(self, starts: Sequence[int]) -> Batch:
        """See `Feed.batches`. All are prepared at once, unless each is mixed."""
        if self.mixing is not None:
            return super().batches(starts)
        each = self._take(starts)
        draws = [one.draws for one in each if one.draws is not None]
        together = Batch(joined([one.batch.inputs for one in each]), torch.cat([one.batch.targets for one in each]))
        prepared = self._prepare(together, torch.cat(draws) if draws else None)
        return prepared.map(lambda values: values.view(len(starts), -1, *values.shape[1:]))

    def aside(self, starts: Sequence[int]) -> Generator[Batch, None, None]:
        """See `Feed.aside`. Uses processes of its own for its duration; bad samples are replaced and not counted."""
        loader = self._new_loader(map(self._keys, starts), self.num_workers, training=True)
        with contextlib.closing(Prefetcher(loader, lambda index, one: self._on_device(starts[index], one))) as batches:
            for start in starts:
                one = self._arrived(next(batches))
                yield self.mixed(self._prepare(one.batch, one.draws), start)

    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """See `Feed.evaluation_batches`. Bad samples are left out. Uses processes of its own for its duration."""
        samples = [Key(0, sample) for sample in range(self.num_samples)]
        begins = range(first * batch_size, self.num_samples, step * batch_size)
        batches = [samples[begin : begin + batch_size] for begin in begins]
        if not batches:  # start no processes
            return
        chunk = _EVALUATION_CHUNK if self.num_workers and self.one_shape else batch_size
        chunks = [cut_up(batch, chunk) for batch in batches]
        loader = self._new_loader(itertools.chain.from_iterable(chunks), self.num_workers, training=False)
        with contextlib.closing(Prefetcher(loader, lambda _, one: Staged(self._accept(one)))) as found:
            self._evaluating = found  # for `close`: an error's traceback may keep this generator from closing it
            for parts in chunks:
                yield from self._evaluation_batch([next(found).batch for _ in parts])

    def first_samples(self, count: int) -> Batch:
        """See `Feed.first_samples`. Loaded in the caller, without bad samples. Raises DataError if all are bad."""
        count = min(count, self.num_samples)
        chunk = 1 if self.one_shape else count
        starts = range(0, self.num_samples, chunk)
        keys = ([Key(0, sample) for sample in range(at, min(at + chunk, self.num_samples))] for at in starts)
        loader = self._new_loader(keys, 0, training=False)
        good: list[Batch] = []
        while chunk * len(good) < count and (loaded := next(loader, None)) is not None:
            if (batch := self._accept(loaded)).size:
                good.append(batch)
        for batch in self._evaluation_batch(good):
            self.sample_bytes = sum(each.nbytes for each in leaves(good[0].inputs))
            self._has_floats = any(each.is_floating_point() for each in leaves(good[0].inputs))
            return batch
        raise DataError(f"none of the {self.num_samples} samples can be read; look at the first ones.")

    def look_through(self, count: int) -> None:
        every = -(-self.num_samples // count)
        keys = ([Key(0, sample)] for sample in range(0, self.num_samples, every))
        for loaded in self._new_loader(keys if self._has_floats else (), 0, training=False):
            self._accept(loaded)

    def check_labels(self, classes: Classes, what: str) -> None:
        """See `Feed.check_labels`. Targets are checked as they are loaded."""
        self._classes = classes

    def for_measuring(self) -> Feed:
        """See `Feed.for_measuring`. Its batches repeat the first sample, or the first batch if their shapes differ."""
        if self._measuring is None:
            if self.one_shape:
                batch = self.first_samples(1).map(lambda each: each.repeat_interleave(self.batch_size, 0))
            else:
                batch = self.first_samples(self.batch_size)
            self._measuring = _SameBatchFeed(self.num_samples, self.mixed(batch, 0))
        return self._measuring

    def close(self) -> None:
        self._stop()
        if self._evaluating is not None:
            self._evaluating.close()
            self._evaluating = None
        self._buffer = PrefetchBuffer()
        self._last_round = self._round = frozenset()

    def _produce(self, positions: Positions, index: int) -> None:
        """See that the producer makes batches from `positions[index]` on, the first that is missing."""
        producer, soon = self._producer, 4 * len(self._round)
        while producer is None or not producer.reaches(positions, index, soon):
            if self._buffer.get(positions[index]) is None:
                self._stop()
                batches = (self._keys(positions[number]) for number in itertools.count(index))
                loader = self._new_loader(batches, self.num_workers, training=True)
                self._producer = Producer(self._buffer, loader, self._stage, positions, index)
                return
            index += 1  # it has been put meanwhile

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _new_loader(self, batches: Iterable[list[Key]], num_workers: int, training: bool) -> Loader:
        pins, largest = self._copies is not None, self.batch_size if training else _EVALUATION_CHUNK
        return Loader(
            self._data, batches, batch_size=largest, seed=self._seed, training=training, num_workers=num_workers,
            pins=pins, classes=self._classes, casts_to=self._prepare.casts_to,
        )  # fmt: skip

    def _keys(self, start: int) -> list[Key]:
        parts = self._ids(start)
        return [Key(epoch, *each) for epoch, *both in parts for each in zip(*map(Tensor.tolist, both), strict=True)]

    def _stage(self, start: int, loaded: Loaded) -> Staged:
        """Check and count a loaded batch, and copy it to the device."""
        self._accept(loaded)
        staged, (count, seconds) = self._on_device(start, loaded), self.loading_times
        self.loading_times = LoadingTimes(count + 1, seconds + loaded.seconds)
        return staged

    def _on_device(self, start: int, loaded: Loaded) -> Staged:
        """Copy a batch to the device: on CUDA on the copy stream, from pinned memory, without blocking the host."""
        batch, draws = Batch(loaded.inputs, loaded.targets), self._drawn(start, loaded.inputs)
        if self._copies is None:
            return Staged(batch, draws)
        with torch.cuda.stream(self._copies):
            batch = batch.map(self._enqueue_copy)
            draws = None if draws is None else self._enqueue_copy(draws.pin_memory())
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)
        return Staged(batch, draws, copied)

    def _enqueue_copy(self, values: Tensor) -> Tensor:
        return values.to(self._device, non_blocking=True)

    def _drawn(self, start: int, inputs: Tree) -> Tensor | None:
        """Return the draws of the batch at a position, int32 [B, R] on the host; None if nothing is augmented."""
        extent = self._prepare.extent(inputs)
        if extent is None:
            return None
        drawn = [self._draws((epoch, extent)).index_select(0, draws) for epoch, _, draws in self._ids(start)]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def _ids(self, start: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return (epoch, sample ids, the numbers they are drawn by) of a batch, epoch by epoch, on the host."""
        found = []
        for epoch, first, last in segments(start, self.batch_size, self.num_samples):
            ids = self._orders(epoch)[first:last]
            found.append((epoch, torch.from_numpy(ids), torch.from_numpy(self._order.draws(ids, first))))
        return found

    def _take(self, starts: Sequence[int]) -> list[Staged]:
        """Take batches from the prefetch buffer; those that were not announced are made first.

        On CUDA the current stream waits for the copies.
        """
        found = self._buffered(starts)
        if len(found) < len(starts):
            with self._unannounced:  # only one thread at a time may redirect the producer
                self.announce(starts)
                self.wait(starts)
                found = self._buffered(starts)
        assert len(found) == len(starts), "the batches are there after waiting for them"
        return [self._arrived(one) for one in found]

    def _arrived(self, one: Staged) -> Staged:
        """Let the current CUDA stream wait for the copy."""
        if one.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(one.copied)
            for tensor in leaves((one.batch, one.draws)):
                tensor.record_stream(stream)  # the buffer may drop it while this stream still reads it
        return one

    def _buffered(self, starts: Sequence[int]) -> list[Staged]:
        return [one for start in starts if (one := self._buffer.get(start)) is not None]

    def _accept(self, loaded: Loaded) -> Batch:
        """Return the batch, and count its bad samples. Raises BadSampleError if there are too many."""
        if self._prepare.casts_to is not None:
            self.note_rounding(loaded.rounded, self._prepare.casts_to)
        for bad in loaded.bad:
            new, most = bad.sample not in self._bad, self._data.max_bad
            self._bad[bad.sample] = bad
            if len(self._bad) > most:
                failed = BadSampleError(f"{bad.name} cannot be read ({bad.reason}); {self._data.remedy}.")
                raise failed from (RuntimeError(bad.trace) if bad.trace else None)
            if new:
                so_far = f"{len(self._bad)} of at most {most}"
                self._notes.append(f"Skipped {bad.name}, which cannot be read ({bad.reason}); {so_far}.")
        return Batch(loaded.inputs, loaded.targets)

    def _evaluation_batch(self, chunks: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batch of several chunks, unless all its samples are bad."""
        parts = [one for one in chunks if one.size]
        if not parts:
            return
        forms = {f"input {form_of(one.inputs)}, target {form_of(one.targets)}" for one in parts}
        if len(forms) > 1:
            shown = " and ".join(sorted(forms)[:2])
            raise BadDataError(
                f"the samples of the data set cannot be stacked into a batch ({shown}); return the same entries, of "
                "equal shape, for every sample, or pad them in a collate function: Collated(dataset, collate)."
            )
        batch = Batch(joined([one.inputs for one in parts]), torch.cat([one.targets for one in parts]))
        yield self._prepare(batch if self._copies is None else batch.map(self._enqueue_copy))


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all feeds of the process copy to a CUDA device.

    torch hands out 32 streams of a priority in turn. So that this one is never one that a graph is captured on, which
    would then hold the copies that a producer thread enqueues meanwhile, it is one alone, of the priority that only
    averaging has.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _SameBatchFeed(Feed):
    """A feed that returns one batch at every position."""

    def __init__(self, num_samples: int, batch: Batch) -> None:
        super().__init__(num_samples, len(batch.targets))
        self._batch = batch

    def batch(self, start: int) -> Batch:
        return self._batch

    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        if first == 0:  # there is only one batch
            yield self._batch.map(lambda each: each[:batch_size])


class Preparation:
    """Prepares streamed batches on the device. Any thread may call it.

    uint8 images [B, C, H, W] and clips [B, C, T, H, W] are scaled to [0, 1] and normalised. Floating inputs are cast,
    and normalised if there is a normalisation. Other inputs stay as they are. Images are augmented by draws, int32
    [B, R], of which the augmentation has those that it needs: whether the image is mirrored; (top, left) of its crop;
    (top, bottom, left, right) of the erased rectangle. Masks as targets are flipped with their images.
    """

    def __init__(self, form: BatchFormat, augmentation: Augmentation) -> None:
        self._form, self._augmentation = form, augmentation
        flips, crops, erases = bool(augmentation.flip), augmentation.crop_padding > 0, augmentation.random_erasing > 0
        self._corner = slice(flips, flips + 2) if crops else None
        self._edges = slice(-NUM_EDGES, None) if erases else None
        self._constants: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._pixels: dict[tuple[int, int, int], PixelNormaliser] = {}

    def extent(self, inputs: Tree) -> tuple[int, int] | None:
        """Return (H, W) of the images of a batch, on which draws depend, or ones; None if nothing is augmented."""
        if not self._augmentation.active:
            return None
        if self._edges is None:
            return 1, 1
        height, width = next(each.shape[2:] for each in leaves(inputs) if is_image_batch(each))
        return height, width

    def draws(self, seed: int, epoch: int, num_samples: int, extent: tuple[int, int]) -> Tensor:
        """Return the draws of an epoch by sample, int32 [N, R], on the host."""
        own, rows = self._augmentation, list[Any]()
        if own.flip:
            rows.append(own.draw_flips(seed, epoch, num_samples))
        if self._corner:
            rows += own.draw(seed, epoch, num_samples)[:2]
        if self._edges:
            rows += [*own.draw_erased(seed, epoch, num_samples, extent)]
        return torch.from_numpy(np.stack(rows, axis=1).astype(np.int32))  # half the memory, for millions of samples

    def __call__(self, batch: Batch, draws: Tensor | None = None) -> Batch:
        """Return the prepared batch, enqueued on the current stream; the host does not block.

        Args:
            batch: on the device. Of several inputs only bytes are normalised.
            draws: int32 [B, R] on the device; None for no augmentation.
        """
        inputs, targets = batch
        mirrored = draws[:, 0].bool() if draws is not None and self._augmentation.flip else None

        def prepared(each: Tensor) -> Tensor:
            if is_image_batch(each):
                return self._images(each, mirrored, draws)
            return self._prepared(each, self._form if isinstance(inputs, Tensor) else self._form.of_several(each))

        if mirrored is not None and targets.ndim > 2:  # not a class or a vector of values
            targets = flipped(targets, mirrored)
        return Batch(map_tree(prepared, inputs), targets)

    def _prepared(self, inputs: Tensor, form: BatchFormat) -> Tensor:
        if is_clip_batch(inputs):
            return self._normalised(inputs, form.normalisation or IDENTITY)
        if inputs.is_floating_point():
            normalisation = form.normalisation
            inputs = inputs.to(self._form.dtype) if normalisation is None else self._normalised(inputs, normalisation)
        last = self._form.channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if last else inputs

    @property
    def casts_to(self) -> torch.dtype | None:
        """Return the dtype that floating inputs are cast to without a normalisation; None if they are normalised."""
        return None if self._form.normalisation else self._form.dtype

    def _normalised(self, inputs: Tensor, normalisation: Normalisation) -> Tensor:
        """Normalise as `Normalisation.apply`, with constants that are copied to the device once."""
        kind = inputs.ndim, inputs.dtype
        if kind not in self._constants:
            normalisation.check_channels(inputs.shape[1])
            self._constants[kind] = normalisation.constants(inputs, self._form.dtype)
        mean, std = self._constants[kind]
        return inputs.to(mean.dtype).sub(mean).div_(std).to(self._form.dtype)

    def _images(self, images: Tensor, mirrored: Tensor | None, draws: Tensor | None) -> Tensor:
        if draws is not None and self._corner:
            images = cropped(images, draws[:, self._corner].T, self._augmentation.crop_padding)
        if mirrored is not None:
            images = flipped(images, mirrored)
        shape = images.shape[1], images.shape[2], images.shape[3]
        if shape not in self._pixels:
            self._pixels[shape] = PixelNormaliser(shape, self._form)
        erased = draws[:, self._edges].T if draws is not None and self._edges else None
        return self._pixels[shape](images.permute(0, 2, 3, 1).reshape(len(images), -1), erased)
