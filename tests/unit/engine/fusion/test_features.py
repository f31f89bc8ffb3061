"""Features of frozen layers that are kept: which layers come before the cut, and that no bit of a run changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Augmentation, Member, Trainer, UserError, frozen, train_many
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.cut import find_cut
from crossbow_py.engine.fusion.graph import FusedGraph, Midway
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.many.results import Results
from crossbow_py.telemetry.events import RoundEnd
from tests.thinned import thinned

IMAGES = torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(2))
SETTINGS: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.25] * 3, "precision": "fp32", "executor": "fused"}


def base(offset: float = 0.0) -> nn.Sequential:
    """Frozen convolutions, the same each time, but for a running mean."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.Flatten()]
        found = frozen(nn.Sequential(*layers))
    found[1].running_mean.fill_(offset)
    return found


def probe(offset: float = 0.0) -> nn.Module:
    return nn.Sequential(base(offset), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 3))


class Mixes(nn.Module):
    """A frozen layer whose values depend on the other samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = base(), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.base(x)
        out: Tensor = self.head(features - features.mean(0))
        return out


def trained(make_model: Callable[[], nn.Module], members: list[Member], **settings: Any) -> Results:
    data = IMAGES, LABELS
    return train_many(make_model, data, data, members=members, max_epochs=3, batch_size=8, **SETTINGS | settings)


def assert_same_bits(found: Results, expected: Results) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.test_loss == other.test_loss
        assert all(torch.equal(one.state[name], value) for name, value in other.state.items())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows that frozen layers have computed."""
    found, compute = list[int](), FusedGraph.before_cut

    def counted(graph: FusedGraph, inputs: Tensor, shared: bool) -> Midway:
        found.append(len(inputs) if shared else inputs.shape[:2].numel())
        return compute(graph, inputs, shared)

    monkeypatch.setattr(FusedGraph, "before_cut", counted)
    return found


@pytest.mark.parametrize("orders", thinned([[None] * 3, [0, 1, 2]], quick=[0], slow=[1]), ids=["shared", "own orders"])
def test_members_train_to_the_same_bits_and_a_frozen_base_runs_in_the_first_epoch_alone(
    orders: list[int | None], runs: list[int]
) -> None:
    members = [Member(optimizer=SGD(learning_rate=0.02 * (n + 1)), order_seed=own) for n, own in enumerate(orders)]
    plain = trained(probe, members, cache_features=False)
    assert not runs
    found = trained(probe, members)
    assert_same_bits(found, plain)
    assert "Features of 96 samples after 0.3 are kept: 0.0 MB." in found.notes
    trials, rounds = 2 * (8 + 3 * 8), sum(runs)
    assert rounds - trials <= 96 if orders[0] is None else rounds - trials <= 3 * 96


@pytest.mark.slow
def test_learners_that_average_train_to_the_same_bits() -> None:
    def weights(cache: Any) -> dict[str, Tensor]:
        trainer = Trainer(
            model=probe, train_data=(IMAGES, LABELS), num_learners=2, batch_size=8, accumulate=2, cache_features=cache,
            **SETTINGS,
        )  # fmt: skip
        return trainer.fit(max_epochs=3).model.state_dict()

    expected = weights(False)
    assert all(torch.equal(value, expected[name]) for name, value in weights("auto").items())


@pytest.mark.slow
def test_features_of_buffers_that_a_callback_has_written_since_are_forgotten() -> None:
    def weights(cache: Any) -> Tensor:
        trainer = Trainer(
            model=probe, train_data=(IMAGES, LABELS), num_learners=2, batch_size=8, cache_features=cache, **SETTINGS
        )

        def write(_: RoundEnd) -> None:
            if trainer.state.round_index == 14:  # of 6 an epoch
                for learner in range(2):
                    trainer.run.bank.module(learner).get_buffer("0.1.running_mean").add_(0.5)

        return trainer.fit(max_epochs=4, after_round=write).model.state_dict()["3.weight"]

    assert torch.equal(weights("auto"), weights(False))


@pytest.mark.slow
def test_members_with_other_buffers_of_frozen_layers_train_as_without_features() -> None:
    members = [Member(name=f"{offset}", model=partial(probe, offset)) for offset in (0.0, 0.5)]
    assert_same_bits(trained(probe, members), trained(probe, members, cache_features=False))


@pytest.mark.slow
def test_a_base_whose_samples_depend_on_each_other_is_not_kept() -> None:
    members = [Member(), Member(optimizer=SGD(learning_rate=0.1))]
    assert_same_bits(trained(Mixes, members), trained(Mixes, members, cache_features=False))
    with pytest.raises(UserError, match="cache_features=true: features of a sample depend on the others in its batch"):
        trained(Mixes, members, cache_features=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"executor": "auto"}, "is for executor=fused, got executor=auto; set executor=fused"),
        ({"augmentation": Augmentation(flip=True)}, "inputs are augmented, mixed or streamed"),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 3))}, "there are no frozen parameters"),
        ({"model": lambda: nn.Sequential(nn.BatchNorm2d(3), base(), nn.Linear(96, 3))}, "comes before what is trained"),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_asked_for(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        trained(settings.pop("model", probe), [Member()], cache_features=True, **settings)
    assert "\n" not in str(refused.value)


def cut_of(model: nn.Module) -> tuple[int, float] | None:
    """Return the values of a sample that cross the cut of a model of images, and the share of products before it."""
    bank = ReplicaBank(
        model.train(),
        2,
        device=torch.device("cpu"),
        precision=FP32,
        state_names=(),
        order="blocks",
        channels_last=False,
    )
    found = find_cut(FusedGraph(model, torch.zeros(4, 3, 8, 8), bank), 4)
    return None if found is None else (sum(node.meta["val"][0].numel() for node in found.nodes), found.share)


def test_the_cut_is_where_the_fewest_bytes_cross_behind_the_last_frozen_product() -> None:
    frozen_layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Upsample(scale_factor=9)]
    head = nn.Conv2d(1, 2, 1)
    model = nn.Sequential(*frozen_layers[:4], nn.Unflatten(1, (1, 2, 2)), frozen_layers[4], head)
    model.requires_grad_(False)
    head.requires_grad_(True)
    # 4 channels at 6 × 6 pixels by 27 products each, of which one value a channel is left; then 2 channels at 18 × 18.
    assert cut_of(model) == (4, pytest.approx(4 * 36 * 27 / (4 * 36 * 27 + 2 * 324)))


@pytest.mark.parametrize("first", [nn.Dropout(0.5), nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)])
def test_nothing_is_kept_behind_draws_and_statistics_of_batches(first: nn.Module) -> None:
    assert cut_of(nn.Sequential(first.requires_grad_(False), base(), nn.Linear(96, 3))) is None
