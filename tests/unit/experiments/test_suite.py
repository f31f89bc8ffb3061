"""The throughput suite: which cells there is time for, how they are measured, and what is shown of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from crossbow_py.data.augmentation import Augmentation
from experiments.bench import workloads
from experiments.bench.gate import Choice, Ready, Visit, Window
from experiments.bench.sides.side import AUTO, OPEN, Side
from experiments.bench.workers import SideError
from experiments.bench.workloads import Effort, Workload
from experiments.tables import pages
from experiments.throughput import planning, suite, suite_report
from experiments.throughput.campaign import Campaign, Plan
from experiments.throughput.planning import Cell, Limits, ProcessKey, plan_cells
from tests.unit.experiments.samples import suite_measurements, suite_result

LIMITS = Limits(passes=3, window_s=0.2, lead_in_s=0.1, max_round_s=2.0)


def cell(side: str, batch_size: int = 16, learners: int = 1) -> Cell:
    return Cell(batch_size, Side(side, learners, "none" if "_" in side else "sma", "fp32"))


def names(cells: Iterable[Cell]) -> list[tuple[int, str, int]]:
    return [(entry.batch_size, entry.side.side, entry.side.num_learners) for entry in cells]


def test_plan_has_all_learners_at_the_main_batch_size_first_and_serial_ones_last() -> None:
    cells = plan_cells([16, 32], [1, 2, 4], ["serial", "fused"], "fp32")
    assert names(cells.single) == [(16, "default_loop", 1), (16, "tuned_single", 1)]
    assert names(cells.auto) == [(16, "auto", OPEN)]
    assert names(cells.main) == [
        (16, "serial", 1), (16, "fused", 1), (16, "fused", 2), (16, "fused", 4),
    ]  # fmt: skip
    assert names(cells.others) == [
        (32, "default_loop", 1), (32, "tuned_single", 1), (32, "serial", 1), (32, "fused", 2),
        (32, "fused", 1), (32, "fused", 4), (16, "serial", 2), (16, "serial", 4), (32, "serial", 2), (32, "serial", 4),
    ]  # fmt: skip


def test_window_takes_at_least_a_round_and_so_does_its_lead_in() -> None:
    assert planning.visit_s(cell("fused"), 1600.0, LIMITS) == pytest.approx(0.1 + 0.2)  # rounds of 10 ms
    assert planning.visit_s(cell("fused", learners=4), 64.0, LIMITS) == pytest.approx(1.0 + 1.0)
    assert planning.visit_s(cell("threads", learners=4), 64.0, LIMITS) == pytest.approx(2 * 1.0 + 1.0)


def test_visit_asks_executors_alone_for_learners() -> None:
    assert planning.visit(cell("threads", learners=4), LIMITS) == Visit(0.2, 0.1, 2, 4)
    assert planning.visit(cell("tuned_single"), LIMITS) == Visit(0.2, 0.1, 1, None)
    assert planning.visit(cell(AUTO, learners=6), LIMITS) == Visit(0.2, 0.1, 2, None)


def test_cell_of_captured_rounds_keeps_its_learners_and_captures_before_its_first_window() -> None:
    captured = replace(LIMITS, captures=True)
    assert cell("fused", learners=4).process_key(LIMITS) == ProcessKey(16, "fused")
    assert cell("fused", learners=4).process_key(captured) == ProcessKey(16, "fused", 4)
    assert cell(AUTO, learners=6).process_key(captured) == ProcessKey(16, AUTO)
    assert planning.visit(cell("fused", learners=4), captured) == Visit(0.2, 0.1, 1, None)
    assert planning.warm_up(cell("fused", learners=4).side, captured) == Visit(0.0, 0.0, 4, None)
    assert planning.warm_up(cell("fused", learners=4).side, LIMITS) is None
    assert planning.warm_up(cell("tuned_single").side, captured) is None


def test_plan_of_captured_rounds_begins_with_the_learners_that_are_compared() -> None:
    cells = plan_cells([16], [1, 2, 8], ["serial", "streams", "fused"], "bf16", captures=True)
    assert names(cells.main) == [
        (16, "fused", 8), (16, "streams", 8), (16, "fused", 1), (16, "serial", 1), (16, "streams", 1),
        (16, "fused", 2), (16, "streams", 2),
    ]  # fmt: skip


def test_expected_throughput_is_that_of_the_most_alike_cell() -> None:
    known = {cell("tuned_single"): 1.0}
    assert planning.expected_images_per_s(cell("fused"), {}) is None
    assert planning.expected_images_per_s(cell("fused"), known) == 1.0
    known |= {cell("fused", learners=2): 2.0, cell("fused", learners=4): 3.0}
    assert planning.expected_images_per_s(cell("fused", 64), known) == 3.0
    known |= {cell("fused", 64): 4.0}
    assert planning.expected_images_per_s(cell("fused", 64, 8), known) == 4.0


def test_expected_start_is_that_of_the_side_at_other_batch_sizes_and_none_where_it_runs() -> None:
    known = {ProcessKey(16, "tuned_single", 1): 2.0, ProcessKey(16, "fused"): 9.0}
    assert planning.expected_start_s(cell("tuned_single", 32), known, LIMITS) == 4.0
    assert planning.expected_start_s(cell("tuned_single", 16), known, LIMITS) == 0.0
    assert planning.expected_start_s(cell("fused", 32), known, LIMITS) == 9.0
    assert planning.expected_start_s(cell("threads", 16), known, LIMITS) == 0.0


@pytest.mark.parametrize(("images_per_s", "left_s", "cause", "words"), [
    (64.0, 6.0, None, ""),
    (64.0, 5.9, "time", "its 3 windows would take about 6.0 s, and 5.9 s of its model's time were left"),
    (64.0, -1.0, "time", "0.0 s of its model's time"),
    (30.0, 99.0, "round", "a round of 64 images would take about 2.1 s, over the limit of 2 s"),
])  # fmt: skip
def test_cell_is_left_out_for_long_rounds_or_want_of_time(
    images_per_s: float, left_s: float, cause: str | None, words: str
) -> None:
    left_out = planning.left_out(cell("fused", learners=4), images_per_s, 0.0, left_s, LIMITS)
    assert (left_out.cause if left_out else None) == cause
    assert words in (left_out.reason if left_out else "")


def test_cell_whose_process_takes_long_to_start_is_left_out() -> None:
    assert planning.left_out(cell("fused"), 1600.0, 0.2, 1.0, LIMITS) is not None
    assert planning.left_out(cell("fused"), 1600.0, 0.0, 1.0, LIMITS) is None


def test_suite_has_resnet50_and_captured_rounds_where_there_is_a_gpu() -> None:
    assert suite.default_models("cpu") == ("mlp", "lenet", "resnet32", "vgg16")
    assert suite.default_models("cuda") == ("mlp", "lenet", "resnet32", "vgg16", "resnet50")
    on_cpu, on_cuda = (suite.make_plan(suite._parser().parse_args([]), device, "fp32") for device in ("cpu", "cuda"))
    assert (on_cpu.limits.captures, on_cuda.limits.captures) == (False, True)
    assert {entry.side.side for entry in on_cuda.cells.main} >= {"serial", "fused", "streams"}


def test_share_of_the_time_grows_with_the_model_and_the_last_one_gets_the_rest() -> None:
    assert planning.share_s(65.0, ["mlp", "lenet", "resnet32", "vgg16"], "cpu") == pytest.approx(10.0)
    assert planning.share_s(50.0, ["vgg16"], "cpu") == 50.0
    assert planning.share_s(100.0, ["mlp", "lenet", "resnet32", "vgg16", "resnet50"], "cuda") == pytest.approx(10.0)


class Device:
    """A clock, and processes that take a second to start and train at 1600 images/s; `others` are busy now and then."""

    def __init__(self) -> None:
        self.now, self.started, self.ended = 0.0, [], 0
        self.fail_at: int | None = None
        self.foreign: list[float] = []

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def start(self, side: Side, workload: Workload, effort: Effort, patience_s: float) -> Any:
        self.now += 1.0
        self.started.append((workload.batch_size, side.side))
        if (workload.batch_size, side.side) == (8, "fused"):
            raise SideError("no such thing")
        return Process(self, side)


class Process:
    def __init__(self, device: Device, side: Side) -> None:
        self.device = device
        choice = Choice("fused", 6, True, 1.0, 2.0) if side.side == AUTO else None
        self.ready, self.side = Ready(1, choice=choice), side.chosen(Ready(1, choice=choice))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.device.ended += 1

    def dismiss(self) -> None:
        """Ended by `__exit__`."""

    def window(self, visit: Visit, patience_s: float) -> Window:
        self.device.now += visit.lead_in_s + visit.seconds
        if visit.num_learners is not None and visit.num_learners == self.device.fail_at:
            raise SideError("memory does not hold it")
        foreign = self.device.foreign.pop(0) if self.device.foreign else 0.0
        return Window(round(1600 * visit.seconds), visit.seconds or 1.0, foreign)


def campaign(device: Device, budget_s: float, *, batch_sizes: tuple[int, ...] = (16,)) -> Campaign:
    workload = Workload("mlp", 16, "cpu", "mnist", Path(), Path(), 10, (0.0,), (1.0,), Augmentation())
    plan = Plan(plan_cells(batch_sizes, [1, 2], ["fused"], "fp32"), LIMITS, 0.15)
    found = Campaign(workload, plan, budget_s, start=device.start, clock=device.clock, wait=device.wait)
    with found:
        found.run()
    return found


def test_campaign_with_time_measures_every_cell_in_every_pass_and_ends_the_processes() -> None:
    device = Device()
    found = campaign(device, 100.0)
    assert names(found.measurements) == [
        (16, "default_loop", 1), (16, "tuned_single", 1), (16, "fused", 1), (16, "fused", 2), (16, "auto", 6),
    ]  # fmt: skip
    assert all(entry.windows.rates() == [1600.0] * 3 for entry in found.measurements.values())
    assert found.left_out == {}
    assert device.started == [(16, "default_loop"), (16, "tuned_single"), (16, "fused"), (16, "auto")]
    assert device.ended == 4


def test_campaign_of_captured_rounds_has_a_process_for_each_number_of_learners() -> None:
    device = Device()
    workload = Workload("mlp", 16, "cuda", "mnist", Path(), Path(), 10, (0.0,), (1.0,), Augmentation())
    plan = Plan(plan_cells([16], [1, 2], ["fused"], "bf16", captures=True), replace(LIMITS, captures=True), 0.15)
    with Campaign(workload, plan, 100.0, start=device.start, clock=device.clock, wait=device.wait) as found:
        found.run()
    assert device.started == [
        (16, "default_loop"), (16, "tuned_single"), (16, "fused"), (16, "fused"), (16, "auto"),
    ]  # fmt: skip
    assert all(entry.windows.rates() == [1600.0] * 3 for entry in found.measurements.values())
    assert device.now == pytest.approx(5 * 1.0 + 5 * 3 * 0.3)  # captures take no time here


def test_campaign_leaves_out_what_its_time_does_not_allow() -> None:
    # Three processes of 1 s with 3 windows of 0.3 s take 5.7 s; fused takes 1.9 s more for K=1, and 0.9 s for K=2.
    found = campaign(Device(), 8.4)
    assert names(found.measurements)[2:] == [(16, "auto", 6), (16, "fused", 1)]
    assert [(entry.side.num_learners, why.cause) for entry, why in found.left_out.items()] == [(2, "time")]
    assert [len(entry.windows.kept()) for entry in found.measurements.values()] == [3] * 4


def test_campaign_notes_what_fails_and_goes_on() -> None:
    device = Device()
    device.fail_at = 2
    found = campaign(device, 100.0, batch_sizes=(16, 8))
    assert {(entry.process_key(LIMITS), why.cause, why.reason) for entry, why in found.left_out.items()} == {
        (ProcessKey(16, "fused"), "failure", "memory does not hold it"),
        (ProcessKey(8, "fused"), "failure", "no such thing"),
    }  # fmt: skip
    # Its process ended in the first pass.
    assert found.measurements[cell("fused")].windows.rates() == [1600.0, None, None]
    assert (8, "default_loop", 1) in names(found.measurements)


def test_campaign_drops_windows_under_foreign_load_and_tries_again_while_there_is_time() -> None:
    device = Device()
    device.foreign = [0.5, 0.5]
    found = campaign(device, 100.0)
    first = next(iter(found.measurements.values()))
    assert (first.windows.dropped, first.windows.rates()) == (2, [1600.0] * 3)


def test_auto_is_compared_with_the_fastest_cell_within_passes() -> None:
    (entry,) = suite_report.auto_of("mlp", suite_measurements())
    assert entry["best"] == {"side": "fused", "num_learners": 4, "images_per_s": 4000.0}
    assert entry["ratio_to_best"] == 0.975  # median of 0.95 and 1
    assert (entry["executor"], entry["num_learners"], entry["settled"]) == ("fused", 4, True)
    assert (entry["tuning_s"], entry["images_per_s"], entry["n"]) == (12.5, 3900.0, 2)


def cells_of(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_summary_has_one_model_the_fastest_cell_and_auto() -> None:
    assert cells_of(suite_report.summary_table(suite_result())) == [
        ["mlp", "1,000", "2,000", "fused K=4", "4,000", "2.50", "fused K=4", "3,900", "0.97", "12"]
    ]


def test_summary_says_when_auto_is_not_there_or_had_not_settled() -> None:
    result = suite_result()
    entry = {**result["auto"][0], "settled": False, "ratio_to_best": None}
    assert cells_of(suite_report.summary_table({**result, "auto": [entry]}))[0][6:] == [
        "fused K=4 (not settled)", "3,900", "–", "12",
    ]  # fmt: skip
    assert cells_of(suite_report.summary_table({**result, "auto": []}))[0][6:] == ["–"] * 4


def test_suite_text_has_the_fastest_of_each_side_and_every_gap() -> None:
    text = suite_report.result_text(suite_result())
    assert ["threads", "16", "2", "3,100", "1.55", "3.10", "3"] in cells_of(text)
    assert ["threads", "32", "2", "5,000", "–", "2.50", "3"] in cells_of(text)
    assert "Left out, for want of time (5 minutes for all models): fused b=32 K=1, 4." in text
    assert "Left out, as it failed: serial b=32 K=1 (memory does not hold 1 learners)" in text
    assert "Others were busy in every window: fused b=16 K=1." in text
    assert "took more than 15 % of the cores were dropped" in text


def test_tables_of_a_suite_are_its_own() -> None:
    results = {"suite_cpu": suite_result()}
    assert pages.build("throughput/suite_cpu/summary", results) == suite_report.summary_table(results["suite_cpu"])
    with pytest.raises(ValueError, match="all, summary, machine"):
        pages.build("throughput/suite_cpu/sides", results)


def test_pictures_have_a_panel_a_model_and_lines_for_what_was_measured() -> None:
    suite_plot = pytest.importorskip("experiments.throughput.plot")
    result = suite_result()
    result["rows"] += [{**row, "model": "lenet"} for row in result["rows"] if row["side"] != "fused"]
    result["data"]["lenet"] = "mnist"
    by_learners, by_batch_size = suite_plot.draw_by_learners(result), suite_plot.draw_by_batch_size(result)
    for figure in (by_learners, by_batch_size):
        assert [axes.get_title() for axes in figure.axes] == ["mlp, mnist", "lenet, mnist"]
        assert {axes.get_ylabel() for axes in figure.axes} == {"throughput, images/s"}
    labels = [set(axes.get_legend_handles_labels()[1]) for axes in by_learners.axes]
    assert labels[0] == {"default_loop", "tuned_single", "threads", "fused", "auto"}
    assert labels[1] == labels[0] - {"fused"}
    assert [text.get_text() for text in by_batch_size.axes[0].texts] == ["threads K=2", "threads K=2", "fused K=4"]


def test_suite_from_the_command_line_writes_results_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(workloads, "NUM_IMAGES", 256)
    quick = replace(plan_cells([8], [1, 2], ["serial"], "fp32"), auto=[], single=[cell("default_loop", 8)])
    monkeypatch.setattr(planning, "plan_cells", lambda *_: quick)
    written = tmp_path / "suite_cpu.json"
    assert suite.main([
        "--device", "cpu", "--models", "mlp", "--batch-sizes", "8", "--num-learners", "1", "2", "--passes", "1",
        "--window-s", "0.01", "--max-foreign-share", "2", "--minutes", "1", "--json", str(written),
    ]) == 0  # fmt: skip
    result = json.loads(written.read_text())
    assert [(row["side"], row["num_learners"], row["n"]) for row in result["rows"]] == [
        ("default_loop", 1, 1), ("serial", 1, 1), ("serial", 2, 1),
    ]  # fmt: skip
    assert all(row["images_per_s"] > 0 for row in result["rows"])
    assert (result["left_out"], result["method"]["passes"], result["data"]) == ([], 1, {"mlp": "synthetic"})
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "suite_cpu_by_learners.png", "suite_cpu_by_batch_size.png",
    }  # fmt: skip
    assert "default_loop" in capsys.readouterr().out
