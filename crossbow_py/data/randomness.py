"""Counter-based random numbers: every value follows from (seed, purpose, epoch, sample); there is no state to save.

Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by (seed, purpose), with
the epoch in the highest word of its counter. Only raw 64-bit words are taken from NumPy: its distributions may change
between versions, the raw words of a bit generator may not, and a resumed run must see the same order.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_WORD = 2**64


def raw_words(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit words. Longer tables begin with the shorter ones."""
    key = np.array([seed % _WORD, _purpose_word(purpose)], dtype=np.uint64)
    counter = np.array([0, 0, 0, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def sample_words(seed: int, purpose: str, epoch: int, sample: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit words of one sample, without a table: the sample stands in the counter's second word."""
    key = np.array([seed % _WORD, _purpose_word(purpose)], dtype=np.uint64)
    counter = np.array([0, sample, 0, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniform(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.float64]:
    """Table [count] by sample id of values in [0, 1), with 53 random bits each."""
    return (raw_words(seed, purpose, epoch, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """Random order of 0 .. count-1: the rank of random words (ties, one in 2^64 a pair, keep their order)."""
    return np.argsort(raw_words(seed, purpose, epoch, count), kind="stable").astype(np.int64, copy=False)


def _purpose_word(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
