"""Models of other widths on rows of the widest one's bank: what each learns there is what it learns alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from crossbow_py import SGD, Member, train_many
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.optimizers import AdamW, Muon
from crossbow_py.packs.padding import family, padding_for
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.train import run_settings
from crossbow_py.train.schedules import Constant


class Recurrent(nn.Module):
    def __init__(self, width: int, layer: type[nn.RNNBase] = nn.GRU, both_ways: bool = False) -> None:
        super().__init__()
        self.layer = layer(3, width, num_layers=2, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (1 + both_ways), 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(inputs.unflatten(1, (4, 3)))[0][:, -1])
        return out


def mlp(width: int, activation: type[nn.Module] = nn.ReLU, norm: Callable[[int], nn.Module] | None = None) -> nn.Module:
    middle = [activation()] if norm is None else [norm(width), activation()]
    return nn.Sequential(nn.Linear(12, width), *middle, nn.Linear(width, width), activation(), nn.Linear(width, 2))


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(6 * width, 2),
    )  # fmt: skip


EXACT = {
    "mlp": mlp,
    "gelu": partial(mlp, activation=nn.GELU),
    "batch norm": partial(mlp, norm=nn.BatchNorm1d),
    "cnn": cnn,
    "gru": Recurrent,
    "lstm": partial(Recurrent, layer=nn.LSTM),
    "rnn": partial(Recurrent, layer=nn.RNN),
}
INEXACT = {
    "a sigmoid is not zero at zero": partial(mlp, activation=nn.Sigmoid),
    "layer norm takes a mean over units": partial(mlp, norm=nn.LayerNorm),
    "concatenated units are in two places": partial(Recurrent, both_ways=True),
}
MARKED = [  # one in everyday tests
    pytest.param(make, id=name, marks=[] if name in ("cnn",) else pytest.mark.slow) for name, make in EXACT.items()
]
INPUTS = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", MARKED)
def test_padded_rows_learn_what_they_learn_alone(
    make: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 rounds in float64, in a pack with a wider model, fused, against each alone by the serial executor."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    draws = torch.Generator().manual_seed(1)
    data = torch.randn(64, 12, generator=draws), torch.randn(64, 2, generator=draws)
    members = [
        Member(seed=0, model=partial(make, 6)), Member(seed=1, model=partial(make, 8), subset=range(40)),
        Member(seed=2, model=partial(make, 7), optimizer=SGD(learning_rate=0.03, momentum=0.9, weight_decay=0.01)),
    ]  # fmt: skip
    every = {"batch_size": 8, "max_rounds": 50, "max_epochs": 10, "optimizer": SGD(), "loss": nn.functional.mse_loss}
    call = partial(train_many, make, data, **every)
    together = call(members=members, executor="fused")
    assert sum("padded with zeros" in note for note in together.notes) == 1
    for number, member in enumerate(members):
        alone = call(members=[member], executor="serial")[0].model.state_dict()
        found = together[number].model.state_dict()
        assert [value.shape for value in found.values()] == [value.shape for value in alone.values()]
        assert max(float((found[name] - alone[name]).abs().max()) for name in alone) <= 1e-10


@pytest.mark.parametrize("make", INEXACT.values(), ids=INEXACT)
def test_models_that_would_learn_something_else_are_not_padded(make: Callable[[int], nn.Module]) -> None:
    """Their packs are their own: a padded row would train, to other weights, without a word."""
    assert padding_for(make(7), make(8), INPUTS) is None
    assert padding_for(make(8), make(8), INPUTS) is not None


def test_initial_zeros_hide_nothing() -> None:
    """A last layer that begins at zero hides all that is before it from a comparison by initial weights."""

    def make(width: int) -> nn.Module:
        model = mlp(width, norm=nn.LayerNorm)
        nn.init.zeros_(model.get_parameter("5.weight"))
        return model

    assert padding_for(make(7), make(8), INPUTS) is None


def test_only_what_leaves_zeros_alone_is_padded() -> None:
    """Muon scales by a matrix's shape, and a narrow row of a wide bank is waste."""

    def of(optimizer: SGD | AdamW | Muon, model: nn.Module) -> str | None:
        settings = TrialSettings(0, lambda: model, "key", 8, optimizer, Constant())
        return family(settings, model)

    assert of(SGD(), mlp(7)) == of(SGD(learning_rate=0.5), mlp(8)) is not None
    assert of(SGD(), mlp(7)) != of(AdamW(), mlp(7)) is not None
    assert of(Muon(), mlp(7)) is None
    assert padding_for(mlp(16), mlp(8), INPUTS) is None
    assert padding_for(mlp(8), mlp(16), INPUTS) is None


def test_dropout_is_for_units_that_all_models_have() -> None:
    """A mask that padded units take part in is another one than alone, however rarely it drops anything."""

    def make(width: int, before: bool) -> nn.Module:
        layers = [nn.Linear(12, width), nn.ReLU()]
        layers.insert(0 if before else 2, nn.Dropout(1e-6))
        return nn.Sequential(*layers, nn.Linear(width, 3))

    assert padding_for(make(7, True), make(8, True), INPUTS) is not None
    assert padding_for(make(7, False), make(8, False), INPUTS) is None


def test_a_padded_unit_that_moves_is_an_error() -> None:
    padding = padding_for(mlp(7), mlp(8), INPUTS)
    assert padding is not None
    value = padding.pad("0.bias", torch.ones(7))
    assert padding.unpad("0.bias", value).tolist() == [1] * 7
    value[7] = 1e-30
    with pytest.raises(RuntimeError, match=r"0\.bias"):
        padding.unpad("0.bias", value)
