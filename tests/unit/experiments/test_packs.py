"""Comparisons of packs: the sides count what they do, rows and ratios by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crossbow_py.core.errors import CrossbowError
from crossbow_py.train.loop.planning import plan_round
from experiments.bench import workloads
from experiments.bench.gate import FinishedError
from experiments.bench.packs import comparison, inference, layers, training
from experiments.bench.packs.comparison import (
    Method,
    executors_on,
    measure_panel,
    one_at_a_time,
    predictors_on,
    rows_of,
    run_pack_side,
)
from experiments.bench.packs.models import BUILDS, RowReader, data_of
from experiments.bench.packs.plot import COLORS
from experiments.bench.packs.report import best_pack, cells_table, left_out, summary_header, summary_row
from experiments.bench.packs.side import PackSide, PackWorkload, packed, prepare_packs, single
from experiments.bench.packs.training import new_pack
from experiments.bench.sides import tuned
from experiments.bench.workloads import Effort
from tests.unit.experiments.packs import PretendedProcess, cell
from tests.unit.experiments.samples import CountingGate

BATCH = 4
NO_EFFORT = Effort(trial_s=0.0, trials=1)


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackWorkload]:
    """Narrow MLPs on a few synthetic images; torch's global settings, which sides change, are kept."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(workloads, "NUM_IMAGES", 64)
    for module in (training, layers, inference, tuned):
        monkeypatch.setattr(module, "usable_cores", lambda: 1)
    monkeypatch.setattr(tuned, "keep_freed_memory", lambda: None)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield prepare_packs(["mlp_64"], "cpu", tmp_path)["mlp_64"].at(BATCH)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(("side", "images"), [
    (single("default_loop"), BATCH), (single("tuned_single"), BATCH), (single("serial"), BATCH),
    (single("captured"), BATCH), (packed("threads", 3), 3 * BATCH), (packed("fused", 3), 3 * BATCH),
    (packed("fused_threads", 3), 3 * BATCH),
    (PackSide("default_loop", 3, work="layers"), 3 * BATCH), (PackSide("tuned_single", 3, work="layers"), 3 * BATCH),
    (PackSide("fused", 3, work="layers"), 3 * BATCH), (single("default_loop", "inference"), BATCH),
    (single("tuned_single", "inference"), BATCH), (packed("default_ensemble", 3, "inference"), 3 * BATCH),
    (packed("fused", 3, "inference"), 3 * BATCH),
    (packed("threads", 3, "inference"), 3 * BATCH), (packed("fused_threads", 3, "inference"), 3 * BATCH),
], ids=lambda value: value.label if isinstance(value, PackSide) else "")  # fmt: skip
def test_side_counts_an_image_for_every_model_that_took_it(side: PackSide, images: int, mlp: PackWorkload) -> None:
    gate = CountingGate(5 * images)
    with pytest.raises(FinishedError):
        run_pack_side(side, mlp, gate, NO_EFFORT)  # type: ignore[arg-type]
    assert gate.images == 5 * images
    assert gate.prepared.threads == 1


def test_pack_is_of_different_models_that_take_the_same_batches(mlp: PackWorkload) -> None:
    parts = new_pack(packed("fused", 3), mlp).run
    assert plan_round(parts, 2, 8, 1.0).starts == (8, 8, 8)
    weights = [parts.bank.module(row).state_dict()["1.weight"] for row in range(3)]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


def test_side_that_torch_refuses_is_one_sentence(mlp: PackWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*arguments: Any) -> None:
        raise RuntimeError("no memory\nand where")

    monkeypatch.setattr(training, "new_pack", out_of_memory)
    with pytest.raises(CrossbowError, match="^RuntimeError: no memory$"):
        run_pack_side(packed("fused", 2), mlp, CountingGate(1), NO_EFFORT)  # type: ignore[arg-type]


