"""Chains of linear layers and the cross-entropy in C against torch's modules in float64, learner by learner."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from torch import nn

from crossbow_py.engine.native.dense import DenseChain, Layers, cross_entropy_of_learners, serves

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
LEARNERS = 3
FUNCTIONS = {"identity": nn.Identity, "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


def test_it_compiles_where_there_is_a_compiler():
    assert serves(torch.zeros(1))
    assert not serves(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def modules(layers: Layers, widths: tuple[int, ...]) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            *(
                nn.Sequential(nn.Linear(*pair, bias=bias, dtype=torch.float64), FUNCTIONS[function]())
                for pair, function, bias in zip(itertools.pairwise(widths), *layers, strict=True)
            )
        )
        for _ in range(LEARNERS)
    ]


# Products have tiles of 4 rows and 16 columns: rows and widths below, at and beyond them.
@pytest.mark.parametrize(
    ("rows", "widths", "functions", "biases"),
    [
        (1, (1, 1), ("identity",), (True,)),
        (4, (16, 16), ("relu",), (False,)),
        (3, (5, 17, 2), ("tanh", "identity"), (True, False)),
        (9, (33, 16, 21, 3), ("sigmoid", "relu", "identity"), (False, True, True)),
        (6, (16, 40, 16), ("relu", "sigmoid"), (True, True)),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_chain_in_c_equals_torch_modules(rows, widths, functions, biases, shared):
    layers = Layers(functions, biases)
    own = modules(layers, widths)
    x = torch.randn(1 if shared else LEARNERS, rows, widths[0], dtype=torch.float64, requires_grad=True)
    given = x.expand(LEARNERS, -1, -1)
    wanted = torch.stack([module(rows_of_one) for module, rows_of_one in zip(own, given, strict=True)])
    parameters = [torch.stack([*each]) for each in zip(*(module.parameters() for module in own), strict=True)]
    found = DenseChain.apply(layers, given.float(), *(each.float() for each in parameters))
    values, weight = [x, *(each for module in own for each in module.parameters())], torch.randn_like(wanted)
    gradients = [torch.autograd.grad((each * weight.to(each)).sum(), values) for each in (found, wanted)]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_chain_gives_gradients_of_trained_parameters_alone():
    x, weights, bias = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4), torch.randn(2, 5)
    found = DenseChain.apply(Layers(("relu",), (True,)), x, weights, bias.requires_grad_())
    found.sum().backward()
    assert weights.grad is None
    mask = (x @ weights.transpose(1, 2) + bias[:, None] > 0).float()
    torch.testing.assert_close(bias.grad, mask.sum(1))
    torch.testing.assert_close(x.grad, mask @ weights)


def test_relu_of_a_chain_lets_nan_through_as_torch_does():
    x = torch.tensor([[[float("nan")], [-1.0], [float("inf")]]], requires_grad=True)
    found = DenseChain.apply(Layers(("relu",), (False,)), x, torch.ones(1, 1, 1))
    torch.testing.assert_close(found, torch.relu(x), equal_nan=True)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in (found, torch.relu(x))))


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("classes", [1, 2, 10, 33, 1001])
def test_cross_entropy_in_c_equals_torch(classes, expanded):
    torch.manual_seed(0)
    outputs = torch.randn(LEARNERS, 7, classes, dtype=torch.float64) * 4
    targets = torch.randint(classes, (1 if expanded else LEARNERS, 7))
    targets[0, ::3] = -100
    targets = targets.expand(LEARNERS, 7)
    exact = outputs.float().double().requires_grad_()
    wanted = torch.stack([nn.functional.cross_entropy(*pair) for pair in zip(exact, targets, strict=True)])
    losses, num_correct, gradient = cross_entropy_of_learners(outputs.float(), targets)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), *torch.autograd.grad(wanted.sum(), exact), rtol=1e-5, atol=1e-6)
    assert num_correct.tolist() == (exact.argmax(2) == targets).sum(1).tolist()


def test_cross_entropy_in_c_of_values_that_are_not_finite_and_of_no_targets():
    inf, nan = float("inf"), float("nan")
    outputs = torch.tensor([[[nan, 1]], [[inf, 1]], [[-inf, -inf]], [[0, -inf]], [[1, 2]]])
    targets = torch.tensor([[0], [0], [0], [1], [-100]])
    wanted = torch.stack([nn.functional.cross_entropy(*pair) for pair in zip(outputs, targets, strict=True)])
    losses, num_correct, gradient = cross_entropy_of_learners(outputs, targets)
    torch.testing.assert_close(losses, wanted, equal_nan=True)
    assert num_correct.tolist() == [0] * 5
    assert gradient[4].tolist() == [[0, 0]]


def test_masked_classes_get_no_gradient_at_all():
    outputs = torch.tensor([[[1.0, -1e9, 2.0, float("-inf")]]])
    _, _, gradient = cross_entropy_of_learners(outputs, torch.tensor([[0]]))
    assert gradient[0, 0, 1::2].tolist() == [0, 0]


def test_default_dtype_of_torch_is_not_that_of_room_for_chains():
    torch.set_default_dtype(torch.bfloat16)  # half as much room
    try:
        test_chain_in_c_equals_torch_modules(9, (40, 30, 20), ("relu", "identity"), (True, True), False)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_target_that_is_no_class_is_named_as_torch_names_it():
    with pytest.raises(IndexError, match="Target 2 is out of bounds"):
        cross_entropy_of_learners(torch.zeros(2, 3, 2), torch.tensor([[0, 1, 2]]).expand(2, 3))
