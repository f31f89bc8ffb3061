"""Data sets that are too large to live on the device: their samples are made when they are needed, by worker processes.

A *key* says which sample in which epoch. What a sample looks like follows from (seed, key) alone, so neither the number
of workers nor the order in which they work changes anything, and a run may stop and go on between any two batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor


class Key(NamedTuple):
    """A sample in an epoch of the training stream."""

    epoch: int
    sample: int


class BadSample(NamedTuple):
    """A sample that could not be made: which one, what the user calls it (a path), and why, in words.

    `trace` is the traceback of an exception in the user's own code.
    """

    sample: int
    name: str
    reason: str
    trace: str = ""


class Fetched(NamedTuple):
    """A batch as a worker hands it over, on the host.

    Attributes:
        inputs: [B, ...]. Images are uint8 [B, C, H, W], channels last in memory.
        targets: [B, ...].
        bad: samples that were left out or replaced.
    """

    inputs: Tensor
    targets: Tensor
    bad: tuple[BadSample, ...] = ()


class StreamedData(ABC):
    """What a streaming feed draws from. It is sent to worker processes: no locks, threads or open files in it.

    Attributes:
        max_bad: how many different samples may turn out bad before training stops.
        timeout_s: a worker that is longer over one sample hangs.
        patience_remedy: how the user sets `timeout_s`, as the end of a sentence; empty where he cannot.
        remedy: what the user may do about a bad sample, as the end of a sentence.
        image_shape: (C, H, W) of inputs that are uint8 images, all of one size; None for other inputs.
    """

    max_bad: int = 0
    remedy: str = "mend the data set"
    image_shape: tuple[int, int, int] | None = None
    timeout_s: float = 120.0
    patience_remedy: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """N, the number of samples."""

    @abstractmethod
    def fetch(
        self,
        keys: Sequence[Key],
        *,
        seed: int,
        training: bool,
        on_sample: Callable[[int], None],
        out: Tensor | None = None,
    ) -> Fetched:
        """The batch of these samples; called in worker processes, or in the caller's when there are none.

        Args:
            keys: B of them. For evaluation the epoch is 0.
            seed: of everything random.
            training: augment, and put another sample in a bad one's place, so that there are B of them; otherwise
                nothing is random and bad samples are left out.
            out: uint8 [at least B, *image_shape], channels last, to write the inputs into, from the first place on.
                Never given without an `image_shape`.
            on_sample: told the sample before it is worked on, so that a worker's death can be laid to something.

        A sample that cannot be made is no exception: it is listed in `bad`.
        """

    @abstractmethod
    def name_of(self, sample: int) -> str:
        """What the user calls the sample, such as its path."""

    @abstractmethod
    def subset(self, ids: npt.NDArray[np.int64]) -> StreamedData:
        """The samples `ids`, in that order, as a data set of their own."""
