"""Packing policies: who is admitted beside whom, worked out by hand, and what holds for every policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.packs.policies import Policy, Waiting, admit, fair_share, few_kinds


def trial(
    number: int, signature: str = "a", batch_size: int = 32, features: Sequence[float] = (), share: float = 0.25
) -> Waiting:
    return Waiting(number, signature, batch_size, tuple(features), share)


def admitted(policy: Policy, waiting: Sequence[Waiting], running: Sequence[Waiting] = (), seed: int = 0) -> list[int]:
    return [each.trial for each in admit(policy, waiting, running, seed=seed)]


# --- one policy at a time ---------------------------------------------------------------------------------------------


def test_policy_none_runs_the_first_trial_alone() -> None:
    assert admitted("none", [trial(3), trial(1)]) == [3]
    assert admitted("none", [trial(3)], [trial(0, share=0.01)]) == []


def test_signature_prefers_what_can_join_a_bank_that_runs() -> None:
    waiting = [trial(1, "b"), trial(2, "a"), trial(3, "a")]
    assert admitted("signature", waiting, [trial(0, "a")]) == [2, 3, 1]
    assert admitted("signature", waiting, [trial(0, "a", share=0.5)]) == [2, 3]


def test_signature_takes_the_next_one_beside_when_the_first_is_used_up() -> None:
    waiting = [trial(1, "c"), trial(2, "b"), trial(3, "c"), trial(4, "b")]
    assert admitted("signature", waiting, [trial(0, "a")]) == [1, 3, 2]


def test_batch_size_admits_only_that_of_the_running_trials() -> None:
    waiting = [trial(1, batch_size=64), trial(2, batch_size=32), trial(3, "b", batch_size=64)]
    assert admitted("batch_size", waiting) == [1, 3]
    assert admitted("batch_size", waiting, [trial(0, batch_size=32)]) == [2]
    assert admitted("batch_size", waiting, [trial(0, batch_size=16)]) == []


def test_random_choice_follows_from_seed_and_trial_numbers_alone() -> None:
    waiting = [trial(number) for number in range(30)]
    chosen = admitted("random", waiting, seed=5)
    assert len(chosen) == 4 and len(set(chosen)) == 4
    assert admitted("random", waiting[::-1], seed=5) == chosen
    assert admitted("random", [each for each in waiting if each.trial != chosen[1]], seed=5)[:3] == [
        chosen[0],
        *chosen[2:],
    ]
    assert len({tuple(admitted("random", waiting, seed=seed)) for seed in range(20)}) == 20


def test_knn_admits_the_nearest_to_the_mean_of_those_that_run() -> None:
    running = [trial(8, features=(0.0, 0.0)), trial(9, features=(1.0, 0.0))]  # the mean is (0.5, 0)
    waiting = [
        trial(0, features=(0.0, 1.0)),  # at 1.118
        trial(1, features=(0.5, 0.5)),  # at 0.5
        trial(2, features=(0.9, 0.3)),  # at 0.5 exactly as far
        trial(3, features=(0.5, 0.1)),  # at 0.1
    ]
    assert admitted("knn", waiting, running) == [3, 1]
    assert math.dist((0.5, 0.5), (0.5, 0.0)) == math.dist((0.9, 0.3), (0.5, 0.0)) == 0.5
    assert admitted("knn", [waiting[2], *waiting[:2]], running) == [2, 1]


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 7, 10, 49])
def test_device_takes_exactly_a_full_pack_whatever_the_rounding_of_its_shares(width: int) -> None:
    waiting = [trial(number, share=1 / width) for number in range(60)]
    assert admitted("signature", waiting) == list(range(width))
    assert admitted("signature", waiting[5:], waiting[:2]) == list(range(5, 3 + width))


def test_trial_wider_than_the_device_still_runs_alone() -> None:
    assert admitted("signature", [trial(0, share=1.5), trial(1, share=0.1)]) == [0]
    assert admitted("signature", [trial(0, share=1.5)], [trial(1, share=0.1)]) == []


WAITING = st.lists(
    st.builds(
        Waiting,
        st.integers(0, 99),
        st.sampled_from("abc"),
        st.sampled_from([16, 32]),
        st.tuples(st.floats(0, 1), st.floats(0, 1)),
        st.sampled_from([1.0, 1 / 2, 1 / 3, 1 / 7, 1 / 16]),
    ),
    max_size=20,
    unique_by=lambda each: each.trial,
)


@pytest.mark.parametrize("policy", get_args(Policy))
@given(waiting=WAITING, split=st.integers(0, 20), seed=st.integers(0, 3))
def test_any_policy_admits_waiting_trials_once_and_never_more_than_fit(
    policy: Policy, waiting: list[Waiting], split: int, seed: int
) -> None:
    running = admit("signature", waiting[:split], [], seed=seed)
    rest = [each for each in waiting if each not in running]
    found = admit(policy, rest, running, seed=seed)
    assert len(found) == len(set(found)) and set(found) <= set(rest)
    assert math.fsum(each.share for each in (*running, *found)) <= 1 + 1e-6
    assert found or running or not rest  # nothing idles while a trial waits
    assert admit(policy, rest, running, seed=seed) == found
    full = math.fsum(each.share for each in (*running, *found))
    if policy in ("signature", "random", "knn"):
        assert all(full + each.share > 1 for each in rest if each not in found)


def test_kinds_beyond_the_most_are_left_out_and_those_that_run_count() -> None:
    a, b, c = (Waiting(trial, name, 8, (), 0.1) for trial, name in enumerate("abc"))
    assert few_kinds([a, b, c, a], [], 2) == [a, b, a]
    assert few_kinds([a, b, c], [c], 2) == [a, c]
    assert few_kinds([a, b], [], 0) == [a]


@pytest.mark.parametrize(("segments", "workers", "share"), [(9, 1, 9), (9, 2, 5), (27, 4, 7), (1, 3, 1), (0, 2, 0)])
def test_fair_share_leaves_something_for_everybody(segments: int, workers: int, share: int) -> None:
    assert fair_share(segments, workers) == share
