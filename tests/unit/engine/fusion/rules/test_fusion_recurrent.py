"""Recurrent layers and cells of three learners against three ordinary modules, and whole networks against serial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.averaging import SMA, Independent
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import FP32, FP64
from tests.support import features
from tests.thinned import thinned
from tests.unit.engine.fusion.test_fusion import assert_equal, maker, run
from tests.unit.engine.fusion.trio import K, Trio, three_of

NUM_STEPS, BATCH, WIDTH, HIDDEN = 5, 4, 6, 7


class Layer(nn.Module):
    """A layer's outputs and last states, all of which the result hangs on, on inputs of one layout.

    Args:
        layer: takes inputs, and initial states if it is given any.
        arrives: how inputs come to it: raw, scaled by a parameter, or out of a convolution.
        states: shapes of initial states that are learned.
    """

    def __init__(self, layer: nn.Module, arrives: str, states: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.layer, self.arrives = layer, arrives
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.mix = nn.Conv1d(NUM_STEPS, NUM_STEPS, 1)
        self.states = nn.ParameterList(torch.zeros(shape) for shape in states)

    def forward(self, x: Tensor) -> Tensor:
        x = {"raw": x, "scaled": x * self.scale, "mixed": self.mix(x)}[self.arrives]
        if not getattr(self.layer, "batch_first", True):
            x = x.transpose(0, 1)
        states = tuple(self.states)
        found = self.layer(x, *((states if len(states) == 2 else states[0],) if states else ()))
        return torch.cat([tensor.reshape(-1) for tensor in _flat(found)])


def _flat(found: Tensor | tuple[object, ...]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [tensor for entry in found for tensor in _flat(entry)]


class Unrolled(nn.Module):
    """A cell over some steps, as code by hand does it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor | tuple[Tensor, Tensor]:
        for t in range(3):
            state = self.cell(x[:, t], state)
        return state


def lstm(**options):
    return nn.LSTM(WIDTH, HIDDEN, batch_first=True, **options)


def gru(**options):
    return nn.GRU(WIDTH, HIDDEN, batch_first=True, **options)


def elman(**options):
    return nn.RNN(WIDTH, HIDDEN, batch_first=True, **options)


DEEP = {"num_layers": 2, "bidirectional": True}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lstm,
    "lstm over time first": lambda: nn.LSTM(WIDTH, HIDDEN),
    "lstm without bias": lambda: lstm(bias=False),
    "lstm of two layers and directions": lambda: lstm(**DEEP),
    "lstm of three layers": lambda: lstm(num_layers=3),
    "gru": gru,
    "gru over time first": lambda: nn.GRU(WIDTH, HIDDEN, bidirectional=True),
    "gru without bias": lambda: gru(bias=False),
    "gru of two layers and directions": lambda: gru(**DEEP),
    "rnn": elman,
    "rnn with relu": lambda: elman(nonlinearity="relu", num_layers=2),
    "rnn without bias": lambda: elman(bias=False),
    "rnn of two layers and directions": lambda: elman(**DEEP),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(WIDTH, HIDDEN)),
    "lstm cell without bias": lambda: Unrolled(nn.LSTMCell(WIDTH, HIDDEN, bias=False)),
    "gru cell": lambda: Unrolled(nn.GRUCell(WIDTH, HIDDEN)),
    "gru cell without bias": lambda: Unrolled(nn.GRUCell(WIDTH, HIDDEN, bias=False)),
    "rnn cell": lambda: Unrolled(nn.RNNCell(WIDTH, HIDDEN)),
    "rnn cell with relu": lambda: Unrolled(nn.RNNCell(WIDTH, HIDDEN, nonlinearity="relu")),
}
STATES = {
    "lstm": ((1, BATCH, HIDDEN),) * 2,
    "lstm of two layers and directions": ((4, BATCH, HIDDEN),) * 2,
    "gru of two layers and directions": ((4, BATCH, HIDDEN),),
    "rnn of two layers and directions": ((4, BATCH, HIDDEN),),
    "lstm cell": ((BATCH, HIDDEN),) * 2,
    "gru cell": ((BATCH, HIDDEN),),
    "rnn cell": ((BATCH, HIDDEN),),
}
LEFT_TO_THE_LOOP: dict[str, Callable[[], nn.Module]] = {
    "lstm with a projection": lambda: lstm(proj_size=2),
    "lstm with a projection in two directions": lambda: lstm(proj_size=2, bias=False, **DEEP),
}


def build(model: nn.Module, training: bool = True) -> tuple[Trio, FusedGraph, Tensor]:
    """Models with weights of their own and the same in a bank, its graph, and a batch for each."""
    trio = Trio(three_of(model.double().train(training), -0.6, 0.6))
    inputs = torch.randn(K, BATCH, NUM_STEPS, WIDTH, dtype=torch.float64)
    return trio, trio.graph(inputs[0]), inputs


EXPORTED_WRONG = torch.__version__.startswith("2.11.")  # there exported states of LSTMs have a dimension too many


def by_the_loop(operators: Sequence[str]) -> list[str]:
    """But for LSTMs that are exported wrong, which the loop always runs."""
    return [name for name in operators if name != "lstm" or not EXPORTED_WRONG]


def skip_if_exported_wrong(layer: nn.RNNBase) -> None:
    if EXPORTED_WRONG and isinstance(layer, nn.LSTM):
        pytest.skip("torch 2.11 exports the states of LSTMs with a dimension too many")


def check(model: nn.Module, training: bool = True, looped: Sequence[str] | None = ()) -> FusedGraph:
    """On a batch each, on others, and on one for all; with looped=None operators may be looped over."""
    trio, graph, inputs = build(model, training)
    for batches in (inputs, inputs + 0.1, inputs[0]):
        trio.check(graph, batches, shared=batches.ndim == 3, tolerance=1e-10)
        assert looped is None or by_the_loop(graph.looped) == by_the_loop(looped)
    return graph


