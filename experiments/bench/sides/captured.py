"""Training steps of one or several models that a CUDA graph can hold whole: feed, forward, backward and update.

The data are resident and augmented as for every other side. The place in the stream of samples is a tensor on the
device, so a step asks nothing of the host; and as the tables of a few epochs lie there too and are used over and over,
not even the end of an epoch does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.data.augmentation import PaddedImages
from crossbow_py.data.normalisation import BatchFormat, Normalisation, PixelNormaliser
from crossbow_py.data.sampler import epoch_order
from experiments.bench.gate import Gate
from experiments.bench.sides.updates import bf16_update, plain_update
from experiments.bench.workloads import Workload

SEED = 0
EPOCHS = 8
_SGD = "fused"
_WARM_STEPS = 3
# Replays a host may be ahead of the device: enough to keep it busy, few enough for a window to end when it should.
_IN_FLIGHT = 4

Step = Callable[[], None]
LossOf = Callable[[Tensor], Tensor]


class DeviceFeed:
    """Batches whose place in the stream moves on the device. Its methods enqueue on the current stream alone.

    Args:
        workload: the images and what is done to them.
        batch_size: images a call of `next_picks`.
        dtype: of the images that `take` gives.
        channels_last: their memory format.
    """

    def __init__(self, workload: Workload, batch_size: int, dtype: torch.dtype, channels_last: bool) -> None:
        device = torch.device(workload.device)
        images, labels = workload.tensors()
        self._images = PaddedImages(images, workload.augmentation.crop_padding, device)
        form = BatchFormat(device, dtype, channels_last, Normalisation(workload.mean, workload.std))
        self._normalise = PixelNormaliser((images.shape[1], images.shape[2], images.shape[3]), form)
        self._picks = torch.from_numpy(self._tables(workload, len(images))).to(device)
        self._labels = labels.to(device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(batch_size, device=device)

    def next_picks(self) -> Tensor:
        """Int64 [3, batch_size] of the next batch: sample id, first pixel of its crop, mirrored or not."""
        places = (self._place + self._offsets).remainder_(self._picks.shape[1])
        self._place.add_(len(self._offsets)).remainder_(self._picks.shape[1])
        return self._picks.index_select(1, places)

    def take(self, picks: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, C, H, W], augmented and normalised, and labels [B]. A compiler may look inside."""
        images = self._normalise(self._images.crops(picks[1], picks[2]))
        return images, self._labels.index_select(0, picks[0])

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
    if device != "cuda":
        return step
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_STEPS):  # libraries load and choose, compilers compile, the optimizer makes its state
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # waits for the device first
        step()
    return few_ahead(graph.replay)


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
    """Until the gate raises FinishedError."""
    while True:
        step()
        gate.tick(images)


def how(device: str) -> str:
    """Say in a side's detail whether its step became a graph."""
    return "one CUDA graph a step" if device == "cuda" else "no CUDA graph"


def model_step(precision: str, images: int, workload: Workload, compiler: str | None) -> Step:
    """A training step of a fresh model on so many images; `compiler` is a backend of torch.compile."""
    torch.backends.cudnn.benchmark = True
    bf16 = precision == "bf16"
    model = workload.make_model().to(workload.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    update = bf16_update(model, _SGD) if bf16 else plain_update(list(model.parameters()), _SGD)
    feed = DeviceFeed(workload, images, torch.bfloat16 if bf16 else torch.float32, channels_last=True)

    def loss_of(picks: Tensor) -> Tensor:
        inputs, labels = feed.take(picks)
        return nn.functional.cross_entropy(model(inputs).float(), labels)

    loss = _through(compiler, loss_of)

    def step() -> None:
        loss(feed.next_picks()).backward()  # type: ignore[no-untyped-call]
        update()

    return step


def _through(compiler: str | None, function: LossOf) -> LossOf:
    if compiler is None:
        return function
    options: dict[str, Any] = {"backend": compiler, "dynamic": False, "fullgraph": True}
    return cast(LossOf, torch.compile(function, **options))
