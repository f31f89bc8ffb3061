"""The peers of the suite: which are planned where and when, and what learners are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.data.augmentation import Augmentation
from experiments.bench.gate import Ready, Visit, Window
from experiments.bench.sides.side import Side
from experiments.bench.workers import SideError
from experiments.bench.workloads import Effort, Workload
from experiments.throughput import planning, suite, suite_report
from experiments.throughput.campaign import Campaign, Plan
from experiments.throughput.comparison import Measurement, ratios
from experiments.throughput.planning import (
    Cell,
    Limits,
    ProcessKey,
    compared_learners,
    peer_cells,
    plan_cells,
    with_peers,
)
from tests.unit.experiments.samples import measurement


def names(cells: Any) -> list[tuple[int, str, int]]:
    return [(cell.batch_size, cell.side.side, cell.side.num_learners) for cell in cells]


def peer(name: str, learners: int, batch_size: int = 16) -> Cell:
    return Cell(batch_size, Side(name, learners, "none", "fp32"))


def ours(name: str, learners: int, batch_size: int = 16) -> Cell:
    return Cell(batch_size, Side(name, learners, "sma", "fp32"))


def test_peer_cells_have_every_number_of_images_a_step_compiled_once() -> None:
    cells = peer_cells([16, 32, 64], [1, 2, 8], ["compiled", "vmap"], "fp32")
    assert names(cells) == [
        (16, "compiled", 1), (16, "compiled", 2), (16, "compiled", 8), (32, "compiled", 2), (32, "compiled", 8),
        (64, "compiled", 8), (16, "vmap", 2), (16, "vmap", 8),
    ]  # fmt: skip
    assert names(peer_cells([16], [4], ["compiled", "vmap"], "fp32")) == [
        (16, "compiled", 1), (16, "compiled", 4), (16, "vmap", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("counts", "k"), [((1, 2, 4, 8, 16), 8), ((1, 2, 4), 2), ((1, 4), 4)])
def test_compared_learners_are_the_most_of_those_measured_at_every_batch_size(counts: tuple[int, ...], k: int) -> None:
    assert compared_learners(counts) == k


def test_plan_with_peers_compares_one_k_first_and_takes_the_others_before_repetitive_cells() -> None:
    plain = plan_cells([16, 32], [1, 2, 8], ["serial", "fused"], "fp32")
    cells = with_peers(plain, [16, 32], [1, 2, 8], ["compiled", "vmap"], "fp32")
    assert names(cells.peers) == [(16, "compiled", 1), (16, "compiled", 8), (16, "vmap", 8), (16, "serial", 8)]
    assert (cells.single, cells.main, cells.auto) == (plain.single, plain.main, plain.auto)
    assert names(cells.others) == [
        (32, "default_loop", 1), (32, "tuned_single", 1), (32, "serial", 1), (32, "fused", 2), (32, "fused", 8),
        (16, "compiled", 2), (32, "compiled", 2), (32, "compiled", 8), (16, "vmap", 2),
        (32, "fused", 1), (16, "serial", 2), (32, "serial", 2), (32, "serial", 8),
    ]  # fmt: skip


def test_plan_without_peers_is_as_it_was() -> None:
    plain = plan_cells([16], [1, 2], ["fused"], "fp32")
    assert with_peers(plain, [16], [1, 2], [], "fp32") is plain
    assert plain.peers == ()


def test_peer_has_a_process_for_each_k_and_is_not_asked_for_learners() -> None:
    limits = Limits(window_s=0.2, lead_in_s=0.1)
    assert peer("compiled", 4).process_key(limits) == ProcessKey(16, "compiled", 4)
    assert planning.visit(peer("compiled", 4), limits) == Visit(0.2, 0.1, 1, None)
    assert planning.expected_start_s(peer("compiled", 4), {ProcessKey(16, "compiled", 1): 9.0}, limits) == 9.0


class Device:
    """A clock, and processes that train at 1600 images/s and take a second to start; `vmap` does not come up."""

    def __init__(self) -> None:
        self.now, self.patience_s = 0.0, {}

    def start(self, side: Side, workload: Workload, effort: Effort, patience_s: float) -> Any:
        self.now += 1.0
        self.patience_s[side.side, side.num_learners] = patience_s
        if side.side == "vmap":
            self.now += patience_s
            raise SideError("took too long")
        return Process(self, side)


class Process:
    def __init__(self, device: Device, side: Side) -> None:
        self.device, self.side, self.ready = device, side, Ready(1)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def dismiss(self) -> None:
        pass

    def window(self, visit: Visit, patience_s: float) -> Window:
        self.device.now += visit.lead_in_s + visit.seconds
        return Window(round(1600 * visit.seconds), visit.seconds, 0.0)


def test_campaign_gives_a_peer_half_of_the_time_left_to_start_and_goes_on_without_it() -> None:
    device = Device()
    workload = Workload("mlp", 16, "cpu", "mnist", Path(), Path(), 10, (0.0,), (1.0,), Augmentation())
    cells = replace(plan_cells([16], [1, 2], ["fused"], "fp32"), auto=[])
    cells = with_peers(cells, [16], [1, 2], ["compiled", "vmap"], "fp32")
    plan = Plan(cells, Limits(passes=3, window_s=0.2, lead_in_s=0.1), 0.15, peers_share=0.3)
    with Campaign(workload, plan, 40.0, start=device.start, clock=lambda: device.now, wait=lambda _: None) as found:
        found.run()
    assert names(found.measurements) == [
        (16, "default_loop", 1), (16, "tuned_single", 1), (16, "compiled", 1), (16, "compiled", 2), (16, "fused", 1),
        (16, "fused", 2),
    ]  # fmt: skip
    assert all(entry.windows == [1600.0] * 3 for entry in found.measurements.values())
    assert {cell.side.side: why.reason for cell, why in found.left_out.items()} == {"vmap": "took too long"}
    # Four starts and four windows have taken 5.2 s, and 8 windows of 0.3 s are promised.
    assert device.patience_s["vmap", 2] == pytest.approx((40.0 - 5.2 - 2.4) / 2 + 5.0)


def compared() -> dict[Cell, Measurement]:
    rates = {
        ours("fused", 2): 400.0, ours("serial", 2): 100.0, ours("fused", 2, 32): 500.0,
        peer("compiled", 1): 160.0, peer("compiled", 2): 500.0, peer("compiled", 4): 625.0, peer("vmap", 2): 200.0,
    }  # fmt: skip
    return {cell: measurement(cell.side, rate) for cell, rate in rates.items()}


def test_learners_are_compared_with_peers_of_as_many_and_with_one_compiled_model() -> None:
    entries = suite_report.ratios_of("mlp", compared())
    found = {
        (entry["side"], entry["batch_size"], entry["to"]["side"], entry["to"]["num_learners"]): entry["ratio"]
        for entry in entries
    }
    assert found == {
        ("fused", 16, "serial", 2): 4.0, ("fused", 16, "compiled", 1): 2.5, ("fused", 16, "compiled", 2): 0.8,
        ("fused", 16, "vmap", 2): 2.0, ("serial", 16, "compiled", 1): 0.625, ("serial", 16, "compiled", 2): 0.2,
        ("serial", 16, "vmap", 2): 0.5,
        # At b=32 one model on 64 images a step is that of K=4 at b=16, and one on 32 images that of K=2.
        ("fused", 32, "compiled", 2): 0.8, ("fused", 32, "compiled", 1): 1.0,
    }  # fmt: skip


def test_ratios_to_peers_are_at_equal_precision_and_none_of_single_models() -> None:
    sides = [peer("compiled", 1).side, Side("fused", 2, "sma", "bf16"), Side("tuned_single", 1, "none", "fp32")]
    found = [(entry["side"], entry["to"]["side"]) for entry in ratios([measurement(side, 1.0) for side in sides])]
    assert found == [("compiled", "tuned_single")]


def test_peers_table_has_the_fastest_executor_of_every_k_against_each_peer() -> None:
    found = compared()
    rows = suite_report.rows_of("mlp", found)
    table = suite_report.peers_table(rows, suite_report.ratios_of("mlp", found), 16)
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert lines == [["2", "fused", "400", "2.50", "0.80", "4.00", "2.00"]]
    assert suite_report.peers_table([row for row in rows if row["side"] == "fused"], [], 16) == ""


def test_suite_has_resnet50_and_peers_where_there_is_a_gpu() -> None:
    assert suite.default_models("cpu") == ("mlp", "lenet", "resnet32", "vgg16")
    assert suite.default_models("cuda") == ("mlp", "lenet", "resnet32", "vgg16", "resnet50")
    options = suite._parser().parse_args([])
    assert {cell.side.side for cell in suite.make_plan(options, "cuda", "bf16").cells.peers} >= {"compiled", "vmap"}
    without = suite.make_plan(options, "cpu", "fp32")
    assert (without.cells.peers, without.tuning_share, without.peers_share) == ((), 0.55, 0.0)
    options.peers = ["compiled"]
    plan = suite.make_plan(options, "cuda", "bf16")
    assert plan.tuning_share + plan.peers_share < 0.7
    assert names(plan.cells.peers) == [(16, "compiled", 1), (16, "compiled", 8), (16, "serial", 8)]
    assert {cell.side.side for cell in plan.cells.main} >= {"serial", "fused", "streams"}
    assert (without.limits.captures, plan.limits.captures) == (False, True)
