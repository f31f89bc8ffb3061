"""Models with `initialise_from`: which inputs they get, when, and with what else takes their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from crossbow_py import SGD, Augmentation, Collated, Independent, Member, Search, Trainer, load_models, train_many
from crossbow_py.train.checks import seeded_model

_DRAWS = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (40, 1, 4, 4), generator=_DRAWS, dtype=torch.uint8)
DATA: Any = (IMAGES, torch.arange(40) % 2)
NORMALISED = {"mean": [0.25], "std": [0.5]}


class Centred(nn.Module):
    """Subtracts the mean of the images that it was initialised from, which is not trained."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.head = nn.Linear(16, 2)

    def initialise_from(self, images: Tensor) -> None:
        type(self).calls += 1
        with torch.no_grad():
            self.mean.copy_(images.flatten(1).mean(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1) - self.mean)
        return out


@pytest.fixture(autouse=True)
def uncounted() -> None:
    Centred.calls = 0


def mean_of(ids: Any, mean: float = 0.25, std: float = 0.5) -> Tensor:
    """The mean of normalised images by NumPy."""
    pixels = IMAGES.numpy()[ids].astype(np.float64).reshape(-1, 16) / 255
    return torch.from_numpy(((pixels - mean) / std).mean(0)).float()


def trainer(data: Any = DATA, **given: Any) -> Trainer:
    fixed: dict[str, Any] = {"batch_size": 4, "num_learners": 2, "optimizer": SGD(learning_rate=0.1)}
    return Trainer(Centred, data, **{**fixed, "executor": "serial", "device": "cpu", **NORMALISED, **given})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_model_gets_normalised_images_that_are_not_augmented(precision: str) -> None:
    model = trainer(augmentation=Augmentation(flip=True, crop_padding=2), precision=precision).fit(max_epochs=1).model
    assert torch.allclose(model.mean, mean_of(range(40)), atol=1e-6)


def test_samples_are_few_and_spread_over_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_model, "_MOST_FIRST", 4)
    assert torch.allclose(trainer().fit(max_epochs=1).model.mean, mean_of([0, 13, 26, 39]), atol=1e-6)


def test_data_sets_are_read_item_by_item() -> None:
    items = TensorDataset(*DATA)
    data = [items[n] for n in range(40)]
    assert torch.allclose(trainer(data).fit(max_epochs=1).model.mean, mean_of(range(40)), atol=1e-6)


def test_samples_of_a_data_set_with_its_own_collate_are_collated_by_it() -> None:
    def collate(samples: Any) -> Any:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images).float() / 255, torch.stack(labels)

    found = trainer(Collated(TensorDataset(*DATA), collate), mean=None, std=None).fit(max_epochs=1).model
    assert torch.allclose(found.mean, mean_of(range(40), mean=0, std=1), atol=1e-6)


def test_every_independent_learner_is_initialised() -> None:
    models = trainer(averaging=Independent(), num_learners=3).fit(max_epochs=1).models
    assert len(models) == 3
    assert all(torch.allclose(own.mean, mean_of(range(40)), atol=1e-6) for own in models)


def test_resumed_run_takes_the_values_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer().fit(max_epochs=2).model
    trainer(output_dir=tmp_path / "run").fit(max_epochs=1)
    monkeypatch.setattr(Centred, "initialise_from", lambda self, _: self.mean.data.fill_(7.0))
    again = trainer(output_dir=tmp_path / "run", resume="auto").fit(max_epochs=2).model
    assert all(torch.equal(own, again.state_dict()[name]) for name, own in whole.state_dict().items())
    (loaded,) = load_models(tmp_path / "run", model=Centred)
    assert torch.equal(loaded.mean, again.mean)


def test_weights_of_a_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: own + 3 for name, own in Centred().state_dict().items()}, file)
    assert trainer(init_from=file).fit(max_epochs=1).model.mean.tolist() == [3.0] * 16


def test_members_are_initialised_from_their_own_samples() -> None:
    halves = [np.arange(0, 40, 2), np.arange(1, 40, 2)]
    members = [Member(seed=n, subset=ids) for n, ids in enumerate(halves)]
    found = train_many(
        Centred, DATA, members=members, max_epochs=1, batch_size=4, optimizer=SGD(learning_rate=0.1), device="cpu",
        executor="serial", **NORMALISED,
    )  # fmt: skip
    for own, ids in zip(found, halves, strict=True):
        assert torch.allclose(own.model.mean, mean_of(ids), atol=1e-6)


def test_trials_of_a_search_are_initialised() -> None:
    pytest.importorskip("optuna")
    found = Search(
        Centred, DATA, space={"optimizer.learning_rate": [0.01, 0.1]}, validation_data=DATA, max_epochs=1, batch_size=4,
        num_trials=1, method="none", executor="serial", device="cpu",
    ).run()  # fmt: skip
    assert isinstance(found.model, Centred)
    assert torch.allclose(found.model.mean, mean_of(range(40), mean=0, std=1), atol=1e-6)
