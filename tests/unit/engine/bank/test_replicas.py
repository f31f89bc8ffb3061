"""The bank: modules on rows, new learners, growing, shrinking, restarting, saving."""

from __future__ import annotations

import copy

import pytest
import torch

from crossbow_py.engine.bank import layout, replicas
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from tests.support import CPU, linear_model, norm_model


def make_bank(make_model=norm_model, num_learners=3, precision=FP32, **options):
    return ReplicaBank(
        make_model(), num_learners, device=CPU, precision=precision, state_names=("momentum",), **options
    )


def randomize(bank):
    for rows in (bank.weights, bank.z, bank.z_prev, *bank.state.values(), bank.buffers):
        rows.storage.copy_(torch.rand_like(rows.storage))


def test_bank_gradients_of_one_row_equal_the_plain_modules_with_missing_ones_zero():
    bank, model, inputs = make_bank(precision=FP64), norm_model().double(), torch.randn(4, 3, 5, 5).double()
    bank.gradients.storage.fill_(9.0)
    loss = bank.module(1)(inputs)[:, 0].square().sum()
    used = torch.autograd.grad(loss, bank.trained_parameters(1), allow_unused=True)
    bank.store_gradients(1, (None, *used[1:]))
    model.train()(inputs)[:, 0].square().sum().backward()
    shaped = bank.gradients.shaped(1)
    assert shaped["0.weight"].abs().sum() == 0
    torch.testing.assert_close(shaped["5.weight"], model[5].weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shaped["1.bias"], model[1].bias.grad, rtol=1e-12, atol=1e-12)


def test_bank_central_variance_has_the_between_learner_term():
    bank = make_bank(num_learners=2)
    for learner, (mean, variance) in enumerate([(1.0, 2.0), (3.0, 4.0)]):
        bank.buffers.shaped(learner)["1.running_mean"].fill_(mean)
        bank.buffers.shaped(learner)["1.running_var"].fill_(variance)
    # mean 2, variance (2 + 4) / 2 + ((1 − 2)² + (3 − 2)²) / 2 = 4
    assert bank.central_buffers()["1.running_mean"].unique().tolist() == [2.0]
    assert bank.central_buffers()["1.running_var"].unique().tolist() == [4.0]


@pytest.mark.parametrize("capacity", [3, 8])
def test_bank_grown_keeps_live_rows_and_starts_new_ones_from_z(capacity):
    bank = make_bank(capacity=capacity)
    randomize(bank)
    before = [copy.deepcopy(bank.learner_state(learner)) for learner in range(3)]
    moved = bank.weights.storage.data_ptr()
    bank.resize(5)
    assert (bank.weights.storage.data_ptr() == moved) == (capacity == 8)
    for learner in range(3):
        assert all(torch.equal(value, before[learner][name]) for name, value in bank.learner_state(learner).items())
    for learner in (3, 4):
        assert torch.equal(bank.weights.shaped(learner)["0.weight"], bank.z.shaped()["0.weight"])
        assert all(view.abs().sum() == 0 for view in bank.state["momentum"].flat(learner))
    assert bank.stacked()["5.weight"].shape == (5, 3, 8)


@pytest.mark.parametrize("last", range(6))  # weights, gradients, corrections, momentum, buffers, shadow
def test_bank_that_memory_does_not_let_grow_is_as_it_was(last, monkeypatch):
    bank = make_bank(num_learners=2, precision=BF16)
    randomize(bank)
    before, storage, count = bank.state_dict(), bank.weights.storage, 0
    allocate = replicas.Rows.__init__

    def allocate_until(self, *arguments):
        nonlocal count
        if count == last:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        count += 1
        allocate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(replicas.Rows, "__init__", allocate_until)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            bank.resize(4)
    assert (bank.num_learners, bank.capacity, bank.weights.storage is storage) == (2, 2, True)
    same = [torch.equal(value, before["weights"][name]) for name, value in bank.state_dict()["weights"].items()]
    assert all(same)
    bank.shadow.flat(1)[0].fill_(3.0)
    assert bank.module(1)[0].weight.unique().tolist() == [3.0]  # modules and rows are still the same memory
    bank.resize(4)
    assert bank.num_learners == 4


def test_bank_trimmed_gives_back_the_rows_of_learners_that_are_gone(monkeypatch):
    bank = make_bank(num_learners=5)
    randomize(bank)
    bank.resize(2)
    before = bank.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(bank, "_allocate", lambda _: (_ for _ in ()).throw(MemoryError()))
        bank.trim()
    assert bank.capacity == 5
    bank.trim()
    assert (bank.capacity, bank.weights.num_rows) == (2, 2)
    for name, value in bank.state_dict()["state"]["momentum"].items():
        assert torch.equal(value, before["state"]["momentum"][name])


def test_bank_grown_from_one_takes_z_from_the_learner():
    bank = make_bank(num_learners=1)
    bank.weights.flat(0)[0].fill_(5.0)
    bank.resize(2)
    assert bank.z.flat()[0].unique().tolist() == bank.z_prev.flat()[0].unique().tolist() == [5.0]
    assert bank.weights.flat(1)[0].unique().tolist() == [5.0]


def test_bank_shrunk_to_one_leaves_the_average_model():
    bank = make_bank()
    randomize(bank)
    bank.resize(1)
    assert torch.equal(bank.weights.shaped(0)["5.weight"], bank.z.shaped()["5.weight"])
    assert torch.equal(bank.central_state()["5.weight"], bank.z.shaped()["5.weight"])


