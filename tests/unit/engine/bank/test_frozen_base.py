"""Frozen parameters of a bank: held once, saved once, and refused where learners would differ.

What this alone catches: copies for every learner, and files of before that have them among the weights.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py.engine.bank.frozen_base import frozen_values
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32, Precision
from tests.support import CPU, norm_model

K = 3


def model_of(size: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, size, 3), nn.BatchNorm2d(size), nn.Flatten(), nn.Linear(size, 2))
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


def bank_of(model: nn.Module, precision: Precision = FP32, **options: Any) -> ReplicaBank:
    return ReplicaBank(model, K, device=CPU, precision=precision, state_names=("first", "second"), **options)


def storages(bank: ReplicaBank) -> int:
    """The bytes of all memory that a bank refers to, each counted once, but for its template."""
    rows = [bank.weights, bank.gradients, bank.corrections, *bank.state.values(), bank.buffers, bank.shadow]
    tensors = [one.storage for one in (*rows, bank.z, bank.z_prev, bank.total)]
    tensors += [*bank.base.masters(K).values(), *bank.base.stacked(K).values()]
    return sum({own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in tensors}.values())


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_frozen_value_is_held_once_whatever_the_number_of_learners(precision: Precision) -> None:
    frozen = 200 * 3 * 9 + 200 + 2 * 200
    few, many = (storages(bank_of(model_of(size), precision)) for size in (8, 200))
    trained = (200 - 8) * (2 * (6 * K + 3) * 4 + (2 * 2 * K if precision is BF16 else 0) + 2 * K * 4)
    beyond = frozen * (4 if precision is FP32 else 6) - (8 * 27 + 8 + 16) * (4 if precision is FP32 else 6)
    assert many - few <= trained + beyond + 4096  # of padding


def test_learners_read_the_same_memory_and_a_learner_with_other_values_is_refused() -> None:
    model = model_of()
    bank = bank_of(model)
    filters = [bank.module(learner)[0].weight for learner in range(K)]
    assert len({own.data_ptr() for own in filters}) == 1
    assert torch.equal(filters[0], model[0].weight)
    assert not any(own.requires_grad for own in filters)
    other = copy.deepcopy(model)
    other[0].weight.data[0] += 1
    with pytest.raises(ValueError, match=r"frozen parameter 0\.weight has other values"):
        bank.load_learner(1, other)


def test_learners_with_values_of_their_own_keep_them() -> None:
    models = [norm_model() for _ in range(K)]
    bank = bank_of(models[0], shares_base=False)
    for learner, model in enumerate(models):
        model[5].bias.data.fill_(float(learner))
        bank.load_learner(learner, model)
    bank.resize(K + 1)
    assert [bank.learner_state(j)["5.bias"][0].item() for j in range(K)] == [0.0, 1.0, 2.0]
    assert [bank.module(j)[5].bias[0].item() for j in range(K)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_saved_bank_is_loaded_and_one_with_frozen_values_among_its_weights_too(
    precision: Precision, shares: bool
) -> None:
    saved = bank_of(model_of(), precision, shares_base=shares).state_dict()
    assert len(saved["frozen"]["0.weight"]) == (1 if shares else K)
    rows = {name: values.expand(K, *values.shape[1:]) for name, values in saved["frozen"].items()}
    one = {name: values[0] for name, values in rows.items()}
    before = {**saved, "weights": {**saved["weights"], **rows}, "z": {**saved["z"], **one}}
    del before["frozen"]
    for form in (saved, before):
        other = model_of()
        other[0].weight.data.zero_()
        bank = bank_of(other, precision, shares_base=shares)
        bank.load_state_dict(form)
        for learner in range(K):
            assert torch.equal(bank.learner_state(learner)["0.weight"], one["0.weight"])
            assert torch.equal(bank.module(learner)[0].weight, one["0.weight"].to(precision.compute))


def test_text_of_frozen_values_tells_values_shapes_and_names_apart() -> None:
    model, same, moved, other = (model_of(size) for size in (8, 8, 8, 9))
    moved[0].weight.data[0, 0, 0, 0] += 1e-6
    assert frozen_values(model) == frozen_values(same)
    masks = [nn.Linear(4, 1, bias=False).requires_grad_(False) for _ in range(3)]
    for mask, values in zip(masks, ([0.0, 1, 1, 0], [1.0, 0, 0, 1], [0.0, 0, 0, 0]), strict=True):
        mask.weight.data.copy_(torch.tensor([values]))
    masks.append(nn.Linear(5, 1, bias=False).requires_grad_(False))
    nn.init.zeros_(masks[3].weight)
    assert len({frozen_values(each) for each in masks}) == 4
    assert len({frozen_values(each) for each in (model, moved, other)}) == 3
    assert frozen_values(nn.Linear(2, 2)) is None
