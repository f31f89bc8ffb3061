"""The counter-based numbers against Philox-4x64-10 as published, written out in Python integers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from crossbow_py.data.randomness import permutation, raw_words, sample_block, sample_words

MASK = 2**64 - 1


def philox_block(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Ten rounds of Philox-4x64 (Salmon et al. 2011, table 2 and figure 2)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & MASK, (p0 >> 64) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def test_raw_words_of_seed_purpose_epoch_are_philox_blocks() -> None:
    purpose = int.from_bytes(hashlib.blake2b(b"flip", digest_size=8).digest(), "little")
    expected = [word for block in (1, 2) for word in philox_block([block, 0, 0, 7], (123, purpose))]
    assert raw_words(123, "flip", 7, 8).tolist() == expected


@pytest.mark.parametrize(("seed", "epoch", "sample"), [(0, 0, 0), (5, 3, 17), (-1, 2, 2**40), (2**64 - 1, 2**31, 1)])
def test_sample_block_is_a_part_of_the_words_of_that_sample(seed: int, epoch: int, sample: int) -> None:
    words = sample_words(seed, "x", epoch, sample, 12).tolist()
    assert [word for block in range(3) for word in sample_block(seed, "x", epoch, sample, block)] == words


def test_permutation_of_n_holds_every_id_once() -> None:
    order = permutation(3, "sample order", 1, 1_000)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(1_000))
    assert order.tolist() == np.argsort(raw_words(3, "sample order", 1, 1_000)).tolist()


def test_permutation_of_seed_0_stays_what_checkpoints_rely_on() -> None:
    assert permutation(0, "sample order", 0, 8).tolist() == [3, 4, 6, 2, 1, 7, 0, 5]