def test_ensemble_is_given_the_images_as_models_are_trained_on_them(
    mlp: PackWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []

    def recorded(_: object, batch: Tensor) -> Tensor:
        taken.append(batch)
        return torch.zeros(len(batch), 10)

    monkeypatch.setattr(inference.Ensemble, "predict", recorded)
    with ExitStack() as stack:
        step = inference.ensemble_step(packed("fused", 2, "inference"), mlp, stack)
        step(), step()
    images = mlp.tensors()[0][: 2 * BATCH].float() / 255
    torch.testing.assert_close(torch.cat(taken), (images - mlp.mean[0]) / mlp.std[0])


@pytest.mark.parametrize("name", BUILDS)
def test_model_of_every_name_gives_scores(name: str) -> None:
    shape = (1, 28, 28) if data_of(name) == "mnist" else (3, 32, 32)
    with torch.no_grad():
        assert BUILDS[name](shape, 10).eval()(torch.zeros(2, *shape)).shape == (2, 10)


def test_row_reader_reads_rows_from_top_to_bottom() -> None:
    torch.manual_seed(1)
    model, x = RowReader(torch.nn.GRU, (2, 3, 5), 4), torch.randn(1, 2, 3, 5)
    assert model.cells.input_size == 10
    hidden = torch.zeros(1, 1, 64)
    for row in range(3):
        _, hidden = model.cells(x[:, :, row].reshape(1, 1, 10), hidden)
    torch.testing.assert_close(model(x), model.head(hidden[0]))


def test_rows_hold_medians_and_ratios_within_repetitions(mlp: PackWorkload) -> None:
    cells = [
        cell(single("default_loop"), mlp, 100, 200, 100),
        cell(single("tuned_single"), mlp, 200, None, 200, dropped=3),
        cell(packed("fused", 4), mlp, 400, 1000, 300),
    ]
    default, one, pack = rows_of(cells)
    assert (pack["images_per_s"], pack["n"], one["n"], one["dropped"]) == (400.0, 3, 2, 3)
    assert pack["over"]["default_loop"] == {"median": 4.0, "minimum": 3.0, "maximum": 5.0}
    assert pack["over"]["tuned_single"] == {"median": 1.75, "minimum": 1.5, "maximum": 2.0}
    assert default["over"]["default_loop"] is None
    assert one["images_per_s_windows"] == [200.0, None, 200.0]


@pytest.mark.parametrize("executor", ["fused_threads", "threads"])
def test_executor_with_a_thread_a_group_says_so_and_has_all_cores_to_share_out(
    executor: str, mlp: PackWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[int] = []
    monkeypatch.setattr(training, "usable_cores", lambda: 3)
    new = training.new_pack
    monkeypatch.setattr(training, "new_pack", lambda *own: cores.append(torch.get_num_threads()) or new(*own))
    gate = CountingGate(4 * BATCH)
    with pytest.raises(FinishedError):
        run_pack_side(packed(executor, 4), mlp, gate, NO_EFFORT)  # type: ignore[arg-type]
    assert (cores, gate.prepared.threads) == ([3 if executor == "fused_threads" else 1], 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_side_of_a_device_has_a_colour_of_its_own(device: str) -> None:
    names = {*one_at_a_time(device), *executors_on(device), *predictors_on(device), "default_ensemble"}
    assert len({COLORS[name] for name in names}) == len(names)


def test_panel_takes_turns_and_goes_on_without_a_side_that_cannot_be_had(
    mlp: PackWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "SideProcess", PretendedProcess)
    monkeypatch.setattr(PretendedProcess, "absent", ("threads",))
    monkeypatch.setattr(PretendedProcess, "visits", [])
    cells = [cell(single("default_loop"), mlp), cell(packed("threads", 2), mlp), cell(packed("fused", 2), mlp)]
    measure_panel(cells, Method(1.0, 3))
    visited = PretendedProcess.visits[2:]  # after the warm-up of each
    turns = [sorted(side for side, _ in visited[turn : turn + 2]) for turn in (0, 2, 4)]
    assert turns == [["default_loop", "fused"]] * 3
    assert {visit.seconds for _, visit in visited} == {1.0}
    rows = rows_of(cells)
    assert [(row["n"], row["failure"]) for row in rows] == [
        (3, ""), (0, "side threads K=2 fp32 training: not here"), (3, ""),
    ]  # fmt: skip
    assert left_out(rows) == "Left out: side threads K=2 fp32 training: not here"


def test_summary_shows_the_fastest_pack_beside_one_model_at_a_time(mlp: PackWorkload) -> None:
    rows = rows_of([
        cell(single("default_loop"), mlp, 100), cell(single("tuned_single"), mlp, 200),
        cell(packed("threads", 4), mlp, 300), cell(packed("fused", 4), mlp, 5000),
    ])  # fmt: skip
    assert best_pack(rows) is rows[3]
    assert summary_row(rows) == [
        "100", "200", "fused K=4", "5,000", "50.00 (50.00–50.00)", "25.00 (25.00–25.00)", "1",
    ]  # fmt: skip
    assert summary_row(rows[:2]) == ["100", "200", *["–"] * 5]
    last = cells_table(rows).splitlines()[-1]
    assert [part.strip() for part in last.split("|")[1:7]] == ["mlp_64", "4", "fused", "4", "2", "5,000"]


def test_rows_of_cuda_are_compared_with_one_captured_model_too(mlp: PackWorkload) -> None:
    rows = rows_of([
        cell(single("default_loop"), mlp, 100), cell(single("tuned_single"), mlp, 200),
        cell(single("captured"), mlp, 250), cell(packed("fused", 4), mlp, 1000),
    ])  # fmt: skip
    assert summary_header(rows) == [
        "default_loop", "tuned_single", "captured", "best pack", "images/s", "÷ default_loop", "÷ tuned_single",
        "÷ captured", "n",
    ]  # fmt: skip
    assert summary_row(rows)[:4] == ["100", "200", "250", "fused K=4"]
    assert summary_row(rows)[5:8] == [f"{ratio:.2f} ({ratio:.2f}–{ratio:.2f})" for ratio in (10, 5, 4)]
    assert "captured" not in summary_header(rows[:2])
