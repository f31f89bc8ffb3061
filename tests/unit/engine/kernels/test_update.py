"""The update kernels against the torch operators in float64, and the bytes they move."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from triton.runtime import interpreter

from crossbow_py.averaging import SMA
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.kernels import update as kernels
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from crossbow_py.engine.trust.remember import forget
from crossbow_py.engine.update.kernel_update import KernelUpdate, choose_kernel_update
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.engine.update.row_update import Step, TorchUpdate
from tests.thinned import pairs

CPU = torch.device("cpu")
OPTIMIZERS = [
    SGD(momentum=0.9, weight_decay=1e-2),
    SGD(momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=0.5),
    SGD(momentum=0.0),
    SGD(momentum=(0.5, 0.1, 0.9), weight_decay=(0.1, 0.0, 0.2), decay_norm_and_bias=True),
    AdamW(weight_decay=0.1, beta2=0.9999),
    AdamW(beta1=(0.8, 0.9, 0.0), beta2=0.5, clip_norm=1.0, decay_norm_and_bias=True),
]
LOSSES = [0.5, 1.5, 2.5]


def make_bank(optimizer, precision, num_learners=3, capacity=4):
    """Blocks of 2,077 values (three tiles, rows not aligned), 67, 201 and 3, and one row to spare."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(31, 67), nn.Linear(67, 3))
    bank = ReplicaBank(
        model, num_learners, device=CPU, precision=precision, state_names=optimizer.state_names, capacity=capacity,
        order="blocks",
    )  # fmt: skip
    for rows in (bank.weights, bank.gradients, *bank.state.values(), bank.z, bank.z_prev):
        rows.storage.copy_(torch.rand(rows.storage.shape, dtype=torch.float64) + 0.1)
    return bank


def in_float64(bank, optimizer):
    reference = make_bank(optimizer, FP64)
    for name in ("weights", "gradients", "z", "z_prev"):
        getattr(reference, name).storage.copy_(getattr(bank, name).storage)
    for name, rows in bank.state.items():
        reference.state[name].storage.copy_(rows.storage)
    return reference


def run_kernels(bank, optimizer, averaging, moves=True, losses=LOSSES, count=2.0, rate=0.1):
    k = bank.num_learners
    results = torch.zeros(k + 1, 3, dtype=torch.float64)
    results[:k, 0] = torch.tensor(losses[:k])
    rates, counts = (torch.full((k + 1,), value, dtype=torch.float64) for value in (rate, count))
    update = KernelUpdate(bank, optimizer, moves=moves)
    update.correct(averaging, results=results, loss_column=0, finite_column=2, learning_rates=rates, step_counts=counts)
    return update, results[:k, 2].tolist(), counts[:k].tolist()


def run_reference(bank, optimizer, averaging, count=3, rate=0.1, learners=(0, 1, 2)):
    update = TorchUpdate(optimizer, SMA())
    for learner in learners:
        row = bank.trained_row(learner)
        norm, limit = update.gradient_norm(row), optimizer.clip_norm
        scale = limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
        update.correct(learner, row, averaging, Step(rate, count, scale))
    if averaging is not None:
        update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in learners])
        bank.total.storage.mul_(averaging.share)
        update.move(bank.z.trained(), bank.z_prev.trained(), bank.total.trained(), averaging)


def assert_close(bank, reference, tolerance):
    for name in ("weights", "z", "z_prev", *bank.state):
        ours, theirs = (getattr(b, name, None) or b.state[name] for b in (bank, reference))
        for row in range(1 if name.startswith("z") else bank.num_learners):
            for mine, other in zip(ours.trained(row), theirs.trained(row), strict=True):
                torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance, msg=f"{name}[{row}]")


@pytest.fixture(autouse=True)
def no_memory_of_checks():
    forget("kernels")
    yield
    forget("kernels")


