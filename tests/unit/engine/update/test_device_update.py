"""The update without a word from the host against the reference, which asks it: numbers, gates, clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.layout import TrainedRow
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP64
from crossbow_py.engine.update.device_update import AllLearners, DeviceUpdate, OneLearner, keep_bits, select_bits
from crossbow_py.engine.update.optimizers import SGD, AdamW, Optimizer
from crossbow_py.engine.update.row_update import Step, TorchUpdate
from tests.recording_streams import OnlyLaunches

CPU = torch.device("cpu")
LENGTHS = (300, 37, 1)
AVERAGING = LinearRound(correction=0.3, momentum=0.9)
FOLLOWS = LinearRound(correction=0.7, share=1 / 3, follows_learners=True)
OPTIMIZERS = [
    SGD(momentum=0.0),
    SGD(momentum=0.9),
    SGD(momentum=0.9, weight_decay=0.01),
    SGD(momentum=(0.5, 0.9), weight_decay=(0.02, 0.01), nesterov=True, decay_norm_and_bias=True),
    SGD(momentum=0.9, clip_norm=0.5),
    SGD(momentum=0.9, clip_norm=1e9),
    AdamW(),
    AdamW(beta1=0.3, weight_decay=0.0, clip_norm=0.5),
    AdamW(beta2=(0.9, 0.99), weight_decay=0.1, decay_norm_and_bias=True),
]


def random_row(optimizer, *, shadow=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def vectors():
        return [torch.randn(length, generator=generator, dtype=dtype) for length in LENGTHS]

    weights, gradients, corrections, z = (vectors() for _ in range(4))
    state = {name: [part.abs() for part in vectors()] for name in optimizer.state_names}
    low = [part.to(torch.bfloat16) for part in weights] if shadow else None
    return TrainedRow(weights, gradients, corrections, state, z, low, num_decayed=2)


def flat(row):
    """Everything a correction writes, bit for bit comparable."""
    vectors = [*row.weights, *row.corrections, *(part for parts in row.state.values() for part in parts)]
    return torch.cat([*vectors, *(part.to(row.weights[0].dtype) for part in row.shadow or [])])


def device_step(update, row, averaging, *, loss=1.0, learning_rate=0.1, steps=0):
    """One correction; returns (finite, steps afterwards)."""
    values = [torch.tensor(float(value), dtype=torch.float64) for value in (loss, learning_rate, steps, -1)]
    loss, rate, count, finite = values
    update.correct(OneLearner(1, row), averaging, loss=loss, learning_rate=rate, step_count=count, finite=finite)
    return values[3].item(), values[2].item()


def reference_step(optimizer, row, averaging, learning_rate, step_count, learner=1):
    """As `RoundTasks.correct` does for a finite learner."""
    update = TorchUpdate(optimizer, SMA())
    scale = optimizer.gradient_scale(update.gradient_norm(row))
    update.correct(learner, row, averaging, Step(learning_rate, step_count, scale))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("averaging", [AVERAGING, FOLLOWS, None])
def test_device_correction_over_several_steps_equals_the_reference(optimizer, averaging):
    ours, reference = random_row(optimizer), random_row(optimizer)
    update, steps = DeviceUpdate(optimizer, SMA(), CPU), 0
    for step, rate in ((1, 0.1), (2, 0.03), (3, 0.3)):
        for row in (ours, reference):
            for part in row.gradients:
                part.copy_(torch.randn(len(part), generator=torch.Generator().manual_seed(step)))
        finite, steps = device_step(update, ours, averaging, learning_rate=rate, steps=steps)
        reference_step(optimizer, reference, averaging, rate, step)
        assert (finite, steps) == (1, step)
    torch.testing.assert_close(flat(ours), flat(reference), rtol=1e-12, atol=1e-12)
    assert not torch.equal(flat(ours), flat(random_row(optimizer)))


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=0.01), AdamW()], ids=repr)
def test_device_correction_in_float32_with_a_shadow_equals_the_reference(optimizer):
    ours, reference = (random_row(optimizer, shadow=True, dtype=torch.float32) for _ in range(2))
    # At the first step 1 − β2^t has lost half its digits in float32.
    device_step(DeviceUpdate(optimizer, SMA(), CPU), ours, AVERAGING)
    reference_step(optimizer, reference, AVERAGING, 0.1, 1)
    count = flat(ours).numel() - sum(LENGTHS)
    torch.testing.assert_close(flat(ours)[:count], flat(reference)[:count], rtol=2e-6, atol=2e-6)
    assert all(torch.equal(low, high.bfloat16()) for low, high in zip(ours.shadow, ours.weights, strict=True))


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=0.01), SGD(nesterov=True, clip_norm=0.1), AdamW()], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_learner_that_is_not_finite_keeps_weights_and_state_to_the_bit_and_corrects_nothing(
    optimizer, bad, where, dtype
):
    row = random_row(optimizer, shadow=True, dtype=dtype)
    row.weights[0][:3] = torch.tensor([-0.0, math.inf, math.nan])  # nothing is worked out of these
    next(iter(row.state.values()))[0][:2] = torch.tensor([-0.0, math.inf])
    for low, high in zip(row.shadow, row.weights, strict=True):
        low.copy_(high)
    before = [bits(part) for part in kept_parts(row)]
    if where == "gradient":
        row.gradients[1][36] = bad
    update = DeviceUpdate(optimizer, SMA(), CPU)
    finite, steps = device_step(update, row, AVERAGING, loss=bad if where == "loss" else 1.0)
    assert (finite, steps) == (0, 0)
    assert all(torch.equal(bits(part), old) for part, old in zip(kept_parts(row), before, strict=True))
    assert all(torch.equal(bits(part), torch.zeros_like(bits(part))) for part in row.corrections)


def kept_parts(row):
    return [*row.weights, *row.shadow, *(part for parts in row.state.values() for part in parts)]


def bits(part):
    return part.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]).clone()


@pytest.mark.parametrize(("norm", "scale"), [(5.0, 2 / (5 + 1e-6)), (2.0, 1.0), (2 - 1e-7, 1.0), (1.0, 1.0)])
def test_clipping_scales_only_a_norm_above_the_limit(norm, scale):
    gradient, zero = torch.tensor([norm], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    row = TrainedRow([zero.clone()], [gradient.clone()], [zero.clone()], {}, [zero], None, num_decayed=1)
    device_step(DeviceUpdate(SGD(momentum=0.0, clip_norm=2.0), SMA(), CPU), row, None, learning_rate=1.0)
    torch.testing.assert_close(row.weights[0], -gradient * scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=0.01, nesterov=True, clip_norm=1.0), AdamW(clip_norm=1.0)])
def test_correction_asks_the_host_for_no_value(optimizer):
    # Tensors on `meta` have no values: whatever read one would raise.
    row = random_row(optimizer)
    meta = {name: [part.to("meta") for part in parts] for name, parts in row.state.items()}
    lists = [[part.to("meta") for part in parts] for parts in (row.weights, row.gradients, row.corrections, row.z)]
    values = [torch.zeros((), dtype=torch.float64, device="meta") for _ in range(4)]
    DeviceUpdate(optimizer, SMA(), torch.device("meta")).correct(
        OneLearner(0, TrainedRow(*lists[:3], meta, lists[3], None, num_decayed=2)), AVERAGING,
        loss=values[0], learning_rate=values[1], step_count=values[2], finite=values[3],
    )  # fmt: skip


def test_selection_by_bits_takes_one_or_the_other_whatever_they_hold():
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -3.4e38, 7.0])
    for opened in (True, False):
        old, new, gate = special.clone(), special.flip(0).clone(), torch.tensor(opened)
        select_bits([old], [new], gate)
        assert torch.equal(bits(old), bits(special.flip(0) if opened else special))
        kept = special.clone()
        keep_bits([kept], gate)
        assert torch.equal(bits(kept), bits(special) if opened else torch.zeros(8, dtype=torch.int32))


def test_optimizer_it_does_not_know_is_refused_with_the_remedy():
    class Odd(SGD):
        NAME = "odd"

    odd = Odd()
    assert isinstance(odd, Optimizer)
    with pytest.raises(UserError, match=r"sgd, adamw, muon, got optimizer=odd; set executor=fused or"):
        DeviceUpdate(odd, SMA(), CPU)


class Nets(nn.Module):
    """Parameters of all kinds: with and without weight decay, frozen, and lengths that need padding."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(5, 3)
        self.head.bias.requires_grad_(False)


