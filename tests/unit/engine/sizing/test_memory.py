"""The memory model on numbers worked out by hand, and its padding against the bank's own buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.averaging import SMA, AveragingRule, Independent, LocalSGD
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32, Precision
from crossbow_py.engine.sizing.memory import (
    Activations,
    HeldBack,
    Job,
    LearnerModel,
    Line,
    ModelSizes,
    Trace,
    activations,
    breakdown,
    learner_bytes,
    model_sizes,
    predicted_bytes,
    upper_envelope,
)
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.outer_step import mean_of_learners
from crossbow_py.train.evaluation.evaluator import Evaluator

# 64 parameters of 4 bytes: a row is 3 + 1 state = 4 times 256 bytes, z and its company 3 times 256.
SIZES = ModelSizes((64,), (), 0, num_states=1, master_bytes=4, compute_bytes=4)
MODEL = LearnerModel(SIZES, Activations((Line(1000, 0), Line(200, 100))), most=1000)
# Each of the 4 + 3 allocations, and that of the buffers, has room for 64 values to align the first: 256 bytes.
PADDING = 8 * 256
FIXED = 3 * 256 + 256 + PADDING  # and the template


def test_activations_from_two_probes_are_the_highest_moment_at_every_batch_size() -> None:
    # Moments 500, 20 + 100 b and 300 + 10 b; the highest of them at 1, 3, 4, 5 and 40 samples:
    small, large = Trace(2, (500, 220, 320)), Trace(10, (500, 1020, 400))
    found = activations(small, large)
    assert [found.at(b) for b in (1, 3, 4, 5, 40)] == [500, 500, 500, 520, 4020]
    assert found.lines == (Line(500, 0), Line(20, 100))
    assert found.per_sample == 100
    assert found.probes == ((2, 500), (10, 1020))


def test_activations_that_grow_faster_than_the_batch_are_not_underestimated_between_probes() -> None:
    held = {b: 7 * b * b + 11 * b for b in range(2, 33)}
    found = activations(Trace(2, (held[2],)), Trace(32, (held[32],)))
    assert all(found.at(b) >= size for b, size in held.items())


@pytest.mark.parametrize(
    ("small", "large", "others", "lines"),
    [
        (Trace(2, (100, 300)), Trace(10, (100, 1100, 50)), {}, (Line(100, 100),)),
        (Trace(2, (500, 220)), Trace(10, (500, 1020)), {"unseen": 7}, (Line(507, 0), Line(27, 100))),
        (Trace(2, (10,)), Trace(3, (15,)), {"also": 100}, (Line(100, 0), Line(0, 5))),
    ],
    ids=["passes that differ: the chord of their peaks", "what probes do not see", "another moment"],
)
def test_activations_of_two_probes(small: Trace, large: Trace, others: dict[str, int], lines: tuple[Line, ...]) -> None:
    assert activations(small, large, **others).lines == lines


def test_upper_envelope_drops_lines_that_are_nowhere_the_highest() -> None:
    below_everywhere, hidden, begins_before_one = Line(0, 1), Line(50, 5), Line(90, 0)
    kept = [Line(100, 0), Line(0, 50)]  # they cross at 2
    assert upper_envelope([below_everywhere, hidden, begins_before_one, *kept]) == tuple(kept)
    assert upper_envelope([Line(100, 0), Line(100, 3)]) == (Line(100, 3),)


def test_predicted_bytes_add_rows_passes_and_what_there_is_once() -> None:
    # Two learners in turn: two rows of 1024 bytes and one pass; 8 samples take 1000, 10 take 200 + 1000.
    assert MODEL.predicted_bytes(8, 2, at_once=1) == FIXED + 2 * 1024 + 1000
    assert MODEL.predicted_bytes(10, 2, at_once=2) == FIXED + 2 * 1024 + 2 * 1200
    # Streamed, of 5 bytes a sample: for two learners there are three rounds of batches, for one four batches.
    streamed = LearnerModel(SIZES, MODEL.activations, staged_sample_bytes=5, fixed_bytes=77)
    assert streamed.predicted_bytes(10, 2, 2) == FIXED + 2 * 1024 + 2 * 1200 + 6 * 10 * 5 + 77
    assert streamed.predicted_bytes(10, 1, 1) == FIXED + 1024 + 1200 + 4 * 10 * 5 + 77


def test_largest_batch_size_is_the_last_that_stays_within_the_limit() -> None:
    needed = FIXED + 1024 + 200 + 100 * 37
    assert MODEL.largest_batch_size(needed, 1, 1) == 37
    assert MODEL.largest_batch_size(needed - 1, 1, 1) == 36
    assert MODEL.largest_batch_size(FIXED + 1024 + 999, 1, 1) == 0
    assert MODEL.largest_batch_size(10**12, 1, 1) == 1000  # no further than was probed


def test_most_learners_counts_passes_only_of_those_that_run_at_once() -> None:
    limit = FIXED + 3 * 1024 + 3 * 1000  # three learners side by side; in turn each one more costs a row alone
    assert MODEL.most_learners(limit, 8, max_learners=8, in_turn=False) == 3
    assert MODEL.most_learners(limit, 8, max_learners=8, in_turn=True) == 4
    assert MODEL.most_learners(limit, 8, max_learners=2, in_turn=False) == 2
    assert MODEL.most_learners(FIXED, 8, max_learners=8, in_turn=False) == 0


def test_table_ends_where_nothing_fits() -> None:
    # K learners: 200 + 100 b each beside their rows, so b = (2000 − 200) / 100 for one and (988 − 200) / 100 for two.
    limit = FIXED + 1024 + 2000
    assert MODEL.table(limit - 1024 + 1024, 5, in_turn=False) == {1: 18}
    assert MODEL.table(FIXED + 2 * 1024 + 2 * 1500, 5, in_turn=False) == {1: 38, 2: 13}
    assert list(MODEL.table(10**9, 5, in_turn=False)) == [1, 2, 3, 4, 5]


def test_breakdown_adds_up_and_leaves_out_what_there_is_none_of() -> None:
    parts = breakdown(MODEL, 10, 3, 3)
    assert sum(parts.values()) == MODEL.predicted_bytes(10, 3, 3)
    assert parts["weights"] == 3 * 256
    assert parts["forward and backward passes"] == 3 * 1200
    assert "data set" not in parts
    assert not any(name.startswith(("velocity", "EMA", "copies of the model")) for name in parts)


def test_breakdown_has_what_an_averaging_rule_keeps_and_the_copies_of_an_evaluation() -> None:
    # 40 values in buffers; passes of 300 bytes, and an evaluation of two models of 4 · (64 + 40).
    sizes = replace(SIZES, buffers=(40,), has_velocity=True, has_ema=True)
    model = LearnerModel(sizes, Activations((Line(300, 0),)))
    parts = breakdown(model, 10, 2, 2)
    assert parts["velocity of z"] == 256
    assert parts["EMA of z and its buffers"] == 416
    assert parts["copies of the model in evaluations, beyond the passes"] == 2 * 416 - 2 * 300
    assert sum(parts.values()) == model.predicted_bytes(10, 2, 2)


def test_held_back_leaves_the_rest() -> None:
    assert HeldBack(100, 0.05, "why").limit(1000) == 850
    assert HeldBack(100, 0.05, "why").limit(90) == 0


@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "one row"])
@pytest.mark.parametrize("order", ["blocks", "rows"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_bank_bytes_are_what_a_bank_allocates(precision: Precision, order: Order, one_row: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 7))
    bank = ReplicaBank(
        model, 3, device=torch.device("cpu"), precision=precision, state_names=("first", "second"), order=order,
        one_row=one_row,
    )  # fmt: skip
    rows = [bank.weights, bank.gradients, bank.corrections, *bank.state.values(), bank.buffers]
    rows += [bank.z, bank.z_prev, bank.total, *([bank.shadow] if precision.has_shadow else [])]
    allocated = sum(one.storage.untyped_storage().nbytes() for one in rows) + bank.counters.nbytes
    sizes = ModelSizes(
        parameters=tuple(block.numel for block in bank.layout.blocks),
        buffers=tuple(block.numel for block in bank.buffer_layout.blocks),
        counter_bytes=8,
        num_states=2,
        master_bytes=4,
        compute_bytes=precision.compute.itemsize,
        order=order,
        one_row=one_row,
    )
    assert sizes.bank_bytes(3) == allocated
    ema = AverageEMA(bank, 1.0)
    more = sum(one.storage.untyped_storage().nbytes() for one in (ema._weights, ema._buffers))
    assert replace(sizes, has_ema=True).bank_bytes(3) == allocated + more
    assert replace(sizes, has_velocity=True).bank_bytes(3) == allocated + bank.z.storage.untyped_storage().nbytes()
    assert sizes.template_bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_learners_without_an_average_model_have_no_corrections() -> None:
    model = nn.Linear(5, 7)
    banks = [
        ReplicaBank(model, 3, device=torch.device("cpu"), precision=FP32, state_names=(), has_corrections=own)
        for own in (True, False)
    ]
    saved = banks[0].corrections.storage.untyped_storage().nbytes()
    sizes = [model_sizes(model, Job(nn.functional.mse_loss, SGD(), rule, FP32, order="rows"))
             for rule in (SMA(), Independent())]  # fmt: skip
    assert banks[1].corrections.storage.is_meta
    assert sizes[0].bank_bytes(3) - sizes[1].bank_bytes(3) == saved
    with pytest.raises((RuntimeError, NotImplementedError)):  # they cannot be read for others by mistake
        torch.add(banks[1].weights.storage, banks[1].corrections.storage)
    banks[1].resize(5)
    assert banks[1].corrections.storage.is_meta
    learner = LearnerModel(sizes[1], MODEL.activations).learner(10)
    assert (learner.corrections, learner.gradients) == (0, 4 * 42)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_base_bytes_are_those_of_a_base_of_whole_numbers_halves_and_floats(precision: Precision) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 11, dtype=torch.bfloat16), nn.LayerNorm(11), nn.Linear(11, 2))
    model[:3].requires_grad_(False)
    model[1].scales = nn.Parameter(torch.ones(13, dtype=torch.int8), requires_grad=False)
    base = ReplicaBank(model, 3, device=torch.device("cpu"), precision=precision, state_names=()).base
    held = {own.data_ptr(): own.nbytes for own in (*base.master(0).values(), *base.row(0).values())}
    assert model_sizes(model, Job(nn.functional.mse_loss, SGD(), SMA(), precision)).base_bytes(3) == sum(held.values())


@pytest.mark.parametrize(
    ("rule", "has_ema"),
    [(SMA(), False), (SMA(average_ema=1.0), True), (LocalSGD(), False)],
    ids=["z", "EMA", "mean of learners"],
)
def test_evaluation_bytes_are_what_an_evaluation_allocates_beside_the_bank_and_the_ema(
    rule: AveragingRule, has_ema: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 7))
    job = Job(nn.functional.cross_entropy, SGD(), rule, FP32)
    bank = ReplicaBank(model, 3, device=torch.device("cpu"), precision=FP32, state_names=())
    ema = AverageEMA(bank, 1.0)
    state = ema.at(bank.central_state(), 10) if has_ema else bank.central_state()
    mean = mean_of_learners(bank, Collective()) if rule.shows_mean else None
    state = state if mean is None else {**state, **mean.shaped()}
    module = Evaluator(model, precision=FP32, loss=job.loss, metrics={}).module(state)
    kept = {rows.storage.untyped_storage()._cdata for rows in (bank.z, bank.buffers, ema._weights, ema._buffers)}
    kept.add(bank.counters.untyped_storage()._cdata)
    storages = {each._cdata: each.nbytes() for each in map(Tensor.untyped_storage, (
        *state.values(), *module.parameters(), *module.buffers()
    ))}  # fmt: skip
    made = sum(size for key, size in storages.items() if key not in kept)
    assert model_sizes(model, job).evaluation_bytes == made


def test_predicted_bytes_are_those_of_an_evaluation_where_passes_hold_less() -> None:
    model = LearnerModel(replace(SIZES, has_ema=True), Activations((Line(256, 100),)))
    fixed = FIXED + 3 * 256  # the EMA, with room to align it and its buffers
    assert model.predicted_bytes(1, 1, 1) == fixed + 1024 + 2 * 256
    assert model.predicted_bytes(3, 1, 1) == fixed + 1024 + 256 + 300
    assert model.predicted_bytes(1, 2, 2) == fixed + 2 * 1024 + 2 * 356


def test_learner_in_bf16_has_a_shadow_and_float32_rows() -> None:
    own = learner_bytes(1000, 30, 2, master_bytes=4, compute_bytes=2, activations=500)
    assert (own.weights, own.gradients, own.corrections, own.state) == (4000, 4000, 4000, 8000)
    assert (own.shadow, own.buffers, own.activations) == (2000, 120, 500)
    assert (own.row, own.whole) == (22_120, 22_620)
    assert learner_bytes(1000, 30, 1, master_bytes=4, compute_bytes=4, activations=0).shadow == 0


def test_prediction_counts_activations_of_learners_that_run_at_once():
    own = learner_bytes(1000, 0, 1, master_bytes=4, compute_bytes=4, activations=500)
    assert predicted_bytes(own, 4, at_once=4, fixed=7) == 7 + 3 * 4000 + 4 * 16_000 + 4 * 500
    assert predicted_bytes(own, 4, at_once=1) == 3 * 4000 + 4 * 16_000 + 500
    with pytest.raises(AssertionError, match="at once"):
        predicted_bytes(own, 4, at_once=5)
