"""The memory experiment: what is counted, the tables from made-up results, and a short run for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crossbow_py.engine.sizing.memory import learner_bytes, predicted_bytes
from experiments.bench.rounds import Rounds, Setup
from experiments.memory import measure, run

MIB = 2**20
FLOATS = {"master_bytes": 4, "compute_bytes": 4}
def test_peak_is_the_highest_running_sum() -> None:
    assert measure.peak([5, 3, -4, 2, -6, 7]) == 8
    assert measure.peak([]) == 0
    assert measure.peak([-3]) == 0


def test_peak_on_host_has_tensors_and_workspaces_inside_operators() -> None:
    kept: list[torch.Tensor] = []

    def call() -> None:
        first = torch.ones(1000)
        second = first + 1
        del first
        kept.append(second * 2)

    assert measure.peak_on_host(call) in range(8000, 8200)  # two of three tensors at a time, and a few numbers


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_held_bytes_are_those_of_the_rows_and_their_padding(executor: Any) -> None:
    with Rounds(Setup("lenet", 4, 3, executor, "cpu", "fp32")) as rounds:
        bank = rounds.bank
        held = measure.held_bytes(bank)
        own = learner_bytes(bank.layout.num_values, bank.buffer_layout.num_values, 1, **FLOATS, activations=0)
    assert 1 <= held / predicted_bytes(own, 3, at_once=1) < 1.01


def test_rounds_without_graphs_are_measured_and_predicted_within_five_percent() -> None:
    setup = Setup("lenet", 8, 3, "fused", "cpu", "fp32")
    probed = measure.probe(setup)
    own = learner_bytes(
        probed["num_values"], probed["num_buffer_values"], probed["num_states"], **FLOATS,
        activations=probed["activation_bytes"],
    )  # fmt: skip
    for asked in (setup, Setup("lenet", 8, 3, "serial", "cpu", "fp32")):
        found = run.with_prediction(measure.weigh(asked), own, 3, asked.executor)
        assert found["measured_bytes"] / found["predicted_bytes"] == pytest.approx(1, abs=0.05)


def test_measurement_that_fails_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(asked: dict[str, Any]) -> dict[str, int]:
        if asked.get("probe"):
            return {"num_values": 10, "num_buffer_values": 0, "num_states": 1, "activation_bytes": 100}
        if asked["executor"] == "serial":
            raise run.MeasurementError("it ended with code -9")
        return {"held_bytes": 1, "fixed_bytes": 0, "measured_bytes": 380}

    monkeypatch.setattr(run, "measure", found)
    result: dict[str, Any] = {"models": [], "rows": []}
    run.measure_model(Setup("lenet", 4, 1, "serial", "cpu", "fp32"), [1], result)
    assert [(entry["measured_bytes"], entry["predicted_bytes"], entry.get("failure")) for entry in result["rows"]] == [
        (380, 3 * 40 + 160 + 100, None), (None, None, "it ended with code -9"),
    ]  # fmt: skip
    assert run.result_text(result).endswith("lenet serial K=1 failed: it ended with code -9")