def random_bank(optimizer, *, num_learners, capacity=None, precision=FP64):
    """Every row full of random numbers, those not in use too."""
    torch.manual_seed(0)
    bank = ReplicaBank(
        Nets(), capacity or num_learners, device=CPU, precision=precision, state_names=optimizer.state_names,
        order="blocks",
    )
    bank.num_learners = num_learners
    generator = torch.Generator().manual_seed(1)
    for rows in (bank.weights, bank.z, bank.z_prev, bank.corrections, *bank.state.values()):
        for row in range(rows.num_rows):
            for part in rows.flat(row):
                part.copy_(torch.randn(part.shape, generator=generator).abs())
    for row in range(bank.capacity):
        bank.refresh_shadow(row)
    return bank


def fill_gradients(bank, seed):
    generator = torch.Generator().manual_seed(seed)
    for row in range(bank.capacity):
        for part in bank.gradients.trained(row):
            part.copy_(torch.randn(part.shape, generator=generator))


def everything(bank, learners):
    """Rows of some learners, z and the sum, bit for bit comparable."""
    rows = [bank.weights, bank.corrections, *bank.state.values()]
    parts = [part.flatten() for own in rows for learner in learners for part in own.flat(learner)]
    return torch.cat([*parts, *bank.z.flat(), *bank.z_prev.flat()])


