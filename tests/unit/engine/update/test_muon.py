"""Muon against NumPy in float64: the polynomial step by step, the polar factor, and rounds of a bank."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, AveragingRule, GroupedSMA, Independent, SynchronousSGD
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import FP32, FP64, Precision
from crossbow_py.engine.update.agreement import random_bank, written_values
from crossbow_py.engine.update.device_update import AllLearners, DeviceUpdate, OneLearner
from crossbow_py.engine.update.newton_schulz import COEFFICIENTS, orthogonalize
from crossbow_py.engine.update.optimizers import Muon, for_learner
from crossbow_py.engine.update.row_update import Step, TorchUpdate
from crossbow_py.engine.update.update_choice import choose_update
from tests.recording_streams import RecordingStreams
from tests.support import CPU, assert_learners_equal, features, make_tasks, run, run_rounds
from tests.thinned import pairs


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def newton_schulz(matrix: np.ndarray, iterations: int) -> np.ndarray:
    """The polynomial of the singular values, by their decomposition."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (1, 5)])
def test_iterations_are_the_polynomial_of_the_singular_values(shape: tuple[int, int], iterations: int) -> None:
    matrix = drawn(*shape)
    (found,) = orthogonalize([matrix], iterations)
    np.testing.assert_allclose(found.numpy(), newton_schulz(matrix.numpy(), iterations), rtol=1e-10, atol=1e-12)


def test_matrix_of_zeros_stays_one_and_the_scale_of_another_does_not_matter() -> None:
    zeros, large, small = orthogonalize([torch.zeros(3, 4), 1e30 * drawn(3, 4).float(), drawn(3, 4).float()], 5)
    assert not zeros.any()
    torch.testing.assert_close(large, small, rtol=1e-4, atol=1e-5)


def small_model() -> nn.Module:
    """Two matrices between a first and a last layer, with BatchNorm; the same weights every time."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 10, 3, bias=False),
        nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(), nn.Linear(40, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip


class Net(nn.Module):
    """A first and a last layer, and between them two convolutions, a linear layer, and what is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.a, self.norm = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.b, self.middle = nn.Conv2d(6, 4, 1), nn.Linear(4, 9)
        self.embedding, self.head = nn.Embedding(5, 9), nn.Linear(9, 3)


def test_matrices_lie_between_the_first_and_the_last_layer() -> None:
    assert Muon().matrices(Net()) == ("a.weight", "b.weight", "middle.weight")
    frozen = Net()
    frozen.b.requires_grad_(False)
    assert Muon().matrices(frozen) == ("a.weight", "middle.weight")


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))])
def test_model_without_matrices_is_refused_with_the_remedy(model: nn.Module) -> None:
    with pytest.raises(UserError, match="between the model's first and last one.*set optimizer=sgd"):
        Muon().matrices(model)


class Tokens(nn.Module):
    """A transformer as people write it: raw parameters first, attention, and a head with the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))
        self.patches = nn.Conv2d(3, 8, 2)
        self.tokens = nn.Embedding(7, 8)
        self.attention, self.up = nn.MultiheadAttention(8, 2), nn.ConvTranspose1d(8, 8, 2)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_no_layers_weight_is_no_matrix(tied: bool) -> None:
    attention = ("attention.in_proj_weight", "attention.out_proj.weight")
    assert Muon().matrices(Tokens(tied)) == (*attention, "hidden.weight")


class Reader(nn.Module):
    """An embedding, blocks of a transformer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids)).mean(1))  # type: ignore[no-any-return]


