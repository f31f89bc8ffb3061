"""The EMA of z in memory: weights, buffers, and what a checkpoint holds of it."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import FP32, FP64
from tests.support import CPU, linear_model, norm_model


def bank_of(make_model=norm_model, precision=FP64, **options):
    return ReplicaBank(make_model(), 2, device=CPU, precision=precision, state_names=(), **options)


def states(bank, count):
    """Random state dicts of z."""
    torch.manual_seed(0)
    like = bank.central_state()
    return [
        {name: torch.rand_like(v) if v.is_floating_point() else torch.full_like(v, n) for name, v in like.items()}
        for n in range(count)
    ]


@pytest.mark.parametrize("order", ["rows", "blocks"])
def test_young_ema_of_weights_and_running_statistics_weighs_them_by_samples(order):
    bank = bank_of(order=order)
    ema = AverageEMA(bank, horizon=1000.0)
    one, two = states(bank, 2)
    ema.move(one, 10)
    ema.move(two, 40)
    found = ema.at(two, 40)
    assert found.keys() == one.keys()
    for name in one.keys() - {"1.num_batches_tracked", "5.bias"}:
        expected = 0.25**10 * one[name] + (1 - 0.25**10) * two[name]
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)
    assert found["1.num_batches_tracked"] == two["1.num_batches_tracked"]
    assert found["5.bias"] is two["5.bias"]  # frozen


def test_ema_before_it_first_moved_is_z_to_the_bit():
    bank = bank_of(precision=FP32)
    ema = AverageEMA(bank, horizon=1e6)
    (state,) = states(bank, 1)
    for samples in (0, 30):
        assert all(torch.equal(value, state[name]) for name, value in ema.at(state, samples).items())


def test_ema_looked_at_is_what_it_would_move_to_and_does_not_move():
    bank = bank_of(precision=FP32)
    ema = AverageEMA(bank, horizon=25.0)
    one, two = states(bank, 2)
    ema.move(one, 20)
    looked_at = ema.at(two, 30)
    assert all(torch.equal(value, one[name]) for name, value in ema.at(one, 20).items())
    ema.move(two, 30)
    assert ema.samples == 30
    assert all(torch.equal(value, looked_at[name]) for name, value in ema.at(two, 30).items())


def test_ema_of_a_model_without_buffers_moves():
    bank = bank_of(linear_model)
    ema = AverageEMA(bank, horizon=1000.0)
    one, two = states(bank, 2)
    ema.move(one, 10)
    torch.testing.assert_close(ema.at(two, 20)["weight"], torch.lerp(two["weight"], one["weight"], 0.5**10))


def test_ema_restored_goes_on_in_the_same_bits_and_its_checkpoint_is_a_copy():
    bank = bank_of(precision=FP32)
    ema, restored = AverageEMA(bank, 25.0), AverageEMA(bank, 25.0)
    one, two, three = states(bank, 3)
    ema.move(one, 20)
    saved = ema.state_dict()
    ema.move(two, 30)
    assert torch.equal(saved["weights"]["0.weight"], one["0.weight"])
    restored.load_state_dict(saved, 20)
    assert restored.samples == 20
    restored.move(two, 30)
    assert all(torch.equal(value, ema.at(three, 60)[name]) for name, value in restored.at(three, 60).items())


@pytest.mark.parametrize("samples", [-1, 21, 3.0, "many", None])
def test_ema_that_moved_at_no_time_a_run_has_seen_is_refused(samples):
    ema = AverageEMA(bank_of(), 25.0)
    with pytest.raises(ValueError, match="an EMA that moved after .* of 20 samples"):
        ema.load_state_dict({**ema.state_dict(), "samples": samples}, 20)