@pytest.mark.parametrize(
    ("optimizer", "averaging", "precision"),
    pairs(
        OPTIMIZERS,
        [LinearRound(1 / 3, 0.9), LinearRound(0.7, share=1 / 3, follows_learners=True), None],
        [FP64, FP32, BF16],
        quick=8,
    ),
)
def test_update_of_three_learners_equals_the_reference_in_float64(optimizer, averaging, precision):
    tolerance = 1e-13 if precision is FP64 else 2e-6
    bank = make_bank(optimizer, precision)
    reference = in_float64(bank, optimizer)
    _, finite, counts = run_kernels(bank, optimizer, averaging)
    run_reference(reference, optimizer, averaging)
    assert (finite, counts) == ([1.0] * 3, [3.0] * 3)
    assert_close(bank, reference, tolerance)
    if precision is BF16:
        for learner in range(3):
            for shadow, weights in zip(bank.shadow.trained(learner), bank.weights.trained(learner), strict=True):
                # The interpreter cuts digits off where GPUs round: one digit of bfloat16.
                torch.testing.assert_close(shadow.float(), weights, rtol=2**-7, atol=0)


@pytest.mark.parametrize("moves", [True, False], ids=["moves", "sums"])
def test_round_that_pulls_alone_leaves_z_and_what_moved_it_last(moves):
    optimizer, last = SGD(), LinearRound(0.3, 0.9)
    bank, pull = make_bank(optimizer, FP64), LinearRound(0.7, share=1 / 3, follows_learners=True, moves_z=False)
    reference = in_float64(bank, optimizer)
    update, _, _ = run_kernels(bank, optimizer, last, moves)
    if not moves:
        update.move(last)
    run_reference(reference, optimizer, last)
    kept = [rows.storage.clone() for rows in (bank.z, bank.z_prev, bank.total)]
    squares = bank.total_squares.clone() if moves else None
    results, counts = torch.zeros(4, 3, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float64)
    results[:3, 0], rates = torch.tensor(LOSSES[:3]), torch.full((4,), 0.1, dtype=torch.float64)
    update.correct(pull, results=results, loss_column=0, finite_column=2, learning_rates=rates, step_counts=counts)
    for learner in range(3):
        row = reference.trained_row(learner)
        TorchUpdate(optimizer, SMA()).correct(learner, row, pull, Step(0.1, 4))
    assert_close(bank, reference, 1e-12)
    assert all(map(torch.equal, kept, [bank.z.storage, bank.z_prev.storage, bank.total.storage]))
    assert squares is None or torch.equal(squares, bank.total_squares)


def test_rows_to_spare_and_padding_are_left_alone():
    optimizer = SGD()
    bank = make_bank(optimizer, FP32)
    before = bank.weights.storage.clone()
    run_kernels(bank, optimizer, LinearRound(0.3, 0.9))
    touched = torch.zeros_like(before, dtype=torch.bool)
    for base, block in zip(bank.weights.offsets, bank.layout.blocks, strict=True):
        touched[base : base + 3 * block.numel] = True
    assert torch.equal(bank.weights.storage[~touched], before[~touched])