class Stacked:
    """The update of all learners at once, and the values it keeps on the device."""

    def __init__(self, bank, optimizer, steps=0):
        self.bank, self.update = bank, TorchUpdate(optimizer, SMA())
        self.device_update = DeviceUpdate(optimizer, SMA(), CPU)
        self.rows, entries = AllLearners(bank, optimizer), bank.num_learners + 1
        self.loss, self.rates, self.counts, self.finite = (torch.zeros(entries).double() for _ in range(4))
        self.counts.fill_(steps)

    def step(self, averaging, rates):
        self.rates[: len(rates)] = torch.tensor(rates, dtype=torch.float64)
        with OnlyLaunches():
            self.device_update.correct(
                self.rows, averaging, loss=self.loss, learning_rate=self.rates, step_count=self.counts,
                finite=self.finite,
            )  # fmt: skip
        if averaging:
            move(self.bank, self.update, averaging)


def move(bank, update, averaging):
    update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
    update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], averaging)


STACKED = [
    *(optimizer for optimizer in OPTIMIZERS if not any(isinstance(v, tuple) for v in vars(optimizer).values())),
    SGD(momentum=(0.5, 0.9, 0.7), weight_decay=(0.02, 0.01, 0.0), nesterov=True, decay_norm_and_bias=True),
    SGD(momentum=(0.5, 0.9, 0.7), clip_norm=2.0),
    AdamW(beta1=(0.8, 0.9, 0.5), beta2=(0.9, 0.99, 0.95), weight_decay=(0.1, 0.0, 0.2), clip_norm=5.0),
]


@pytest.mark.parametrize("optimizer", STACKED, ids=repr)
@pytest.mark.parametrize("averaging", [AVERAGING, FOLLOWS, None])
@pytest.mark.parametrize("capacity", [3, 5])
def test_correction_of_all_learners_at_once_equals_the_reference_one_by_one(optimizer, averaging, capacity):
    ours, reference = (random_bank(optimizer, num_learners=3, capacity=capacity) for _ in range(2))
    stacked, update = Stacked(ours, optimizer), TorchUpdate(optimizer, SMA())
    before = everything(ours, range(capacity))
    for step, rates in ((1, [0.1, 0.1, 0.1]), (2, [0.03, 0.2, 0.1]), (3, [0.3, 0.3, 0.3])):
        fill_gradients(ours, step)
        fill_gradients(reference, step)
        stacked.step(averaging, rates)
        for learner in range(3):
            reference_step(optimizer, reference.trained_row(learner), averaging, rates[learner], step, learner)
        if averaging:
            move(reference, update, averaging)
        assert (stacked.finite.tolist(), stacked.counts.tolist()) == ([1, 1, 1, 0], [step] * 3 + [0])
    found, expected = (everything(bank, range(3)) for bank in (ours, reference))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, before[: len(found)])


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=0.01), SGD(nesterov=True, clip_norm=0.1), AdamW()], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_gated_learner_of_all_and_rows_not_in_use_stay_to_the_bit(optimizer, bad, where):
    bank = random_bank(optimizer, num_learners=3, capacity=4, precision=BF16)
    bank.weights.flat(1)[0][:3] = torch.tensor([-0.0, math.inf, math.nan])
    bank.refresh_shadow(1)
    stacked = Stacked(bank, optimizer, steps=7)
    fill_gradients(bank, 1)
    kept = [*bank.weights.flat(1), *bank.weights.flat(3), *bank.shadow.flat(1), *bank.shadow.flat(3)]
    kept += [part for rows in bank.state.values() for row in (1, 3) for part in rows.flat(row)]
    before = [bits(part) for part in kept]
    others = bank.weights.flat(0)[0].clone()
    if where == "loss":
        stacked.loss[1] = bad
    else:
        bank.gradients.trained(1)[-1][-1] = bad
    bank.gradients.trained(3)[0][0] = math.nan
    stacked.step(AVERAGING, [0.1, 0.1, 0.1])
    assert (stacked.finite.tolist(), stacked.counts.tolist()[:3]) == ([1, 0, 1, 0], [8, 7, 8])
    assert all(torch.equal(bits(part), old) for part, old in zip(kept, before, strict=True))
    assert not any(part.count_nonzero() for part in bank.corrections.trained(1))
    assert not torch.equal(bank.weights.flat(0)[0], others)
    assert torch.equal(bank.shadow.storage.nan_to_num(), bank.weights.storage.bfloat16().nan_to_num())
    assert bank.z.storage.isfinite().all()


def test_padding_between_rows_stays_zero():
    optimizer = SGD(weight_decay=0.1)
    bank = random_bank(optimizer, num_learners=3)
    stacked = Stacked(bank, optimizer)
    fill_gradients(bank, 1)
    bank.weights.storage[:] = 1.0  # padding too, so that a value written there is seen
    stacked.step(AVERAGING, [0.1, 0.1, 0.1])
    seen = torch.ones_like(bank.weights.storage, dtype=torch.bool)
    start = bank.weights.storage.storage_offset()
    for row in range(3):
        for part in bank.weights.flat(row):
            seen[part.storage_offset() - start : part.storage_offset() - start + len(part)] = False
    assert seen.any()
    assert torch.equal(bank.weights.storage[seen], torch.ones(int(seen.sum()), dtype=torch.float64))
