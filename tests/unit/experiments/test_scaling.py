"""Rounds on many GPUs: all-reduces and rounds worked out by hand, limits, and what must not fall."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.scaling import plot, report, run
from experiments.scaling.inputs import WORKLOADS, last_bucket_bytes
from experiments.scaling.network import NETWORKS, Link, Network, ring_s, tree_s
from experiments.scaling.run import SYNCHRONOUS_MODE, Mode, Scene
from experiments.scaling.simulator import Averaging, Tasks, log_sigma, sma_round_s, synchronous_round_s

LINK = Link(alpha_s=1.0, bytes_per_s=100.0)
SLOW = Link(alpha_s=10.0, bytes_per_s=10.0)


def round_s(tasks: Tasks, ranks: int, averaging: Averaging | None, **keywords: Any) -> float:
    return sma_round_s(tasks, ranks, averaging, **{"warm_up": 8, "rounds": 64, **keywords})


@pytest.mark.parametrize(
    ("ranks", "ring", "tree"),
    # 400 bytes: ring 2(n−1) steps and 2(n−1)/n · 4 s, tree 2⌈log₂ n⌉ steps and 8 s.
    [(1, 0.0, 0.0), (2, 2 + 4.0, 2 + 8.0), (4, 6 + 6.0, 4 + 8.0), (5, 8 + 6.4, 6 + 8.0), (8, 14 + 7.0, 6 + 8.0)],
)
def test_all_reduce_of_400_bytes_takes_what_was_worked_out_by_hand(ranks, ring, tree) -> None:
    assert (ring_s(ranks, 400, LINK), tree_s(ranks, 400, LINK)) == pytest.approx((ring, tree))


def test_all_reduce_between_nodes_takes_shares_or_roots_whichever_is_faster() -> None:
    network = Network("two nodes of four", 4, LINK, SLOW, nics=4, start_s=0.5)
    assert network.all_reduce_s(1, 400) == 0
    assert network.all_reduce_s(4, 400) == 0.5 + 12  # ring and tree alike
    # Shares: ring inside 6 + 6; 100 bytes between two nodes, 2 · 10 + 10. Roots: tree inside 12; all 400, 20 + 40.
    assert network.all_reduce_s(8, 400) == 0.5 + 12 + 30
    # With a card for four GPUs a share has a quarter of it: 20 + 40, as for roots.
    assert replace(network, nics=1).all_reduce_s(8, 400) == 0.5 + 12 + 60
    # Of nothing: shares take 2 · 3 steps inside, roots 2 · 2.
    assert network.all_reduce_s(8, 0) == 0.5 + 4 + 20
    assert network.inside_node_s(8, 400) == network.all_reduce_s(4, 400)


def test_two_ranks_hide_averaging_that_is_shorter_than_learning() -> None:
    tasks = Tasks(learning_s=10, correction_s=1, sum_s=1, move_s=2)
    # Correction ends at 11, averaging from 11 to 21, learning from 11 to 21 too.
    assert round_s(tasks, 2, Averaging(all_s=7)) == pytest.approx(11)


def test_two_ranks_wait_for_averaging_that_is_longer_than_learning() -> None:
    tasks = Tasks(learning_s=10, correction_s=1, sum_s=1, move_s=2)
    # Averaging from 11 to 26, then correction to 27: 16 a round, 5 of them exposed.
    assert round_s(tasks, 2, Averaging(all_s=12)) == pytest.approx(16)


def test_rounds_that_do_not_average_share_what_is_exposed() -> None:
    tasks = Tasks(learning_s=10, correction_s=1)
    # In the engine the next round's correction waits, whether it averages or not: (11 · 4 + 22 − 10) / 4.
    assert round_s(tasks, 2, Averaging(all_s=22, period=4)) == pytest.approx(14)
    # Patient: rounds 1 to 4 end at 11 to 44; averaging lasts from 44 to 66 while three rounds of learning pass.
    assert round_s(tasks, 2, Averaging(all_s=22, period=4, patient=True)) == pytest.approx(11)
    # Of 60 seconds, 4 · 10 + 3 · 1 are hidden, and 17 are not.
    assert round_s(tasks, 2, Averaging(all_s=60, period=4, patient=True)) == pytest.approx((44 + 17) / 4)


def test_two_level_period_joins_nodes_in_every_hth_round_by_two_all_reduces_more() -> None:
    tasks = Tasks(learning_s=10, correction_s=1)
    averaging = Averaging(all_s=9, node_period=2, node_s=4, ranks_per_node=2)
    # Inside a node 4 of 10 are hidden: 11. Every second round 4 + 18 are not: 23.
    assert round_s(tasks, 4, averaging) == pytest.approx((11 + 23) / 2)


def test_nodes_that_average_for_themselves_do_not_wait_for_each_other() -> None:
    tasks, factors = Tasks(learning_s=10, correction_s=1), (1.0, 1.0, 2.0, 2.0)
    apart = Averaging(all_s=0, node_period=64, node_s=1, ranks_per_node=2)
    # The fast node is held back in joining rounds alone: both take as long as the slow one, yet no longer.
    assert round_s(tasks, 4, apart, rank_factors=factors, warm_up=128) == pytest.approx(21)
    assert round_s(tasks, 4, None, rank_factors=factors) == pytest.approx((11 + 21) / 2)


def test_slowed_learning_takes_what_was_worked_out_by_hand() -> None:
    tasks = Tasks(learning_s=10, correction_s=1)
    # 5 seconds at 80 % of the speed: 10 + 5 · 0.2 + 1.
    assert round_s(tasks, 2, Averaging(all_s=5), slowdown=0.2) == pytest.approx(12)
    # Slowed to its end, at half the speed: 20 + 1. And averaging of 30 is waited for.
    assert round_s(tasks, 2, Averaging(all_s=20), slowdown=0.5) == pytest.approx(21)
    assert round_s(tasks, 2, Averaging(all_s=30), slowdown=0.5) == pytest.approx(31)


def test_very_long_period_costs_nothing_however_slow_the_network() -> None:
    tasks, periods = Tasks(10, 1, cv=0.05), (1, 4, 16, 64, 512)
    alone = round_s(tasks, 8, None, rounds=1024)
    taken = [round_s(tasks, 8, Averaging(all_s=500, period=period), rounds=1024) for period in periods]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 40 * alone
    assert taken[-1] == pytest.approx(alone, rel=0.15)


def test_slowest_rank_sets_the_pace_of_all() -> None:
    assert round_s(Tasks(10, 1), 4, Averaging(all_s=1), rank_factors=(1, 1, 1.5, 1)) == pytest.approx(16)


def test_slack_of_a_round_absorbs_noise_that_a_barrier_does_not() -> None:
    tasks = Tasks(10, 1, cv=0.05)
    averaged = round_s(tasks, 256, Averaging(all_s=0), warm_up=256, rounds=256)
    barrier = synchronous_round_s(tasks, 256, bulk_s=0, tail_s=0, overlap=0.5, rounds=256)
    # The expected largest of 256 normals is 2.8 σ: 11 + 10 · 0.05 · 2.8, and a little more for the log-normal tail.
    assert 12.4 < barrier < 12.7
    assert 11 < averaged < 11.35


@given(
    learning=st.floats(0.1, 10), reduce=st.floats(0, 20), more=st.floats(0, 5), cv=st.floats(0, 0.3),
    slowdown=st.floats(0, 0.9),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_round_is_no_shorter_with_a_slower_all_reduce_and_no_shorter_than_without_averaging(
    learning, reduce, more, cv, slowdown
) -> None:
    tasks = Tasks(learning, 0.1, cv=cv)

    def taken(seconds: float) -> float:
        return sma_round_s(tasks, 4, Averaging(all_s=seconds), slowdown=slowdown, warm_up=0, rounds=20)

    alone = sma_round_s(tasks, 4, None, warm_up=0, rounds=20)
    assert alone * (1 - 1e-9) <= taken(reduce) <= taken(reduce + more) * (1 + 1e-9)
    assert taken(reduce) >= reduce * 19 / 20  # averaging of round n is over before that of n + 1 begins


def test_noise_changes_no_mean_but_that_of_the_slowest() -> None:
    assert round_s(Tasks(10, 0, cv=0.3), 4096, None) == pytest.approx(10, rel=5e-3)
    assert log_sigma(0.3) == pytest.approx(math.sqrt(math.log(1.09)))


def test_synchronous_round_hides_the_bulk_and_shows_the_last_bucket() -> None:
    tasks = Tasks(learning_s=9, correction_s=1)
    # Sending begins at 3; the bulk ends at 3 + 4 before learning does, the tail is after it.
    assert synchronous_round_s(tasks, 4, bulk_s=4, tail_s=2, overlap=2 / 3, rounds=3) == pytest.approx(12)
    # A bulk of 8 ends at 11, 2 later than learning.
    assert synchronous_round_s(tasks, 4, bulk_s=8, tail_s=2, overlap=2 / 3, rounds=3) == pytest.approx(14)
    # At half the speed from 3 to 7, learning has 4 more to go: 11.
    slowed = synchronous_round_s(tasks, 4, bulk_s=4, tail_s=2, overlap=2 / 3, slowdown=0.5, rounds=3)
    assert slowed == pytest.approx(11 + 2 + 1)


@pytest.mark.parametrize(("size", "last"), [(2**19, 2**19), (3 * 2**19, 2**19), (2**26, 25 * 2**20)])
def test_last_bucket_is_what_the_first_and_full_ones_leave(size, last) -> None:
    assert last_bucket_bytes(size) == last


def test_round_of_a_workload_alone_is_what_its_images_per_second_say() -> None:
    for workload in WORKLOADS:
        tasks = workload.tasks()
        assert tasks.learning_s + tasks.correction_s == pytest.approx(workload.images_a_round / workload.images_per_s)


def scene(num_learners: int = 2, rounds: int = 32) -> Scene:
    return Scene(replace(WORKLOADS[3], num_learners=num_learners), Network.from_values(NETWORKS[0]), rounds)


def test_one_gpu_with_one_learner_averages_nothing() -> None:
    single = scene(num_learners=1)
    assert single.round_s(Mode(), 1) == single.alone_s
    assert single.point(Mode(), 1)["exposed"] == 0


def test_exposed_share_grows_with_the_number_of_gpus_and_shrinks_with_the_period() -> None:
    measured = scene()
    growing = [measured.exposed(Mode(), count) for count in (2, 8, 16, 128, 1024)]
    shrinking = [measured.exposed(Mode(period=period), 1024) for period in (1, 2, 4, 8, 16)]
    assert growing == sorted(growing)
    assert shrinking == sorted(shrinking, reverse=True)
    assert growing[-1] == shrinking[0] > 0.3


def test_shortest_period_is_the_first_that_hides_averaging() -> None:
    measured = scene()
    found = measured.shortest(lambda period: Mode(period=period), (64,))
    assert found is not None
    assert measured.exposed(Mode(period=found), 64) <= 0.05 < measured.exposed(Mode(period=found // 2), 64)
    assert measured.shortest(lambda period: SYNCHRONOUS_MODE, (64,)) is None


def test_run_writes_what_its_pages_and_pictures_show(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "GPU_COUNTS", (1, 8, 16, 64, 256, 1024))
    monkeypatch.setattr(run, "PERIODS", (1, 4))
    monkeypatch.setattr(run.scene_values, "__defaults__", ((1, 8, 16, 64, 256, 1024),))
    path = tmp_path / "gpus.json"
    assert run.main(["--rounds", "2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["scenes"]) == len(WORKLOADS) * len(NETWORKS)
    assert report.result_text(result) in capsys.readouterr().out
    figure = plot.draw(result)
    assert len(figure.axes) == 2 * len(plot.PANELS)
