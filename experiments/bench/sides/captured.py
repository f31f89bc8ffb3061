"""Training steps that a CUDA graph can hold whole: feed, forward, backward and update.

The data are resident and augmented as for every other side. The place in the stream of samples is a tensor on the
device, so a step asks nothing of the host; and as the tables of a few epochs lie there too and are used over and over,
not even the end of an epoch does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.data.augmentation import PaddedImages
from crossbow_py.data.normalisation import BatchFormat, Normalisation, PixelNormaliser
from crossbow_py.data.sampler import epoch_order
from experiments.bench.gate import Gate
from experiments.bench.sides.tuned import bf16_update, plain_update
from experiments.bench.workloads import Workload

SEED = 0
EPOCHS = 8
_SGD = "fused"
_WARM_STEPS = 3
# Replays a host may be ahead of the device: enough to keep it busy, few enough for a window to end when it should.
_IN_FLIGHT = 4

Step = Callable[[], None]


class DeviceFeed:
    """Channels-last batches whose place in the stream moves on the device; enqueues on the current stream alone."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        device = torch.device(workload.device)
        images, labels = workload.tensors()
        self._images = PaddedImages(images, workload.augmentation.crop_padding, device)
        form = BatchFormat(device, dtype, True, Normalisation(workload.mean, workload.std))
        self._normalise = PixelNormaliser((images.shape[1], images.shape[2], images.shape[3]), form)
        self._picks = torch.from_numpy(self._tables(workload, len(images))).to(device)
        self._labels = labels.to(device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(workload.batch_size, device=device)

    def next(self) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W], augmented and normalised, and labels [B]."""
        places = (self._place + self._offsets).remainder_(self._picks.shape[1])
        self._place.add_(len(self._offsets)).remainder_(self._picks.shape[1])
        samples, first_pixels, mirrored = self._picks.index_select(1, places)
        return self._normalise(self._images.crops(first_pixels, mirrored)), self._labels.index_select(0, samples)

    def _tables(self, workload: Workload, num_samples: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        tables = []
        for epoch in range(EPOCHS):
            order = epoch_order(SEED, epoch, num_samples)
            top, left, mirrored = (drawn[order] for drawn in workload.augmentation.draw(SEED, epoch, num_samples))
            tables.append(np.stack([order, self._images.first_pixel(order, top, left), mirrored]))
        return np.concatenate(tables, axis=1)


def captured(step: Step, device: str) -> Step:
    """Return the step as a CUDA graph, captured after a few steps and replayed a few ahead; elsewhere the step itself.

    Raises RuntimeError when the step cannot be run or captured.
    """
    return few_ahead(graph_of(step)) if device == "cuda" else step


def graph_of(step: Step) -> Step:
    """The replay of a CUDA graph of a step, which runs before, as libraries and kernels are loaded at first calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_STEPS):  # libraries load and choose, compilers compile, the optimizer makes its state
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # waits for the device first
        step()

    def replay() -> None:
        graph.replay()

    replay.reads = step  # type: ignore[attr-defined]  # the model and data, whose memory a graph does not keep alive
    return replay


def few_ahead(step: Step) -> Step:
    """The step, after waiting for the one that was enqueued a few calls ago."""
    events = cycle([torch.cuda.Event() for _ in range(_IN_FLIGHT)])  # type: ignore[no-untyped-call]

    def bounded() -> None:
        event = next(events)
        event.synchronize()  # host–device synchronisation; returns at once before the event's first record
        step()
        event.record()

    return bounded


def train_for_ever(step: Step, images: int, gate: Gate) -> None:
    while True:
        step()
        gate.tick(images)


def model_step(precision: str, workload: Workload, mode: str | None = None) -> Step:
    """A step of one tuned model, compiled first if `mode` is one of torch.compile."""
    torch.backends.cudnn.benchmark = True
    bf16 = precision == "bf16"
    model = workload.make_model().to(workload.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    update = bf16_update(model, _SGD) if bf16 else plain_update(list(model.parameters()), _SGD)
    if mode is not None:
        model.compile(mode=mode)
    feed = DeviceFeed(workload, torch.bfloat16 if bf16 else torch.float32)

    def step() -> None:
        inputs, labels = feed.next()
        nn.functional.cross_entropy(model(inputs).float(), labels).backward()  # type: ignore[no-untyped-call]
        update()

    return step
