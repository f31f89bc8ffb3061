"""Several banks around one z give what one bank of all learners gives."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import FP64
from tests.support import CPU, linear_model, norm_model
from tests.thread_ranks import on_threads


def make_bank(num_learners=2, num_devices=1, device_index=0, precision=FP64, make_model=norm_model):
    return ReplicaBank(
        make_model(), num_learners, device=CPU, precision=precision, state_names=("momentum",),
        num_devices=num_devices, device_index=device_index,
    )  # fmt: skip


def banks_of(sizes):
    """One bank of all learners with random buffers and state, and banks that have its rows between them."""
    whole, parts, first = make_bank(sum(sizes)), [], 0
    for rows in (whole.weights, whole.z, whole.z_prev, *whole.state.values(), whole.buffers):
        rows.storage.copy_(torch.randn_like(rows.storage))
    saved = whole.state_dict()
    for size in sizes:
        bank = make_bank(size, num_devices=len(sizes))
        bank.load_central(saved)
        for row in range(size):
            bank.load_row(row, saved, first + row)
        parts.append(bank)
        first += size
    return whole, parts


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [((2, 2), []), ((1, 1), []), ((3, 3, 3), []), ((1, 1, 1, 1), []), ((2, 2), [2]), ((2, 2), [0, 1])],
    ids=str,
)
def test_central_buffers_of_several_banks_equal_those_of_one_bank_of_the_learners_that_are_left(sizes, lost):
    whole, parts = banks_of(sizes)
    k = sizes[0]
    for learner in lost:
        for view in parts[learner // k].buffers.flat(learner % k):
            view.fill_(torch.nan)
    kept = [[row for row in range(k) if rank * k + row not in lost] for rank in range(len(sizes))]
    found = on_threads(lambda ranks: parts[ranks.rank].central_buffers(kept[ranks.rank], ranks.add), len(sizes))
    expected = whole.central_buffers([learner for learner in range(sum(sizes)) if learner not in lost])
    for buffers in found:
        assert buffers.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(buffers[name], expected[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(buffers[name], found[0][name])


def test_central_buffers_of_a_model_without_any_are_none():
    banks = [make_bank(1, num_devices=2, make_model=linear_model) for _ in range(2)]
    assert on_threads(lambda ranks: banks[ranks.rank].central_buffers(add=ranks.add), 2) == [{}, {}]


@pytest.mark.parametrize("momentum", ["reset", "keep", "average"])
def test_restart_of_several_banks_equals_that_of_one_bank_of_all_learners(momentum):
    whole, parts = banks_of((2, 2))
    whole.restart(momentum)
    on_threads(lambda ranks: parts[ranks.rank].restart(momentum, ranks.add), 2)
    expected = whole.state_dict()
    for first, bank in ((0, parts[0]), (2, parts[1])):
        found = bank.state_dict()
        for name, values in expected["weights"].items():
            assert torch.equal(found["weights"][name], values[first : first + 2])
        for name, values in expected["state"]["momentum"].items():
            torch.testing.assert_close(
                found["state"]["momentum"][name], values[first : first + 2], rtol=1e-12, atol=1e-12
            )


def test_bank_among_several_counts_learners_over_all_devices():
    bank = make_bank(2, num_devices=3, device_index=2)
    assert (bank.total_learners, bank.first_learner, bank.is_single) == (6, 4, False)
    bank.resize(4)
    assert (bank.total_learners, bank.first_learner) == (12, 8)


@pytest.mark.parametrize(("num_learners", "num_devices", "single"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_bank_is_single_with_one_learner_on_one_device_alone(num_learners, num_devices, single):
    assert make_bank(num_learners, num_devices=num_devices).is_single is single


def test_bank_with_one_learner_among_several_devices_keeps_z_when_it_grows_and_shrinks():
    bank = make_bank(1, num_devices=2)
    bank.weights.storage.fill_(1.0)
    bank.z.storage.fill_(2.0)
    bank.z_prev.storage.fill_(3.0)
    bank.resize(2)
    assert (bank.z.storage.unique().tolist(), bank.z_prev.storage.unique().tolist()) == ([2.0], [3.0])
    assert bank.weights.shaped(1)["5.weight"].unique().tolist() == [2.0]
    bank.resize(1)
    assert bank.weights.shaped(0)["5.weight"].unique().tolist() == [1.0]


def test_load_row_takes_another_learners_weights_state_buffers_and_counters():
    whole, _ = banks_of((3,))
    whole.step_counts[2] = 7
    whole.module(2)[1].num_batches_tracked.fill_(9)
    saved, bank = whole.state_dict(), make_bank(2, num_devices=2)
    before = {name: value.clone() for name, value in bank.learner_state(1).items()}
    bank.load_row(0, saved, 2)
    for name, value in whole.learner_state(2).items():
        assert torch.equal(bank.learner_state(0)[name], value), name
    for name, value in whole.state["momentum"].shaped(2).items():
        assert torch.equal(bank.state["momentum"].shaped(0)[name], value)
    assert bank.step_counts == [7, 0]
    assert bank.module(0)[1].num_batches_tracked.item() == 9
    assert all(torch.equal(bank.learner_state(1)[name], value) for name, value in before.items())


def test_clone_learner_is_z_with_zero_state_and_the_buffers_of_a_learner():
    whole, _ = banks_of((2,))
    whole.module(1)[1].num_batches_tracked.fill_(4)
    saved, bank = whole.state_dict(), make_bank(2, num_devices=2)
    bank.load_central(saved)
    bank.state["momentum"].storage.fill_(1.0)
    bank.step_counts[0] = 3
    bank.clone_learner(0, saved, 1)
    for name, value in saved["z"].items():
        assert torch.equal(bank.weights.shaped(0)[name], value)
    assert all(not value.any() for value in bank.state["momentum"].shaped(0).values())
    for name, value in saved["buffers"].items():
        assert torch.equal(bank.buffers.shaped(0)[name], value[1])
    assert (bank.step_counts[0], bank.module(0)[1].num_batches_tracked.item()) == (0, 4)
