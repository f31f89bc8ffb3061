"""The update's bandwidth: bytes worked out by hand, copies that copy, windows that are dropped, a short measurement."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.row_update import TorchUpdate
from experiments.bench import windows
from experiments.update_bandwidth import copies, run, updates
from experiments.update_bandwidth.run import COPY, UPDATE, WHOLE, Side
from experiments.update_bandwidth.updates import Part

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch) -> None:
    """Buffers and windows for tests, and others may be as busy as they like."""
    monkeypatch.setattr(copies, "_SMALLEST_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(copies, "_CACHES", 0)
    monkeypatch.setattr(run, "_WINDOW_S", 0.002)
    monkeypatch.setattr(run, "MAX_FOREIGN_SHARE", 2.0)
    monkeypatch.setattr(run, "keep_freed_memory", lambda: None)


def small_bank(precision=FP32) -> ReplicaBank:
    torch.manual_seed(0)
    return ReplicaBank(nn.Linear(5, 3), 2, device=CPU, precision=precision, state_names=("momentum",), order="blocks")


def sides() -> list[Side]:
    """An update of 3 MB in two parts, and two copies: one is faster, one has a window without a clean attempt."""
    update = Side(UPDATE, UPDATE, (Part("gate", print, 10**6), Part("update", print, 2 * 10**6)))
    update.windows = [{WHOLE: 8.0, "gate": 4.0, "update": 16.0}, {WHOLE: 6.0, "gate": 3.0, "update": 9.0}, None]
    slow, fast = (Side(COPY, name, (Part(COPY, print, 10**6),)) for name in ("torch", "streaming"))
    slow.windows, slow.dropped = [{WHOLE: 5.0}, {WHOLE: 5.0}, None], 3
    fast.windows = [{WHOLE: 10.0}, {WHOLE: 10.0}, {WHOLE: 10.0}]
    return [update, slow, fast]


def result() -> dict[str, Any]:
    return {
        "model": "vgg16", "num_learners": 4, "device": "cpu", "precision": "fp32", "threads": 2, "num_values": 1000,
        "bytes_a_value": {"gate": 16, "update": 100}, **run.summary(sides()),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("averages", "has_shadow", "writes_sum", "expected"),
    [(True, False, True, 100), (True, True, False, 22 * 4 + 16), (False, False, True, 80), (False, True, False, 88)],
)
def test_bytes_a_value_of_four_learners_are_those_counted_by_hand(averages, has_shadow, writes_sum, expected) -> None:
    moved = updates.update_bytes(4, averages=averages, has_shadow=has_shadow, writes_sum=writes_sum)
    assert (updates.gate_bytes(4), moved) == (16, expected)


def test_summary_compares_with_the_fastest_copy_within_repetitions() -> None:
    summed = run.summary(sides())
    figures = [summed[key] for key in ("copy", "copy_gb_per_s", "update_gb_per_s", "ratio", "n")]
    assert figures == ["streaming", 10.0, 7.0, 0.7, 2]
    rows = {(row["name"], row["part"]): row for row in summed["rows"]}
    assert rows["update", "gate"]["ratio"] == 0.35
    assert [rows["update", "whole"][key] for key in ("minimum", "maximum", "mb")] == [0.6, 0.8, 3.0]
    assert [rows["torch", "whole"][key] for key in ("ratio", "n", "dropped")] == [0.5, 2, 3]


def test_summary_without_clean_windows_has_no_figures() -> None:
    measured = sides()
    for side in measured:
        side.windows = [None]
    summed = run.summary(measured)
    assert [summed[key] for key in ("copy", "copy_gb_per_s", "update_gb_per_s", "ratio", "n")] == [None] * 4 + [0]
    assert "fastest copy" in run.bandwidth_table({**result(), **summed})


def test_window_in_which_others_were_busy_is_dropped_and_tried_again(monkeypatch) -> None:
    shares = iter([0.5, 0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(run, "foreign_share", lambda before, after: next(shares))
    monkeypatch.setattr(windows, "RETRY_AFTER_S", 0.0)
    side, seconds = Side(COPY, "torch", (Part(COPY, lambda: None, 2 * 10**9),)), itertools.count()

    class Clock(run.HostClock):
        def mark(self) -> float:
            return float(next(seconds))

    for _ in range(2):
        assert run._repetition(side, Clock(), end_s=float("inf"))
    assert side.windows == [{WHOLE: 2.0, COPY: 2.0}, None]
    assert side.dropped == 4


def test_parts_of_a_window_are_timed_apart() -> None:
    marks = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    side = Side(UPDATE, UPDATE, (Part("a", lambda: None, 1), Part("b", lambda: None, 1)), calls=2)

    class Clock(run.HostClock):
        def mark(self) -> float:
            return next(marks)

    assert run._window(side, Clock())[0] == [2.0, 3.0]


@pytest.mark.parametrize("function", [copies._memcpy(), copies._streaming()], ids=["memcpy", "streaming"])
def test_copy_in_parts_copies_everything(function, monkeypatch) -> None:
    if function is None:
        pytest.skip("there is none here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    source, target = torch.arange(20_000.0), torch.zeros(20_000)
    with ThreadPoolExecutor(3) as threads:
        copies._in_parts(function, target, source, threads)()
    assert torch.equal(target, source)


def test_without_a_compiler_there_is_no_streaming_copy(monkeypatch, small) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with copies.copies(CPU) as found:
        assert list(found) == ["torch", "memcpy"]


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_host_parts_are_a_round_that_moves_all(precision) -> None:
    bank = small_bank(precision)
    bank.gradients.storage.fill_(1.0)
    bank.weights.storage.fill_(2.0)
    bank.z.storage.zero_()
    bank.z_prev.storage.zero_()
    gate, update = updates.host_parts(bank)
    assert gate.run() == pytest.approx([18**0.5] * 2)
    update.run()
    # c = 2 for each of two learners, whose decayed weights go to 2 − 0.01 · (1 + 2e-4) − 2, and z to their mean
    assert bank.z.flat()[0].tolist() == pytest.approx([-0.010002] * 15, rel=1e-5)
    assert bank.weights.flat(1)[0].tolist() == pytest.approx([-0.010002] * 15, rel=1e-5)
    assert (gate.num_bytes, update.num_bytes) == (18 * 8, 18 * ((44 if precision == BF16 else 40) + 20))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not in interpreter mode")
def test_device_parts_are_the_round_of_the_kernels() -> None:
    pytest.importorskip("triton")
    banks = [small_bank(BF16) for _ in range(2)]
    for bank in banks:
        bank.gradients.storage.fill_(1.0)
        bank.weights.storage.mul_(2.0)
    (whole,) = updates.device_parts(banks[0], captures=False)
    whole.run()
    for part in updates.host_parts(banks[1]):
        part.run()
    for ours, expected in zip(banks[0].z.trained(), banks[1].z.trained(), strict=True):
        torch.testing.assert_close(ours, expected)
    assert whole.num_bytes == 18 * (8 + 44 + 16)


def test_update_without_native_code_is_refused_with_its_reason(monkeypatch) -> None:
    monkeypatch.setattr(updates, "choose_update", lambda *given: (TorchUpdate(*given[:2]), "Install gcc."))
    with pytest.raises(UserError, match="Install gcc"):
        updates.host_parts(small_bank())


def test_measurement_from_the_command_line_writes_its_result(small, tmp_path, capsys) -> None:
    path = tmp_path / "lenet.json"
    arguments = ["--model", "lenet", "--num-learners", "2", "--device", "cpu", "--seconds", "0.05", "--json", str(path)]
    assert run.main(arguments) == 0
    measured = json.loads(path.read_text())
    assert measured["bytes_a_value"] == {"gate": 8, "update": 60 if measured["precision"] == "fp32" else 64}
    assert measured["update_gb_per_s"] > 0
    assert measured["ratio"] > 0
    assert "gate and update" in capsys.readouterr().out
