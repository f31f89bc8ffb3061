"""Counter-based random numbers: a value depends only on (seed, purpose, epoch, sample), so there is no state to save.

Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by (seed, purpose), with
the epoch in the highest word of its counter. Only raw 64-bit words are taken from NumPy. Its distributions may change
between versions, but the raw words of a bit generator may not, and a resumed run must see the same order.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

_WORD = 2**64
# Philox-4x64-10: table 2 and section 4.3 of the paper.
_ROUNDS = 10
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def raw_words(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words. A longer table begins with the shorter one."""
    return sample_words(seed, purpose, epoch, 0, count)


def sample_words(seed: int, purpose: str, epoch: int, sample: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words of one sample, without a table: the sample is the counter's second word."""
    key = np.array([seed % _WORD, _purpose_word(purpose)], dtype=np.uint64)
    counter = np.array([0, sample, 0, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def sample_block(seed: int, purpose: str, epoch: int, sample: int, block: int) -> tuple[int, int, int, int]:
    """Return words 4·block to 4·block + 3 of `sample_words`, computed with Python's integers.

    For four words this is faster: NumPy asks the operating system for entropy whenever it makes a generator, even one
    with a key.
    """
    k0, k1 = seed % _WORD, _purpose_word(purpose)
    c0, c1, c2, c3 = block + 1, sample, 0, epoch  # NumPy counts up before it draws
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 % _WORD, (p0 >> 64) ^ c3 ^ k1, p0 % _WORD
        k0, k1 = (k0 + _WEYL[0]) % _WORD, (k1 + _WEYL[1]) % _WORD
    return c0, c1, c2, c3


def uniform(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.float64]:
    """Return a float64 table [count] by sample id of values in [0, 1), with 53 random bits each."""
    return (raw_words(seed, purpose, epoch, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, purpose: str, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """Return a random order of 0 .. count-1, int64: the ranks of random words (a tie has probability 2^-64 a pair)."""
    return np.argsort(raw_words(seed, purpose, epoch, count), kind="stable").astype(np.int64, copy=False)


@functools.cache
def _purpose_word(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
