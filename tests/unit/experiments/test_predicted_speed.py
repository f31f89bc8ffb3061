"""The prediction's bands, and measurements laid beside them."""

from __future__ import annotations

from typing import Any

from experiments.predicted_speed import report


def side(images_per_s: float) -> dict[str, Any]:
    return {"images_per_s": images_per_s}


def result() -> dict[str, Any]:
    cells = [{"model": "lenet", "precision": "bf16", "gpu": "H100", "num_learners": k} for k in (1, 4)]
    sides = {"fused": side(1000), "streams": side(900), "plain": side(800)}
    faster = {**sides, "fused": side(2500)}
    rows = [{**cell, "assumed": name, **(sides if name == "slow" else faster)}
            for cell in cells for name in ("slow", "fast")]  # fmt: skip
    ratios = [{**cell, "fused ÷ its first": [1.0, 1.0], "fused ÷ plain": [0.5, 2.0]} for cell in cells]
    return {"batch_size": 16, "rows": rows, "ratios": ratios}


def test_tables_show_bands_and_say_that_nothing_was_measured() -> None:
    text = report.speed_text(result())
    assert "No figure was measured." in text
    (line,) = (line for line in text.splitlines() if line.startswith("| lenet bf16 H100 |   1 |") and "2.5" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][2:] == ["1–2.5", "0.9", "0.8", "1.00", "0.50–2.00"]


def test_measurement_on_a_gpu_is_laid_beside_its_prediction(monkeypatch) -> None:
    row = {"model": "lenet", "side": "fused", "num_learners": 4, "precision": "bf16", "images_per_s": 1000.0 * 10**0.5}
    rows = [{**row, "batch_size": 16}, {**row, "batch_size": 32}, {**row, "batch_size": 16, "side": "serial"}]
    found = {"suite_cuda": {"machine": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "rows": rows},
             "suite_cpu": {"machine": {"gpus": []}, "rows": rows}}  # fmt: skip
    cells = {"fused:4:16:sma": 3162.3, "fused:4:16:none": 9.0, "serial:4:16:sma": 9.0, "tuned:1:32:none": 9.0}
    cells |= {"fused:4:16:sma:fp32": 9.0, "fused:4:64:sma": 9.0}
    rows = {cell: {"precision": (*cell.split(":")[4:], "bf16")[0], "images_per_s": [own - 1, own, own + 1]}
            for cell, own in cells.items()}  # fmt: skip
    rows["fused:8:16:sma"] = {"precision": "bf16", "images_per_s": []}
    of_gpu = {"rows": {"machine": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "model": "lenet", "rows": rows}}
    monkeypatch.setattr(report, "read_results", lambda question: of_gpu if question == "gpu" else found)
    lines = report.measured_text({"hopper": result()}).splitlines()[2:]
    expected = ["lenet bf16 H100, fused", "4", "3.16", "1–2.5", "2.00"]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [expected] * 2
    found.clear()
    of_gpu.clear()
    assert report.measured_text({"hopper": result()}) == "Nothing of it has been measured yet."
