"""Native row updates against torch operators and hand-worked numbers; what happens where there is no native code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, AveragingRule, Independent
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.engine.bank.layout import TrainedRow
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.native.library import load
from crossbow_py.engine.trust.remember import forget
from crossbow_py.engine.update.agreement import round_by_row
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step, TorchUpdate
from crossbow_py.engine.update.update_choice import choose_update
from tests.thinned import thinned

CPU = torch.device("cpu")
LENGTHS = (20_003, 37)  # no multiple of a chunk, a block or a vector register
AVERAGING = LinearRound(correction=0.3, momentum=0.9)
FOLLOWS = LinearRound(correction=0.7, momentum=0.2, share=1 / 3, follows_learners=True)
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
    state = {name: [part.abs() for part in vectors()] for name in optimizer.state_names}
    low = [part.to(torch.bfloat16) for part in weights] if shadow else None
    return TrainedRow(weights, gradients, corrections, state, z, low, num_decayed=1)


def flat(row):
    vectors = [*row.weights, *row.corrections, *(part for parts in row.state.values() for part in parts)]
    return torch.cat(vectors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("averaging", [AVERAGING, FOLLOWS, LinearRound(correction=0.0, momentum=0.9), None])
@pytest.mark.parametrize("shadow", [False, True])
def test_native_correction_equals_torch_operators(optimizer, averaging, shadow):
    rows = []
    for update in (NativeUpdate(optimizer, SMA(), load()), TorchUpdate(optimizer, SMA())):
        row = random_row(optimizer, shadow)
        gradients = [part.clone() for part in row.gradients]
        for step in (1, 2, 3):
            torch._foreach_copy_(row.gradients, gradients)  # the reference leaves others
            update.correct(0, row, averaging, Step(0.1, step, 0.5))
        assert not shadow or torch.equal(torch.cat(row.shadow), torch.cat(row.weights).bfloat16())
        rows.append(flat(row))
    torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-6)
    assert not torch.equal(rows[0], flat(random_row(optimizer, shadow)))


def random_bank(optimizer, precision, num_learners, long=False):
    """Rows longer than a chunk if asked for, values that are no numbers of any model."""
    generator = torch.Generator().manual_seed(0)
    template = nn.Sequential(nn.Linear(211, 97) if long else nn.Linear(5, 3), nn.Linear(97 if long else 3, 7))
    bank = ReplicaBank(
        template, num_learners, device=CPU, precision=precision, state_names=optimizer.state_names, order="blocks"
    )
    for rows in (bank.weights, bank.gradients, bank.z, bank.z_prev, bank.total, *bank.state.values(), bank.shadow):
        for part in rows.stacked(num_learners if rows.num_rows > 1 else 1).values():
            part.copy_(torch.randn(part.shape, generator=generator).abs())
    return bank


def values_of(bank):
    buffers = [bank.weights, *bank.state.values(), bank.z, bank.z_prev, bank.total, bank.shadow]
    return [rows.storage for rows in buffers]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("averaging", [AVERAGING, FOLLOWS, None], ids=["corrections", "follows", "alone"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gated", [(), (0,), (0, 1, 2)], ids=str)
def test_native_round_of_all_learners_in_one_pass_equals_learner_by_learner_bit_for_bit(
    optimizer, averaging, precision, gated
):
    update = NativeUpdate(optimizer, SMA(), load())
    steps = [None if j in gated else Step(0.1, 2 + j, 0.5**j) for j in range(3)]
    by_row, at_once = (random_bank(optimizer, precision, 3, long=True) for _ in range(2))
    for learner in gated:
        by_row.corrections.zero_row(learner)
    round_by_row(update, by_row, averaging, steps)
    update.correct_all(StackedRows(at_once), averaging, steps, moves=True)
    for ours, expected in zip(values_of(at_once), values_of(by_row), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_learners_whose_rates_alone_differ_step_by_their_own(kind):
    optimizer = kind(learning_rate=(0.02, 0.04, 0.01))
    steps = [Step(0.02, 3), Step(0.02, 3), Step(0.01, 3)]
    by_row, at_once = (random_bank(optimizer, FP32, 3) for _ in range(2))
    reference, update = TorchUpdate(optimizer, Independent()), NativeUpdate(optimizer, Independent(), load())
    for learner, step in enumerate(steps):
        reference.correct(learner, by_row.trained_row(learner), None, step)
    update.correct_all(StackedRows(at_once), None, steps, moves=False)
    torch.testing.assert_close(at_once.weights.storage, by_row.weights.storage, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_native_results_do_not_follow_from_the_number_of_threads(threads, monkeypatch):
    optimizer = SGD(momentum=0.9, weight_decay=0.01)
    monkeypatch.setattr("crossbow_py.engine.update.row_update._VALUES_A_THREAD", 1)
    results = []
    for count in (3, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        update, bank = NativeUpdate(optimizer, SMA(), load()), random_bank(optimizer, FP32, 3, long=True)
        norms = update.gradient_norms(StackedRows(bank))
        update.correct_all(StackedRows(bank), AVERAGING, [Step(0.1, 1)] * 3, moves=True)
        results.append((norms, torch.cat(values_of(bank))))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_native_gradient_norms_are_those_of_all_vectors_together():
    update, bank = NativeUpdate(SGD(), SMA(), load()), random_bank(SGD(), FP32, 3, long=True)
    expected = [torch.cat(bank.trained_row(j).gradients).double().norm().item() for j in range(3)]
    assert update.gradient_norms(StackedRows(bank)) == pytest.approx(expected, rel=1e-12)
    assert [update.gradient_norm(bank.trained_row(j)) for j in range(3)] == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C compiler"),
        ("false", "false failed"),
        ("", "there is no C compiler"),
        ("'", "CC=' is no command (No closing quotation)"),
    ],
)
def test_without_a_working_compiler_updates_run_as_torch_operators_and_say_so(compiler, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler)
    update, message = choose_update(SGD(), SMA(), CPU, torch.float32, cache=tmp_path)
    assert update.NAME == "torch"
    assert reason in message
    assert "install gcc" in message


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled") / "cache"
    load(folder)
    return folder


@pytest.fixture
def quick_compiler(compiled, tmp_path_factory, monkeypatch):
    """The C compiler by its answer to `--version`, which hands out a copy of what it has compiled."""
    (ready,) = compiled.glob("*.so")
    script = tmp_path_factory.mktemp("compiler") / "cc"
    script.write_text(
        f'''#!/bin/sh
        if [ "$1" = --version ]; then exec {os.environ.get("CC", "cc")} --version; fi
        while [ "$1" != -o ]; do shift; done
        exec cp "{ready}" "$2"
        '''
    )
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))


@pytest.mark.slow
def test_cache_that_cannot_be_written_is_done_without(quick_compiler, tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_user_without_a_home_still_has_native_code(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    assert load().crossbow_sum is not None


@pytest.fixture
def library(compiled, quick_compiler, tmp_path):
    """The one library of a cache that is ready."""
    shutil.copytree(compiled, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.so")
    return path


def flipped(content):
    """One bit in the middle, where code is."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "harm",
    thinned([lambda _: b"", lambda _: b"no library", lambda content: content[:5000], flipped], quick=[3], slow=[2]),
)
def test_damaged_library_in_the_cache_is_made_anew(library, harm):
    whole = library.read_bytes()
    library.unlink()  # which is loaded already
    library.write_bytes(harm(whole))
    in_a_process(library.parent)
    assert [path.read_bytes() for path in library.parent.iterdir()] == [whole]