@pytest.mark.parametrize(
    ("momentum", "expected"), [("reset", [0.0, 0.0]), ("keep", [1.0, 3.0]), ("average", [2.0, 2.0])]
)
def test_bank_restart_copies_z_and_treats_momentum_as_told(momentum, expected):
    bank = make_bank(num_learners=2)
    randomize(bank)
    for learner, value in enumerate((1.0, 3.0)):
        for view in bank.state["momentum"].flat(learner):
            view.fill_(value)
    bank.restart(momentum)
    for learner in range(2):
        assert torch.equal(bank.weights.shaped(learner)["0.weight"], bank.z.shaped()["0.weight"])
        assert bank.state["momentum"].flat(learner)[0].unique().tolist() == [expected[learner]]
    assert all(map(torch.equal, bank.z.flat(), bank.z_prev.flat()))


def test_bank_reseed_touches_one_row_and_takes_statistics_from_the_healthy():
    bank = make_bank()
    randomize(bank)
    bank.buffers.shaped(1)["1.running_mean"].fill_(float("nan"))
    others = [copy.deepcopy(bank.learner_state(learner)) for learner in (0, 2)]
    bank.reseed([1], bank.central_buffers([0, 2]))
    for learner, before in zip((0, 2), others, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in bank.learner_state(learner).items())
    expected = (others[0]["1.running_mean"] + others[1]["1.running_mean"]) / 2
    assert torch.equal(bank.buffers.shaped(1)["1.running_mean"], expected)
    assert torch.equal(bank.weights.shaped(1)["0.weight"], bank.z.shaped()["0.weight"])


def test_bank_state_survives_a_round_trip_into_another_capacity():
    bank, other = make_bank(), make_bank(capacity=6)
    randomize(bank)
    bank.step_counts[1] = 4
    other.load_state_dict(bank.state_dict())
    assert torch.equal(other.stacked()["0.weight"], bank.stacked()["0.weight"])
    assert all(map(torch.equal, other.z_prev.flat(), bank.z_prev.flat()))
    assert other.step_counts[:3] == [0, 4, 0]
    assert torch.equal(other.module(2)[1].running_var, bank.module(2)[1].running_var)


def test_bank_in_bf16_runs_on_a_shadow_and_keeps_batch_norm_in_float32():
    bank = make_bank(precision=BF16)
    module = bank.module(0)
    assert (module[0].weight.dtype, module[1].weight.dtype) == (torch.bfloat16, torch.float32)
    bank.weights.flat(0)[0].fill_(1 + 2**-9)  # half a bf16 step above 1: rounds to even
    bank.refresh_shadow(0)
    assert module[0].weight.unique().tolist() == [1.0]
    assert bank.central_state()["0.weight"].dtype == torch.float32


def test_bank_that_shrank_to_one_learner_grows_again_with_z_at_rest():
    bank = make_bank(num_learners=2)
    bank.resize(1)
    torch._foreach_add_(bank.weights.trained(0), 1.0)  # plain SGD meanwhile
    bank.resize(2)
    assert torch.equal(bank.z.storage, bank.z_prev.storage)


def test_velocity_of_z_goes_on_while_there_is_one_learner():
    bank = make_bank(num_learners=2, has_velocity=True)
    torch._foreach_add_(bank.velocity.flat(0), 3.0)
    before = bank.z.storage.clone()
    bank.resize(1)
    torch._foreach_add_(bank.weights.trained(0), 1.0)  # on the way to its next outer step
    bank.adopt_learner()
    bank.resize(2)
    assert torch.equal(torch.cat(bank.velocity.flat(0)), torch.full_like(torch.cat(bank.velocity.flat(0)), 3.0))
    assert torch.equal(bank.z.storage, before)


@pytest.mark.parametrize("precision", [FP32, FP64], ids=["fp32", "fp64"])
def test_checksum_of_z_changes_with_any_bit_and_with_the_order_of_values(precision):
    bank = make_bank(linear_model, 1, precision)
    integer = torch.int32 if precision is FP32 else torch.int64
    bits, whole = bank.z.storage.view(integer), layout.checksum(bank.z.storage)
    num_bits = torch.iinfo(integer).bits
    for place in range(0, len(bits), max(1, len(bits) // 8)):
        for bit in range(num_bits):
            mask = (1 << bit) if bit < num_bits - 1 else torch.iinfo(integer).min
            bits[place] ^= mask
            assert layout.checksum(bank.z.storage) != whole, (place, bit)
            bits[place] ^= mask
    assert layout.checksum(bank.z.storage) == whole
    z = bank.z.flat()[0]
    for other in range(1, len(z)):  # two values change places
        first, second = z[0].item(), z[other].item()
        z[0], z[other] = second, first
        assert layout.checksum(bank.z.storage) != whole, other
        z[0], z[other] = first, second


def test_checksum_is_the_same_in_whatever_pieces_it_is_taken(monkeypatch):
    values = torch.randn(1000)
    whole = layout.checksum(values)
    monkeypatch.setattr(layout, "_CHECKED_AT_ONCE", 64)
    assert layout.checksum(values) == whole
    assert 0 <= whole < 2**52
    assert float(whole) == whole


def test_checksum_tells_zeros_apart_and_counts_every_nan_alike():
    zeros = torch.zeros(4)
    assert layout.checksum(zeros) != layout.checksum(-zeros)
    broken = torch.tensor([1.0, torch.nan])
    assert layout.checksum(broken) == layout.checksum(broken.clone())
