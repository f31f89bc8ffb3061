"""Row updates against torch.optim."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.layout import TrainedRow
from crossbow_py.engine.update.optimizers import SGD, AdamW


def compare(optimizer, reference_class, options, rounds=5, num_decayed=1):
    """Five steps on the same gradients: ours on flat lists, torch's on two parameter groups."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2)]
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": parameters[:num_decayed]}, {"params": parameters[num_decayed:], "weight_decay": 0.0}]
    reference = reference_class([group for group in groups if group["params"]], **options)
    state = {name: [torch.zeros_like(weight) for weight in weights] for name in optimizer.state_names}
    for step in range(1, rounds + 1):
        gradients = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        row = TrainedRow(weights, gradients, [], state, [], None, num_decayed=1)
        optimizer.step(0, row, learning_rate=options["lr"], step_count=step)
    for weight, parameter in zip(weights, parameters, strict=True):
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay_all", [False, True])
def test_sgd_with_momentum_and_decay_equals_torch(nesterov, decay_all):
    ours = SGD(momentum=0.9, weight_decay=0.05, nesterov=nesterov, decay_norm_and_bias=decay_all)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov}
    compare(ours, torch.optim.SGD, options, num_decayed=2 if decay_all else 1)


@pytest.mark.parametrize("decay_all", [False, True])
def test_adamw_equals_torch(decay_all):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1, decay_norm_and_bias=decay_all)
    compare(ours, torch.optim.AdamW, options, num_decayed=2 if decay_all else 1)


def test_sgd_with_per_learner_values_uses_the_learners_own():
    optimizer = SGD(learning_rate=(0.1, 0.2), momentum=(0.0, 0.5), weight_decay=(0.0, 1.0))
    weights, state = [torch.tensor([2.0])], {"momentum": [torch.tensor([4.0])]}
    # u = 0.5·4 + (1 + 1·2) = 5;  w = 2 − 0.2·5 = 1
    row = TrainedRow(weights, [torch.tensor([1.0])], [], state, [], None, num_decayed=1)
    optimizer.step(1, row, learning_rate=0.2, step_count=1)
    assert float(weights[0]) == pytest.approx(1.0)


def test_optimizer_with_as_many_values_as_learners_only_is_accepted():
    SGD(learning_rate=(0.1, 0.2)).check_learners(2)
    with pytest.raises(UserError, match="optimizer.learning_rate lists 2 values for 3 learners"):
        SGD(learning_rate=(0.1, 0.2)).check_learners(3)


@pytest.mark.parametrize("value", [-0.1, (0.1, -0.1)])
def test_sgd_with_a_negative_rate_is_refused(value):
    with pytest.raises(UserError, match="optimizer.learning_rate must be at least 0"):
        SGD(learning_rate=value)