@pytest.mark.parametrize("place", ["link", "pipe", "folder"])
def test_library_that_is_no_file_is_not_loaded(library, tmp_path, place):
    library.rename(tmp_path / "elsewhere.so")
    if place == "link":
        library.symlink_to(tmp_path / "elsewhere.so")
    else:
        (os.mkfifo if place == "pipe" else os.mkdir)(library)
    before = (tmp_path / "elsewhere.so").read_bytes()
    in_a_process(library.parent)
    assert (tmp_path / "elsewhere.so").read_bytes() == before
    assert library.is_dir() or library.lstat().st_size == len(before)


def test_library_without_its_functions_is_made_anew(library, tmp_path):
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 7; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "other.so"), str(source)], check=True)
    content = (tmp_path / "other.so").read_bytes()
    stem = library.stem.rpartition("-")[0]
    other = library.with_name(f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}.so")
    library.unlink()
    other.write_bytes(content)
    other.chmod(0o700)
    in_a_process(library.parent)
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_cache_of_compiled_code_is_the_users_alone(library):
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o022 == 0


def test_library_that_others_may_write_is_made_anew(library):
    library.chmod(0o777)
    in_a_process(library.parent)
    assert library.stat().st_mode & 0o022 == 0


def test_folder_of_compiled_code_that_others_may_write_is_emptied_and_closed(library):
    (library.parent / "update-planted.so").write_bytes(b"theirs")
    library.parent.chmod(0o777)
    in_a_process(library.parent)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@pytest.mark.parametrize("theirs", ["folder", "file"])
def test_compiled_code_of_another_user_is_not_loaded(library, monkeypatch, theirs):
    changed = library.stat().st_mtime_ns
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)  # now they are another's
    if theirs == "file":
        monkeypatch.setattr("crossbow_py.engine.native.library._make_private", lambda cache: None)
    loaded = load(library.parent)
    assert loaded.crossbow_sum is not None
    if theirs == "folder":
        assert Path(loaded._name).parent != library.parent and library.stat().st_mtime_ns == changed
    else:
        assert library.stat().st_mtime_ns != changed


def in_a_process(cache):
    """Load, in a process of its own, as what is damaged may end it."""
    child = os.fork()
    if not child:
        try:
            os._exit(load(cache).crossbow_sum is None)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_library_that_computes_something_else_is_not_used(monkeypatch):
    forget("native updates")  # another test may have found them right
    monkeypatch.setattr(AveragingRule, "corrections", lambda self, out, weights, z, coefficients: None)
    update, message = choose_update(SGD(), SMA(), CPU, torch.float32)
    assert update.NAME == "torch"
    assert "its results differ" in message
    forget("native updates")