ARRIVALS = [*((name, "scaled") for name in LAYERS), *((name, how) for name in STATES for how in ("raw", "mixed"))]


@pytest.mark.parametrize(("name", "arrives"), thinned(ARRIVALS, quick=range(0, len(ARRIVALS), 2), slow=range(33)))
def test_recurrent_layer_of_three_learners_equals_three_modules(name, arrives):
    check(Layer(LAYERS[name](), arrives))


@pytest.mark.parametrize("name", STATES)
def test_recurrent_layer_with_learned_initial_states_equals_three_modules(name):
    check(Layer(LAYERS[name](), "scaled", STATES[name]))


@pytest.mark.parametrize("name", STATES)
def test_recurrent_layer_in_evaluation_mode_equals_three_modules(name):
    check(Layer(LAYERS[name](), "scaled"), training=False)


@pytest.mark.parametrize(
    ("make", "frozen"),
    thinned(
        itertools.product([lstm, gru, elman], ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"]),
        quick=[0, 4, 8],
        slow=range(9),
    ),
)
def test_recurrent_layer_with_a_frozen_parameter_equals_three_modules(make, frozen):
    layer = make()
    getattr(layer, frozen).requires_grad_(False)
    graph = check(Layer(layer, "raw"))
    assert f"layer.{frozen}" not in graph.trained


class Used(nn.Module):
    """What is made of a layer's outputs and last states."""

    def __init__(self, layer: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.layer(x)
        return self.use(outputs, state[-1])  # c of LSTM, h of the last layer of others


@pytest.mark.parametrize("make", [lstm, gru, elman])
@pytest.mark.parametrize(
    "use",
    [
        lambda outputs, state: outputs[:, -1],
        lambda outputs, state: state * 2,
        lambda outputs, state: outputs.relu_() + state.sum(),
        lambda outputs, state: state.mul_(outputs[:, 2]),
        lambda outputs, state: outputs[:, 1:].flip(1).contiguous().add_(1),
    ],
    ids=["last output", "last state", "outputs overwritten", "last state overwritten", "some outputs"],
)
def test_results_of_a_recurrent_layer_used_in_part_or_overwritten_equal_three_modules(make, use):
    skip_if_exported_wrong(make())
    check(Used(make(), use), looped=None)


class Twice(nn.Module):
    """A layer that runs over its own outputs, from its last states."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*self.layer(x))[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_that_runs_twice_equals_three_modules(kind):
    model = Twice(kind)
    skip_if_exported_wrong(model.layer)
    check(model)


@pytest.mark.parametrize("name", LEFT_TO_THE_LOOP)
def test_recurrent_layer_that_no_rule_covers_runs_in_the_loop_and_equals_three_modules(name):
    check(Layer(LEFT_TO_THE_LOOP[name](), "scaled"), looped=["lstm"])


@pytest.mark.parametrize(("make", "name"), [(lstm, "lstm"), (gru, "gru"), (elman, "rnn_tanh")])
def test_dropout_inside_a_recurrent_layer_is_left_to_the_loop_and_fused_in_evaluation_mode(make, name):
    _, graph, inputs = build(Layer(make(num_layers=2, dropout=0.5), "raw"))
    graph.run(inputs, False)
    assert by_the_loop(graph.looped) == by_the_loop([name])
    check(Layer(make(num_layers=2, dropout=0.5), "raw"), training=False)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN, which runs wide layers")
@pytest.mark.parametrize(("precision", "hidden", "looped"), [(FP32, 128, []), (FP32, 129, ["lstm"]), (FP64, 129, [])])
def test_wide_lstm_in_float32_on_a_cpu_is_left_to_the_loop(precision, hidden, looped):
    model = Used(nn.LSTM(WIDTH, hidden, batch_first=True), lambda outputs, state: outputs[:, -1])
    bank = ReplicaBank(model, K, device=torch.device("cpu"), precision=precision, state_names=(), order="blocks")
    inputs = torch.randn(BATCH, NUM_STEPS, WIDTH, dtype=precision.compute)
    graph = FusedGraph(model, inputs, bank, training=False)
    found = graph.run(inputs, True)
    assert by_the_loop(graph.looped) == by_the_loop(looped)
    torch.testing.assert_close(found[1], model.to(precision.compute)(inputs).detach(), rtol=1e-5, atol=1e-6)


class Classifier(nn.Module):
    """Layers one after another, dropout between them from the learner's generator; classes from the last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.dropout = kind(WIDTH, HIDDEN, batch_first=True, bidirectional=True), nn.Dropout(0.3)
        self.second, self.head = kind(2 * HIDDEN, HIDDEN, 2, batch_first=True), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.dropout(self.first(x)[0]))[0][:, -1])


def run_both(kind, **options):
    """Fused and serial."""
    data = features(48, (NUM_STEPS, WIDTH))
    both = [run(executor, maker(lambda: Classifier(kind)), data, **options) for executor in ("fused", "serial")]
    assert by_the_loop(both[0].looped) == []
    return both


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("rule", [SMA(), Independent()], ids=["sma", "ensemble"])
def test_fused_recurrent_network_after_some_rounds_in_float64_equals_serial(kind, rule):
    fused, serial = run_both(kind, rule=rule, shared=not rule.has_central_model, num_rounds=12)
    torch.testing.assert_close(torch.tensor(fused.losses), torch.tensor(serial.losses), rtol=1e-10, atol=1e-10)
    assert_equal(fused, serial, 1e-10)
