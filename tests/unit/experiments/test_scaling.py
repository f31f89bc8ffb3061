"""Rounds on many GPUs: all-reduces and rounds worked out by hand, limits, what must not fall, and two real ranks."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossbow_py.models import MODELS
from experiments.bench.rounds import input_shape, num_classes
from experiments.scaling import calibrate, plot, ranks, report, run, validate
from experiments.scaling.calibrate import Line, fit_line, variation
from experiments.scaling.inputs import PARAMETERS, WORKLOADS, last_bucket_bytes
from experiments.scaling.network import NETWORKS, Link, Network, ring_s, tree_s
from experiments.scaling.ranks import Case, Measured
from experiments.scaling.run import SYNCHRONOUS_MODE, Mode, Scene
from experiments.scaling.simulator import Averaging, Contention, Tasks, log_sigma, sma_round_s, synchronous_round_s

LINK = Link(alpha_s=1.0, bytes_per_s=100.0)
SLOW = Link(alpha_s=10.0, bytes_per_s=10.0)


def round_s(tasks: Tasks, ranks: int, averaging: Averaging | None, *arguments: Contention, **keywords: Any) -> float:
    return sma_round_s(tasks, ranks, averaging, *arguments, **{"warm_up": 8, "rounds": 64, **keywords})


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


def test_slowed_learning_and_stretched_averaging_take_what_was_worked_out_by_hand() -> None:
    tasks = Tasks(learning_s=10, correction_s=1)
    # A core for both: averaging of 3 lasts 6, in which learning does 3 of its 10: 13 + 1.
    assert round_s(tasks, 2, Averaging(all_s=3), Contention(slowdown=0.5, stretch=2)) == pytest.approx(14)
    # Averaging of 12: learning is over after 20, with 10 done of averaging; 2 more alone.
    assert round_s(tasks, 2, Averaging(all_s=12), Contention(slowdown=0.5, stretch=2)) == pytest.approx(23)
    # Multiprocessors of its own: 5 seconds at 80 % of the speed.
    assert round_s(tasks, 2, Averaging(all_s=5), Contention(slowdown=0.2)) == pytest.approx(12)


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
    tasks, contention = Tasks(learning, 0.1, cv=cv), Contention(slowdown)

    def taken(seconds: float) -> float:
        return sma_round_s(tasks, 4, Averaging(all_s=seconds), contention, warm_up=0, rounds=20)

    alone = sma_round_s(tasks, 4, None, warm_up=0, rounds=20)
    assert alone * (1 - 1e-9) <= taken(reduce) <= taken(reduce + more) * (1 + 1e-9)
    assert taken(reduce) >= reduce * 19 / 20  # averaging of round n is over before that of n + 1 begins


def test_log_normal_factors_have_mean_one_and_the_given_variation() -> None:
    sigma = log_sigma(0.3)
    drawn = np.exp(sigma * np.random.default_rng(0).standard_normal(200_000) - sigma**2 / 2)
    assert (drawn.mean(), drawn.std() / drawn.mean()) == pytest.approx((1, 0.3), rel=0.02)


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


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameters_of_models_are_those_that_are_built(model) -> None:
    with torch.device("meta"):
        built = MODELS[model]().build(input_shape(model), num_classes(model))
    assert sum(parameter.numel() for parameter in built.parameters()) == PARAMETERS[model]


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


def test_line_through_exact_values_gives_alpha_and_beta_back() -> None:
    sizes = [2**power for power in range(10, 27, 4)]
    line = fit_line(sizes, [5e-5 + size / 2e9 for size in sizes])
    assert (line.alpha_s(2), line.bytes_per_s(2)) == pytest.approx((2.5e-5, 2e9))
    assert Line(6.0, 0.06).alpha_s(4) == 1.0
    assert Line(6.0, 0.06).bytes_per_s(4) == pytest.approx(25.0)  # 2 · 3 / 4 / 0.06


def test_variation_of_log_normal_values_says_that_they_are() -> None:
    drawn = np.exp(0.2 * np.random.default_rng(1).standard_normal(20_000))
    found = variation(drawn.tolist())
    assert found["cv"] == pytest.approx(math.sqrt(math.expm1(0.04)), rel=0.03)
    assert (found["median_by_lognormal"], found["p95_by_lognormal"]) == pytest.approx((1, 1), abs=0.02)


def test_transfer_lasts_from_the_last_to_come_to_the_last_to_leave() -> None:
    answers = [Measured(1.0, calls=[(0.0, 5.0), (6.0, 7.0)]), Measured(1.0, calls=[(2.0, 4.5), (5.5, 7.5)])]
    assert ranks.transfer_s(answers) == [3.0, 1.5]


def calibration() -> dict[str, Any]:
    sweep = {"us": [1000.0, 1000.0], "alpha_us": 500.0, "gb_per_s": 1.0, "line_off": 0.0}
    case = {
        "model": "lenet", "batch_size": 16, "round_ms": 11.0, "learning_ms": 10.0, "correction_ms": 1.0,
        "sum_ms": 0.5, "move_ms": 0.5,
        "noise": {"cv": 0.0, "median_by_lognormal": 1.0, "p95_by_lognormal": 1.0, "n": 9},
    }  # fmt: skip
    return {
        "kind": report.CALIBRATED, "load_before": 0.1, "foreign_share": None, "dropped": 0, "cases": [case],
        "all_reduce": {
            "beside": "resnet32 b=32", "bytes": [2**10, 2**26], "n": [9, 9], "core_share": 1.0,
            "idle": sweep, "busy": {**sweep, "us": [2000.0, 2000.0]},
        },
    }  # fmt: skip


def test_prediction_adds_what_averaging_takes_from_a_shared_core() -> None:
    own = calibration()["cases"][0]
    # Averaging takes 2 ms alone and 4 beside learning, which loses 2 of them; every round, and every second.
    assert validate.predicted([0.011, 0.011], own, calibration(), 1) == pytest.approx(0.013)
    assert validate.predicted([0.011, 0.011], own, calibration(), 2) == pytest.approx(0.012)
    assert validate.predicted([0.011, 0.021], own, calibration(), 1) == pytest.approx(0.023)


class Answers:
    """Instead of two processes: what they would say."""

    foreign_shares: tuple[float, ...] = ()
    dropped = 0

    def ask(self, method: str, **arguments: Any) -> list[Measured] | None:
        period = arguments.get("period")
        if period == 8:
            return None
        wall_s = 10.0 * (11 if period is None else 12) / 1000
        return [Measured(wall_s, 10, {"learning": [0.01], "correction": [0.001]}, checksum=1.0) for _ in range(2)]


def test_compared_takes_the_windows_beside_one_that_averages() -> None:
    rows = validate.compared(Answers(), Case("lenet", 16), calibration(), repetitions=2)
    assert [row["n"] for row in rows] == [2, 2, 2, 0]
    assert [rows[0][key] for key in ("alone_ms", "measured_ms", "predicted_ms")] == [11, 12, 13]
    assert rows[0]["error"]["median"] == pytest.approx(1 / 12, abs=1e-4)
    text = report.result_text({"kind": report.VALIDATED, "rows": rows, "load_before": 0.1, "foreign_share": 0.01,
                               "dropped": 3})  # fmt: skip
    assert text.startswith("Within 10% in 3 of 4 cases.")
    plot.draw_validation({"rows": rows})


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


@pytest.mark.skipif(len(ranks.usable_core_ids()) < 2, reason="two ranks need a core each")
def test_two_real_ranks_average_alike_and_tell_their_times() -> None:
    case, affinity = Case("lenet", 4), os.sched_getaffinity(0)
    with ranks.RankPair() as pair:
        pair.max_foreign_share = 2.0
        averaged = pair.ask("rounds", case=case, num_rounds=4, period=2)
        alone = pair.ask("rounds", case=case, num_rounds=4, period=None)
        passes = pair.ask("passes", case=case, repetitions=3)
        reduced = pair.ask("all_reduces", num_bytes=4096, count=3, pause_s=0.0, beside=case)
    assert averaged is not None and alone is not None and passes is not None and reduced is not None
    assert averaged[0].checksum == averaged[1].checksum
    assert {name: len(spans) for name, spans in averaged[0].tasks.items()} == {
        "learning": 4, "correction": 4, "averaging": 2,
    }  # fmt: skip
    assert set(alone[0].tasks) == {"learning", "correction"}
    assert len(passes[1].tasks["move"]) == 3
    assert len(ranks.transfer_s(reduced)) == 3
    assert min(ranks.transfer_s(reduced)) > 0
    assert os.sched_getaffinity(0) == affinity
    assert not any(process.is_alive() for process in pair._processes)


def test_calibration_without_clean_windows_says_so() -> None:
    class Busy(Answers):
        def ask(self, method: str, **arguments: Any) -> None:
            return None

    with pytest.raises(RuntimeError, match="busy all the time"):
        calibrate.calibrated(Busy(), 1)


def test_validation_before_calibration_says_what_to_run(monkeypatch, capsys) -> None:
    monkeypatch.setattr(validate, "read_results", lambda experiment: {})
    with pytest.raises(SystemExit):
        validate.main([])
    assert "calibrate.py" in capsys.readouterr().err


def test_core_share_is_lost_learning_by_what_an_all_reduce_takes_on_idle_cores(monkeypatch) -> None:
    class Answered(Answers):
        def ask(self, method: str, **arguments: Any) -> list[Measured]:
            if method == "rounds":
                return [Measured(1.0, 10, {"learning": [0.1], "correction": [0.01]})] * 2
            if method == "passes":
                return [Measured(1.0, tasks={"sum": [0.001], "move": [0.002]})] * 2
            # Ten rounds take 1 s alone and 1.25 s beside four all-reduces: 0.2 of a window of 2 s is lost to four.
            busy = arguments["beside"] is not None
            calls = [(0.0, (0.4 if busy else 0.2) + arguments["num_bytes"] * 1e-14)] * 4
            return [Measured(1.25, 10 if busy else 0, {"window": [2.0]}, calls)] * 2

    measured = calibrate.calibrated(Answered(), 1)
    assert measured["all_reduce"]["core_share"] == pytest.approx(0.1 / 0.2, rel=1e-3)
    assert measured["all_reduce"]["busy"]["us"][0] == pytest.approx(4e5, rel=1e-3)
    assert [case["move_ms"] for case in measured["cases"]] == [2.0] * 3
