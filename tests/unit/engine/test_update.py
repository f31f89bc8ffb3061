"""Native row updates against torch operators and hand-worked numbers; what happens where there is no native code."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from crossbow_py.averaging import SMA, AveragingRule
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.engine.native.library import load
from crossbow_py.engine.optimizers import SGD, AdamW
from crossbow_py.engine.replicas import TrainedRow
from crossbow_py.engine.update import NativeUpdate, Step, TorchUpdate, choose_update

CPU = torch.device("cpu")
LENGTHS = (20_003, 37)  # no multiple of a chunk, a block or a vector register
AVERAGING = LinearRound(correction=0.3, momentum=0.9)
OPTIMIZERS = [
    SGD(momentum=0.0),
    SGD(momentum=0.9, weight_decay=0.01),
    SGD(momentum=0.9, weight_decay=0.01, nesterov=True, decay_norm_and_bias=True),
    AdamW(),
    AdamW(beta1=0.3, weight_decay=0.0),
]


def random_row(optimizer, shadow, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def vectors():
        return [torch.randn(length, generator=generator) for length in LENGTHS]

    weights, gradients, corrections, z = (vectors() for _ in range(4))
    state = {name: [part.abs() for part in vectors()] for name in optimizer.STATE}
    low = [part.to(torch.bfloat16) for part in weights] if shadow else None
    return TrainedRow(weights, gradients, corrections, state, z, low, num_decayed=1)


def flat(row):
    vectors = [*row.weights, *row.corrections, *(part for parts in row.state.values() for part in parts)]
    return torch.cat([*vectors, *(part.float() for part in row.shadow or [])])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("averaging", [AVERAGING, LinearRound(correction=0.0, momentum=0.9), None])
@pytest.mark.parametrize("shadow", [False, True])
def test_native_correction_equals_torch_operators(optimizer, averaging, shadow):
    rows = []
    for update in (NativeUpdate(optimizer, SMA(), load()), TorchUpdate(optimizer, SMA())):
        row = random_row(optimizer, shadow)
        for step in (1, 2, 3):
            update.correct(0, row, averaging, Step(0.1, step, 0.5))
        rows.append(flat(row))
    torch.testing.assert_close(rows[0], rows[1], rtol=2**-8 if shadow else 1e-6, atol=1e-6)
    assert not torch.equal(rows[0], flat(random_row(optimizer, shadow)))


@pytest.mark.parametrize("num_learners", [1, 2, 5])
def test_native_sum_and_move_equal_torch_operators_bit_for_bit(num_learners):
    results = []
    for update in (NativeUpdate(SGD(), SMA(), load()), TorchUpdate(SGD(), SMA())):
        rows = [random_row(SGD(), shadow=False, seed=learner) for learner in range(num_learners)]
        total, z, z_prev = rows[0].gradients, rows[0].z, rows[0].state["momentum"]
        update.sum(total, [row.corrections for row in rows])
        update.move(z, z_prev, total, AVERAGING)
        results.append(torch.cat([*total, *z, *z_prev]))
    assert torch.equal(*results)


def test_native_sgd_round_equals_numbers_worked_out_by_hand():
    one = lambda value: [torch.tensor([float(value)])]  # noqa: E731
    row = TrainedRow(one(4), one(1), one(0), {"momentum": one(2)}, one(2), None, num_decayed=1)
    update = NativeUpdate(SGD(momentum=0.5, weight_decay=0.25), SMA(), load())
    update.correct(0, row, LinearRound(0.5, 0.5), Step(0.5, 1))
    # c = 0.5·(4 − 2) = 1;  u = 0.5·2 + (1 + 0.25·4) = 3;  w = 4 − 0.5·3 − 1 = 1.5
    assert [row.corrections[0].item(), row.state["momentum"][0].item(), row.weights[0].item()] == [1.0, 3.0, 1.5]
    z, z_prev, total = one(2), one(1), one(0)
    update.sum(total, [row.corrections, one(3)])
    update.move(z, z_prev, total, LinearRound(0.5, 0.5))
    # z' = 2 + (1 + 3) + 0.5·(2 − 1) = 6.5
    assert [z[0].item(), z_prev[0].item()] == [6.5, 2.0]


def test_native_gradient_norm_is_that_of_all_vectors_together():
    row = random_row(SGD(), shadow=False)
    expected = torch.cat(row.gradients).double().norm().item()
    assert NativeUpdate(SGD(), SMA(), load()).gradient_norm(row) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_native_gradient_norm_of_a_gradient_that_is_not_finite_is_not_finite(value):
    row = random_row(SGD(), shadow=False)
    row.gradients[1][36] = value
    assert not torch.isfinite(torch.tensor(NativeUpdate(SGD(), SMA(), load()).gradient_norm(row)))


def test_native_shadow_rounds_as_torch_does():
    values = torch.tensor([1.00390625, 1.01171875, -1.00390625, float("inf"), float("nan"), 3.4e38, 1e-40, -0.0])
    shadow = [torch.zeros(8, dtype=torch.bfloat16)]
    zero = [torch.zeros(8)]
    row = TrainedRow([values.clone()], zero, zero, {"momentum": zero}, zero, shadow, num_decayed=0)
    NativeUpdate(SGD(momentum=0.0), SMA(), load()).correct(0, row, None, Step(0.0, 1))
    torch.testing.assert_close(shadow[0], values.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


class Bent(SMA):
    def average(self, z, z_prev, total, coefficients):
        return None


@pytest.mark.parametrize(
    ("rule", "dtype"), [(Bent(), torch.float32), (SMA(), torch.float64)], ids=["not_linear", "float64"]
)
def test_run_that_native_code_cannot_serve_takes_torch_operators_without_a_word(rule, dtype):
    update, message = choose_update(SGD(), rule, CPU, dtype)
    assert (update.NAME, message) == ("torch", None)


def test_float32_run_on_cpu_takes_native_code():
    assert choose_update(AdamW(), SMA(), CPU, torch.float32)[0].NAME == "native"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "there is no C compiler"), ("false", "false failed"), ("", "there is no C compiler")],
)
def test_without_a_working_compiler_updates_run_as_torch_operators_and_say_so(compiler, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler)
    update, message = choose_update(SGD(), SMA(), CPU, torch.float32, cache=tmp_path)
    assert update.NAME == "torch"
    assert reason in message
    assert "install gcc" in message


def test_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert load(tmp_path / "file" / "cache").crossbow_sum is not None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_folder_that_can_be_written_is_said_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    _, message = choose_update(SGD(), SMA(), CPU, torch.float32, cache=tmp_path / "file" / "cache")
    assert "can hold the compiled code" in message
    assert message.endswith("make room there, or name another folder in TMPDIR.")


def test_user_without_a_home_still_has_native_code(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    assert load().crossbow_sum is not None


def test_library_compiled_before_serves_without_a_compiler(monkeypatch, tmp_path):
    load(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load(tmp_path).crossbow_sum is not None


def test_damaged_library_in_the_cache_is_made_anew(tmp_path):
    load(tmp_path / "whole")
    (whole,) = (tmp_path / "whole").glob("*.so")
    damaged = tmp_path / "damaged" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"no library")
    assert load(damaged.parent).crossbow_sum is not None
    assert damaged.read_bytes() == whole.read_bytes()


def test_library_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(AveragingRule, "corrections", lambda self, out, weights, z, coefficients: None)
    update, message = choose_update(SGD(), SMA(), CPU, torch.float32)
    assert update.NAME == "torch"
    assert "its results differ" in message
