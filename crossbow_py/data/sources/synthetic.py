"""Random images or clips that can be learned, for benchmarks and tests: the mean of a class's pattern and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import read_host
from crossbow_py.core.settings import setting
from crossbow_py.data.datasets import Data, Pair
from crossbow_py.data.randomness import raw_words
from crossbow_py.data.sources.base import Declared, SourceSettings

# The mean of two independent uniform bytes: 0.5, and (1/√12)/√2 = 0.204.
_MEAN, _STD = 0.5, 0.2041


@dataclass(frozen=True)
class Synthetic(SourceSettings):
    """Generated images or clips: a pattern for each class, and noise; the same for every seed of the run."""

    NAME = "synthetic"

    shape: tuple[int, ...] = setting((3, 32, 32), "of a sample: channels, of a clip frames, height, width", minimum=1)
    num_classes: int = setting(10, "number of classes", minimum=2, maximum=100_000)
    num_train: int = setting(10_000, "training samples", minimum=1)
    num_test: int = setting(2_000, "test samples", minimum=1)
    seed: int = setting(0, "seed of patterns and noise", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) not in (3, 4):
            rule = "data.shape must be [channels, height, width] or [channels, frames, height, width]"
            raise UserError(f"{rule}, got {list(self.shape)}; give three or four sizes.")

    def read(self, progress: bool) -> tuple[Data, Data]:
        """Return (train, test), the same patterns with different noise. Raises UserError if memory is too small."""
        sample, label = math.prod(self.shape), 8
        needed = (self.num_train + self.num_test) * (sample + label) + self.num_classes * sample
        left = read_host().memory_bytes
        if needed > left:
            rule = f"the samples of data=synthetic must fit into {left / 2**30:.1f} GiB of memory, got more"
            raise UserError(f"{rule}; lower data.num_train, data.num_test, data.num_classes or data.shape.")
        patterns = self._bytes("patterns", self.num_classes)
        return self._samples(patterns, "train", self.num_train), self._samples(patterns, "test", self.num_test)

    def _declared(self) -> Declared | None:
        return Declared(self.shape, self.num_classes, self.num_train, self.num_test, resident=True)

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        return (_MEAN,) * self.shape[0], (_STD,) * self.shape[0]

    def count_classes(self, train: Data, test: Data) -> int | None:
        return self.num_classes

    def _samples(self, patterns: npt.NDArray[np.uint8], purpose: str, count: int) -> Pair:
        labels = np.arange(count, dtype=np.int64) % self.num_classes
        # Adding halves keeps bytes from overflowing without a wider copy of the data.
        samples = (self._bytes(purpose, count) >> 1) + (patterns >> 1)[labels]
        return torch.from_numpy(samples), torch.from_numpy(labels)

    def _bytes(self, purpose: str, count: int) -> npt.NDArray[np.uint8]:
        """Return uniform random bytes, uint8 [count, *shape]."""
        size = count * math.prod(self.shape)
        words = raw_words(self.seed, f"synthetic {purpose}", 0, -(-size // 8))
        return words.astype("<u8", copy=False).view(np.uint8)[:size].reshape(count, *self.shape)
