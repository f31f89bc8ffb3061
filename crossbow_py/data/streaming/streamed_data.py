"""The interface of data sets too large for the device: worker processes load samples when they are needed.

A *key* is a sample in an epoch. What is loaded depends on (seed, key) only, so neither the number of workers nor the
order in which they work changes a batch, and a run may stop and resume between any two batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from crossbow_py.core.trees import Tree
from crossbow_py.data.normalisation import Loses

OnSample = Callable[[int], None]


class Key(NamedTuple):
    """A sample in an epoch of the training stream."""

    epoch: int
    sample: int
    place: int | None = None  # in the epoch, if samples may come several times in it

    @property
    def draw(self) -> int:
        """The number by which random numbers are drawn in the epoch, see `SampleOrder.draws`."""
        return self.sample if self.place is None else self.place


class BadSample(NamedTuple):
    """A sample that could not be loaded: its number, its name for the user (such as a path), and the reason.

    `trace` is the traceback of an exception in the user's own code.
    """

    sample: int
    name: str
    reason: str
    trace: str = ""


class Loaded(NamedTuple):
    """A loaded batch, on the host. `fetch` gives the first three fields, the worker that called it the others.

    Attributes:
        inputs: [B, ...], or a tree of such. Images are uint8 [B, C, H, W], channels last in memory.
        targets: [B, ...].
        bad: the samples that were left out or replaced.
        seconds: the time that one process spent on it.
        rounded: what casting loses of inputs and targets.
    """

    inputs: Tree
    targets: Tensor
    bad: tuple[BadSample, ...] = ()
    seconds: float = 0.0
    rounded: Loses | None = None


class StreamedData(ABC):
    """Base of the data sets of a streaming feed. It is sent to worker processes: no locks, threads or open files in it.

    Attributes:
        labels: the class of every sample [N], if they are known without loading.
        max_bad: how many different samples may be bad before training stops.
        timeout_s: a worker that takes longer for one sample counts as hanging.
        patience_remedy: how the user sets `timeout_s`, as the end of a sentence; empty if that is impossible.
        remedy: what the user may do about a bad sample, as the end of a sentence.
        image_shape: (C, H, W) of inputs that are uint8 images, all of one size; None for other inputs.
        one_shape: whether batches of one size have the same shapes, and may be put together of smaller ones.
    """

    labels: npt.NDArray[np.int64] | None = None
    max_bad: int = 0
    remedy: str = "correct the data set"
    image_shape: tuple[int, int, int] | None = None
    one_shape: bool = True
    timeout_s: float = 120.0
    patience_remedy: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """Return N, the number of samples."""

    @abstractmethod
    def fetch(
        self, keys: Sequence[Key], *, seed: int, training: bool, on_sample: OnSample, out: Tensor | None = None
    ) -> Loaded:
        """Load a batch. Called in worker processes, or in the caller's process if there are none.

        A sample that cannot be loaded does not raise: it is listed in `bad`.

        Args:
            keys: B samples. For evaluation the epoch is 0.
            seed: seed of everything random.
            training: augment, and replace a bad sample by another one, so that the batch has B samples; otherwise
                nothing is random and bad samples are left out.
            on_sample: called with each sample before it is loaded, so that a worker's death can be traced to it.
            out: uint8 [at least B, *image_shape], channels last, into whose first B images the inputs are written.
                Only given with an `image_shape`.
        """

    @abstractmethod
    def name_of(self, sample: int) -> str:
        """Return the sample's name for the user, such as its path."""

    def subset(self, ids: npt.NDArray[np.int64]) -> StreamedData:
        """Return a data set of the samples `ids`, in that order; asked of what a source returns."""
        raise NotImplementedError(f"{type(self).__name__} is used as a whole")