@pytest.mark.parametrize("optimizer", [SGD(), AdamW(clip_norm=1.0)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("poison", ["loss", "gradient", "infinite"])
def test_learner_that_is_not_finite_keeps_its_row_to_the_bit_and_adds_nothing(optimizer, poison):
    bank, losses, averaging = make_bank(optimizer, FP32), list(LOSSES), LinearRound(0.3, 0.9)
    if poison == "loss":
        losses[1] = math.nan
    else:
        bank.gradients.trained(1)[2][5] = math.nan if poison == "gradient" else math.inf
    kept = [vector.clone() for rows in (bank.weights, *bank.state.values()) for vector in rows.trained(1)]
    reference = in_float64(bank, optimizer)
    _, finite, counts = run_kernels(bank, optimizer, averaging, losses=losses)
    run_reference(reference, optimizer, averaging, learners=(0, 2))
    assert (finite, counts) == ([1.0, 0.0, 1.0], [3.0, 2.0, 3.0])
    now = [vector for rows in (bank.weights, *bank.state.values()) for vector in rows.trained(1)]
    assert all(torch.equal(old, new) for old, new in zip(kept, now, strict=True))
    assert_close(bank, reference, 2e-6)


def test_sum_that_others_reduce_first_then_moves_z_as_the_one_pass_does():
    optimizer, averaging = SGD(), LinearRound(0.3, 0.9)
    apart, together = (make_bank(optimizer, FP64) for _ in range(2))
    update, _, _ = run_kernels(apart, optimizer, averaging, moves=False)
    update.move(averaging)
    run_kernels(together, optimizer, averaging)
    for name in ("z", "z_prev", "weights"):
        for mine, other in zip(getattr(apart, name).trained(), getattr(together, name).trained(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-15, atol=0)
    assert together.correction_norm() == pytest.approx(apart.correction_norm(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.9, 1 / 3, 0.0])
def test_move_of_z_equals_the_rules_to_the_bit(momentum, dtype):
    """In the interpreter, which fuses nothing; compiled, see tests/integration/test_compile_kernels.py."""
    torch.manual_seed(4)
    z, z_prev, total = (torch.randn(3000, dtype=dtype) for _ in range(3))
    expected, expected_prev = z.clone(), z_prev.clone()
    kernels.move(z, z_prev, total, momentum)
    SMA().average([expected], [expected_prev], [total], LinearRound(0.3, momentum))
    assert torch.equal(z, expected)
    assert torch.equal(z_prev, expected_prev)


def test_update_is_three_launches_whatever_the_number_of_learners():
    for num_learners in (1, 3):
        bank = make_bank(SGD(), FP32, num_learners)
        with recorded() as launches:
            run_kernels(bank, SGD(), LinearRound(0.3, 0.9))
        assert [launch.kernel for launch in launches] == ["_squares", "_prepare", "_update"]


@contextlib.contextmanager
def counted_traffic():
    """Bytes in global memory by kernel: all, and those of single values (table entries, coefficients)."""
    total, entries, builder, names = Counter(), Counter(), interpreter.interpreter_builder, []
    kept = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}

    def count(pointers, mask):
        values = int(np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape)))
        size = values * pointers.get_element_ty().primitive_bitwidth // 8
        total[names[-1].kernel] += size
        entries[names[-1].kernel] += size if pointers.data.size == 1 else 0

    def load(pointers, mask, *rest, **named):
        count(pointers, mask)
        return kept["create_masked_load"](pointers, mask, *rest, **named)

    def store(pointers, value, mask, *rest, **named):
        count(pointers, mask)
        return kept["create_masked_store"](pointers, value, mask, *rest, **named)

    builder.create_masked_load, builder.create_masked_store = load, store
    try:
        with recorded() as names:
            yield total, entries
    finally:
        for name in kept:
            delattr(builder, name)


@pytest.mark.parametrize("num_learners", [1, 3])
def test_update_moves_no_more_bytes_than_every_value_read_and_written_once(num_learners):
    """Rows `w g u` are read and `w u` written in float32, the shadow written in bfloat16: 22 bytes; z takes 16."""
    bank = make_bank(SGD(weight_decay=1e-2), BF16, num_learners)
    with counted_traffic() as (total, entries):
        run_kernels(bank, SGD(weight_decay=1e-2), LinearRound(0.3, 0.9))
    values = sum(block.numel for block in bank.layout.blocks)
    # Without tiles' places and learners' coefficients, 8 bytes or less each.
    assert 0 < total["_update"] - entries["_update"] <= (22 * num_learners + 16) * values
    assert total["_squares"] - entries["_squares"] == 4 * num_learners * values


def test_choice_takes_the_kernels_after_they_agreed_with_the_reference():
    bank = make_bank(SGD(), FP32)
    update, note = choose_kernel_update(bank, SGD(), SMA(), moves=True)
    assert isinstance(update, KernelUpdate)
    assert note is None


def test_choice_without_triton_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr("crossbow_py.engine.update.kernel_update.unavailable", lambda device: "Triton is not installed")
    update, note = choose_kernel_update(make_bank(SGD(), FP32), SGD(), SMA(), moves=True)
    assert update is None
    assert note == "Kernels for updates are not used: Triton is not installed."


def test_choice_of_kernels_that_give_other_numbers_falls_back(monkeypatch):
    good = kernels.update
    monkeypatch.setattr(kernels, "update", lambda *a, correction, **b: good(*a, correction=0.31, **b))
    update, note = choose_kernel_update(make_bank(SGD(), FP32), SGD(), SMA(), moves=True)
    assert update is None
    assert note is not None
    assert "differ from those of the torch operators" in note