def test_embedding_is_the_first_layer_of_a_transformer() -> None:
    found = Muon().matrices(Reader())
    each = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert found == tuple(f"blocks.layers.{block}.{name}" for block in range(2) for name in each)


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_queries_keys_and_values_are_three_matrices(executor: str) -> None:
    """Each takes a step of about the same size, whatever the size of its gradient."""
    ids = torch.randint(7, (48, 5), generator=torch.Generator().manual_seed(0))
    tasks = make_tasks(
        Reader, optimizer=Muon(momentum=0.0, nesterov=False), precision=FP32, data=(ids, ids[:, 0] % 3),
        order=EXECUTORS[executor].ORDER,
    )  # fmt: skip
    name = "blocks.layers.0.self_attn.in_proj_weight"
    before = tasks.bank.learner_state(1)[name].clone()
    run_rounds(tasks, executor, 1, learning_rate=0.02)
    steps = (tasks.bank.learner_state(1)[name] - before).view(3, 8, 8)
    for step in steps:
        assert 0.6 < float(torch.linalg.matrix_norm(step / 0.02, 2)) < 1.3


class Sum(nn.Module):
    """Autograd has one tensor for the gradients of `middle` and of what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.zeros(6, 6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.first(inputs).relu(), self.middle.weight + self.shift)
        return self.last(hidden.relu())  # type: ignore[no-any-return]


def test_gradient_that_two_parameters_share_is_that_of_each() -> None:
    found = {}
    for executor in ("serial", "fused"):
        tasks = make_tasks(Sum, optimizer=Muon(), precision=FP32, order=EXECUTORS[executor].ORDER)
        run_rounds(tasks, executor, 3, learning_rate=0.02)
        found[executor] = tasks.bank.weights.shaped(1)
    for name, own in found["serial"].items():
        torch.testing.assert_close(found["fused"][name], own, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("order", ["rows", "blocks"])
@pytest.mark.parametrize(
    "optimizer",
    [
        Muon(weight_decay=0.1, other_weight_decay=0.05),
        Muon(nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3, other_momentum=0.0),
        Muon(learning_rate=0.2, momentum=0.6, normalize_weights=True, weight_decay=0.1),
        Muon(learning_rate=(0.02, 0.04), momentum=(0.9, 0.5), other_learning_rate=(0.1, 0.3), decay_norm_and_bias=True),
        Muon(
            other_optimizer="adamw", other_learning_rate=0.003, other_beta2=0.95, other_weight_decay=0.1, nesterov=False
        ),
    ],
    ids=["original", "rms", "normalised", "learners", "adamw"],
)  # fmt: skip
def test_fifty_rounds_are_those_of_numpy(optimizer: Muon, order: str) -> None:
    template = Net().double()
    matrices = optimizer.matrices(template)
    bank = ReplicaBank(
        template,
        2,
        device=CPU,
        precision=FP64,
        state_names=optimizer.state_names,
        order=order,
        matrices=matrices,  # type: ignore[arg-type]
    )
    learner = 1
    expected = {name: own.detach().numpy().copy() for name, own in template.named_parameters()}
    velocity, second = ({name: np.zeros_like(own) for name, own in expected.items()} for _ in range(2))
    norms = {"norm.weight", "norm.bias"}

    def of(value: float | tuple[float, ...]) -> float:
        return value[learner] if isinstance(value, tuple) else value

    for index in range(50):
        factor = 1 - index / 60
        gradients = {name: drawn(*own.shape, seed=1000 * index + i) for i, (name, own) in enumerate(expected.items())}
        for name, view in bank.gradients.shaped(learner).items():
            view.copy_(gradients[name])
        rate = of(optimizer.learning_rate) * factor
        optimizer.prepare([learner], [bank.trained_row(learner)])
        optimizer.step(learner, bank.trained_row(learner), rate, index + 1)
        for name, own in expected.items():
            w, g, u = own, gradients[name].numpy(), velocity[name]
            if name in matrices:
                m, flat = of(optimizer.momentum), (len(w), -1)
                if optimizer.normalize_weights:
                    w *= len(w) ** 0.5 / np.linalg.norm(w)
                u[:] = m * u + g
                o = newton_schulz((g + m * u if optimizer.nesterov else u).reshape(flat), optimizer.ns_steps)
                rows, columns = o.shape
                s = max(1, rows / columns) ** 0.5
                s = s if optimizer.adjust_lr_fn == "original" else 0.2 * max(rows, columns) ** 0.5
                w *= 1 - rate * of(optimizer.weight_decay)
                w -= rate * s * o.reshape(w.shape)
            elif optimizer.other_optimizer == "adamw":
                b1, b2 = of(optimizer.other_momentum), of(optimizer.other_beta2)
                gamma, v = of(optimizer.other_learning_rate) * factor, second[name]
                w *= 1 - gamma * of(optimizer.other_weight_decay) * (w.ndim > 1 and name not in norms)
                u[:], v[:] = b1 * u + (1 - b1) * g, b2 * v + (1 - b2) * g**2
                w -= gamma * (u / (1 - b1 ** (index + 1))) / ((v / (1 - b2 ** (index + 1))) ** 0.5 + 1e-8)
            else:
                m, decays = of(optimizer.other_momentum), w.ndim > 1 and name not in norms
                g = g + (of(optimizer.other_weight_decay) * w if decays or optimizer.decay_norm_and_bias else 0)
                u[:] = m * u + g
                w -= of(optimizer.other_learning_rate) * factor * (g + m * u)
    for name, view in bank.weights.shaped(learner).items():
        np.testing.assert_allclose(view.numpy(), expected[name], rtol=1e-8, atol=1e-9, err_msg=name)
    assert bank.weights.shaped(0)["a.weight"].equal(template.a.weight)  # the other learner has not moved


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [5, 8, 12, 20])
@pytest.mark.parametrize("rank", [1, 3])
def test_matrices_of_low_rank_stay_in_range_in_float32(rank: int, iterations: int) -> None:
    """Small batches have such gradients. What rounding adds grows, but no singular value may leave their range."""
    for rows, columns, seed in itertools.product((16, 64, 250), (256,), range(3)):
        matrix = drawn(rows, rank, seed=seed) @ drawn(rank, columns, seed=seed + 10)
        (found,) = orthogonalize([matrix.float()], iterations)
        assert np.linalg.norm(found.numpy(), 2) < 1.21  # the most that the polynomial makes of a value in [0, 1]
        if iterations <= 8:
            assert np.linalg.norm(found.numpy() - newton_schulz(matrix.numpy(), iterations), 2) < 0.02


MUONS = [
    Muon(weight_decay=0.05, clip_norm=0.5),
    Muon(weight_decay=0.05, clip_norm=0.5, normalize_weights=True),
    Muon(other_optimizer="adamw", other_learning_rate=0.001),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "averaging", "optimizer"),
    [  # every two of an executor, a rule and an optimizer
        (executor, rule, MUONS[(i + j) % 3])
        for i, executor in enumerate(("threads", "fused", "fused_threads"))
        for j, rule in enumerate((SynchronousSGD(), SMA(), Independent(), GroupedSMA(group_size=2)))
    ],
)
def test_executors_equal_serial(executor: str, averaging: AveragingRule, optimizer: Muon) -> None:
    """In float32 by native code, and prepared for all learners at once where they share a gradient."""

    def trained(name: str, precision: Precision) -> ReplicaBank:
        tasks = make_tasks(
            small_model, data=features(64, (3, 6, 6)), num_learners=4, optimizer=optimizer, rule=averaging,
            precision=precision, order=EXECUTORS[name].ORDER,
        )  # fmt: skip
        run_rounds(tasks, name, 4, learning_rate=0.02)
        return tasks.bank

    reference = trained("serial", FP64)
    for precision, tolerance in ((FP64, 1e-9), (FP32, 2e-3)):
        found = trained(executor, precision)
        for learner in range(4):
            ours, expected = found.weights.shaped(learner), reference.weights.shaped(learner)
            for name, own in expected.items():
                torch.testing.assert_close(ours[name].double(), own, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "optimizer",
    [
        Muon(weight_decay=0.1, other_weight_decay=0.05, clip_norm=5.0),
        Muon(nesterov=False, other_momentum=0.0, normalize_weights=True),
        Muon(
            other_optimizer="adamw", other_learning_rate=0.003, other_beta2=0.95, other_weight_decay=0.1, nesterov=False
        ),
        Muon(
            learning_rate=(0.02, 0.04, 0.01), momentum=(0.9, 0.5, 0.0), weight_decay=(0.1, 0.0, 0.2),
            other_learning_rate=(0.1, 0.3, 0.2),
        ),
    ],
    ids=["original", "heavy ball, normalised", "adamw", "learners"],
)  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_steps_on_the_device_are_those_of_the_reference(optimizer: Muon, together: bool) -> None:
    ours, expected = (random_bank(optimizer, CPU, FP64) for _ in range(2))
    learners, averaging = range(expected.num_learners), LinearRound(0.3, momentum=0.9)
    rates = [0.5 * for_learner(optimizer.learning_rate, learner) for learner in learners]
    for bank in (ours, expected):
        bank.gradients.trained(1)[0][3] = math.nan  # that learner stays as it is
    update, reference = DeviceUpdate(optimizer, SMA(), CPU), TorchUpdate(optimizer, SMA())
    given = {"loss": [1.0] * 3, "learning_rate": rates, "step_count": [0.0] * 3, "finite": [2.0] * 3}
    values = {name: torch.tensor([*each, each[-1]], dtype=torch.float64) for name, each in given.items()}
    if together:
        update.correct(AllLearners(ours, optimizer), averaging, **values)
    else:
        for learner in learners:
            own = {name: each[learner] for name, each in values.items()}
            update.correct(OneLearner(learner, ours.trained_row(learner)), averaging, **own)
    for learner in (0, 2):
        row = expected.trained_row(learner)
        scale = optimizer.gradient_scale(reference.gradient_norm(row))
        reference.correct(learner, row, averaging, Step(rates[learner], 1, scale))
    assert values["finite"][:3].tolist() == [1.0, 0.0, 1.0]
    for own, other in zip(written_values(ours), written_values(expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("averaging", "kind", "others"),
    pairs(
        [SynchronousSGD(), SMA(), GroupedSMA(group_size=2)], [FusedExecutor, StreamsExecutor], ["sgd", "adamw"], quick=3
    ),
)
def test_rounds_on_a_device_equal_serial(others: Any, kind: Any, averaging: AveragingRule) -> None:
    """Where learners share a gradient, the first one's matrices are orthogonalised for all."""
    optimizer = Muon(
        weight_decay=0.05, clip_norm=0.5, normalize_weights=True, other_optimizer=others, other_learning_rate=0.01
    )
    options: dict[str, Any] = {"data": features(64, (3, 6, 6)), "num_learners": 4, "rule": averaging}
    ours, reference = (make_tasks(small_model, optimizer=optimizer, order="blocks", **options) for _ in range(2))
    run(kind(ours, RecordingStreams()), ours, 8)
    run(SerialExecutor(reference), reference, 8)
    assert_learners_equal(ours.bank, reference.bank)


@pytest.mark.parametrize("rule", [SynchronousSGD(), SMA()], ids=lambda rule: rule.NAME)
@pytest.mark.parametrize(
    "optimizer",
    [
        Muon(), Muon(normalize_weights=True), Muon(nesterov=False, other_momentum=0.0),
        Muon(other_optimizer="adamw", other_weight_decay=0.1, other_learning_rate=0.001),
    ],
)  # fmt: skip
def test_native_code_is_taken(optimizer: Muon, rule: AveragingRule) -> None:
    update, message = choose_update(optimizer, rule, CPU, torch.float32)
    assert (update.NAME, message) == ("native", None)
