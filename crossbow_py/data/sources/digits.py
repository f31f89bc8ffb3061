"""The UCI handwritten digits, which come with the package: real data that needs no download.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
doi 10.24432/C50P49, CC BY 4.0. assets/digits.txt says which files were taken.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch

from crossbow_py.data.datasets import Data, Pair
from crossbow_py.data.sources.base import PublishedSettings

# Every sixth sample of a class, in the file's order, is for testing: 1,501 + 296 samples.
_TEST_EVERY = 6


class Digits(PublishedSettings):
    """1,797 handwritten digits, 8 x 8, values 0 to 16."""

    NAME = "digits"
    # Moments of the values divided by 255, as for every image; the values themselves end at 16.
    MEAN = (0.01915,)
    STD = (0.02360,)
    SHAPE = (1, 8, 8)
    NUM_TRAIN = 1_501
    NUM_TEST = 296

    def read(self, progress: bool) -> tuple[Data, Data]:
        """Return (train, test), split by class and position in the file: the same on every machine."""
        with (files("crossbow_py.data.sources") / "assets" / "digits.npz").open("rb") as file, np.load(file) as arrays:
            images, labels = arrays["images"], arrays["labels"].astype(np.int64)
        # For each sample, how many samples of the same class come before it.
        before = np.cumsum(labels[:, None] == np.arange(labels.max() + 1), axis=0) - 1
        testing = np.take_along_axis(before, labels[:, None], axis=1)[:, 0] % _TEST_EVERY == _TEST_EVERY - 1
        return _pair(images[~testing], labels[~testing]), _pair(images[testing], labels[testing])


def _pair(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> Pair:
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)
