"""From windows to rows, ratios and tables."""

from __future__ import annotations

from experiments.bench.gate import Window
from experiments.bench.sides.side import OPEN, Side
from experiments.throughput import report
from experiments.throughput.comparison import mixed, plan_sides, ratios, to_row
from experiments.throughput.sides import sides_on
from tests.unit.experiments.samples import DEFAULT, TUNED, WITH, WITHOUT, measurement, throughput_result


def test_row_has_the_median_of_clean_windows_and_the_fields_of_the_file() -> None:
    row = to_row(measurement(WITH, 100.0, None, 300.0, 110.0), "lenet", 16)
    assert row["images_per_s"] == 110.0
    assert row["n"] == 3
    assert row["images_per_s_windows"] == [100.0, None, 300.0, 110.0]
    assert {"model", "batch_size", "side", "num_learners", "averaging", "precision", "images_per_s", "n"} <= set(row)


def test_ratios_are_medians_within_repetitions() -> None:
    measurements = [
        measurement(DEFAULT, 10.0, 20.0, 10.0),
        measurement(TUNED, 20.0, 40.0, 40.0),
        measurement(WITH, 40.0, 60.0, 80.0),
        measurement(WITHOUT, 44.0, 60.0, 84.0),
    ]
    found = {(e["kind"], e["side"], e["averaging"], e["to"]["side"]): e["ratio"] for e in ratios(measurements)}
    assert found == {
        ("throughput", "tuned_single", "none", "default_loop"): 2.0,  # 2, 2, 4
        ("throughput", "threads", "sma", "default_loop"): 4.0,  # 4, 3, 8
        ("throughput", "threads", "sma", "tuned_single"): 2.0,  # 2, 1.5, 2
        ("throughput", "threads", "none", "default_loop"): 4.4,  # 4.4, 3, 8.4
        ("throughput", "threads", "none", "tuned_single"): 2.1,  # 2.2, 1.5, 2.1
        ("round_time", "threads", "sma", "threads"): 1.05,  # 1.1, 1, 1.05
    }


def test_ratios_to_tuned_single_are_at_equal_precision() -> None:
    tuned_bf16, ours_bf16 = Side("tuned_single", 1, "none", "bf16"), Side("threads", 2, "sma", "bf16")
    found = ratios([measurement(side, 1.0) for side in (TUNED, tuned_bf16, WITH, ours_bf16)])
    assert [(entry["precision"], entry["to"]["precision"]) for entry in found] == [("fp32", "fp32"), ("bf16", "bf16")]


def test_plan_sides_with_two_precisions_has_one_default_loop() -> None:
    planned = plan_sides(sides_on("cpu"), [1, 2], ["bf16", "fp32"], serial_learners=[1])
    assert planned[0] == DEFAULT
    assert [side.side for side in planned].count("default_loop") == 1
    for_one_precision = [side for side in planned if side.precision == "bf16"]
    assert [(side.side, side.num_learners, side.averaging) for side in for_one_precision] == [
        ("tuned_single", 1, "none"),
        ("serial", 1, "sma"),
        ("serial", 1, "none"),
        ("threads", 1, "sma"),
        ("threads", 1, "none"),
        ("threads", 2, "sma"),
        ("threads", 2, "none"),
        ("fused", 1, "sma"),
        ("fused", 1, "none"),
        ("fused", 2, "sma"),
        ("fused", 2, "none"),
        ("fused_threads", 1, "sma"),
        ("fused_threads", 1, "none"),
        ("fused_threads", 2, "sma"),
        ("fused_threads", 2, "none"),
        ("auto", OPEN, "sma"),
    ]


def test_throughput_text_has_ratios_choices_and_what_is_missing() -> None:
    text = report.result_text(throughput_result())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["threads", "2", "sma", "fp32", "1", "38", "3.80", "1.90", "1", "0"] in lines
    assert ["tuned_single", "1", "–", "fp32", "2", "20", "2.00", "1", "1", "0"] in lines
    assert ["serial", "1", "sma", "fp32", "1", "–", "–", "–", "0", "0"] in lines
    assert ["threads", "2", "fp32", "1.026", "1.026", "1.026", "1"] in lines
    assert "tuned_single fp32 chose fp32 fused, threads: 2." in text
    assert "serial K=1 with SMA fp32: no window was clean" in text
    assert "more than 15 % of the cores were dropped" in text


def row(side: str, in_effect: str, num_learners: int = 2) -> dict[str, object]:
    entry = measurement(Side(side, num_learners, "sma", "bf16"), 100.0)
    entry.windows.taken = [Window(10, 0.1, 0.0, in_effect=tuple(in_effect.split(", ")) if in_effect else ())]
    return to_row(entry, "lenet", 16)


def test_rows_say_what_they_ran_with() -> None:
    assert row("fused", "graphs, update")["in_effect"] == ["graphs, update"]
    assert row("serial", "")["in_effect"] == ["operators"]


def test_captured_and_eager_rounds_or_other_kernels_are_not_compared() -> None:
    fused = [row("fused", "graphs, update, convolutions: 12"), row("fused", "graphs, update, convolutions: 9", 4)]
    others = [row("streams", "graphs"), row("serial", "")]
    assert mixed([*fused, *others], captures=True) == []
    (said,) = mixed([*fused, row("streams", "")], captures=True)
    assert said.startswith("Not comparable: rounds of fused and streams ran with eager; and with graphs.")
    (said,) = mixed([*fused, row("fused", "graphs", 8), *others], captures=True)
    assert said.startswith("Not comparable: fused bf16 of lenet ran with graphs; and with graphs, update.")


def test_table_refuses_what_cannot_be_compared_and_shows_what_each_row_ran_with() -> None:
    result = {**throughput_result(), "device": "cuda"}
    result["rows"] = [row("fused", "graphs, update"), row("streams", "")]
    text = report.result_text(result)
    assert text.startswith("Not comparable:") and "÷ default_loop" not in text
    assert "graphs, update |" in text and "operators |" in text
    result["rows"] = [row("fused", "graphs, update")]
    assert "fused bf16 ran with graphs, update." in report.result_text(result)
