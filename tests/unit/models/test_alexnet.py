"""AlexNet: positions, names of published weights, pooling before ReLU, dropout as modules. The rest: test_registry."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.models import alexnet
from crossbow_py.models.alexnet import OneTower


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> OneTower:
    monkeypatch.setattr(alexnet, "CLASSIFIER_UNITS", 16)
    torch.manual_seed(1)
    return OneTower(3, 10, dropout=0.5)


def test_features_of_224_pixels_have_six_positions_a_side() -> None:
    with torch.device("meta"):
        assert OneTower(3, 10, 0.5).features(torch.empty(2, 3, 224, 224)).shape == (2, 256, 6, 6)


def test_names_and_shapes_of_parameters_are_those_of_published_weights() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in OneTower(3, 1000, 0.0).state_dict().items()}
    weights = {
        "features.0": (64, 3, 11, 11), "features.3": (192, 64, 5, 5), "features.6": (384, 192, 3, 3),
        "features.8": (256, 384, 3, 3), "features.10": (256, 256, 3, 3), "classifier.1": (4096, 9216),
        "classifier.4": (4096, 4096), "classifier.6": (1000, 4096),
    }  # fmt: skip
    expected = {f"{layer}.weight": shape for layer, shape in weights.items()}
    assert shapes == expected | {f"{layer}.bias": shape[:1] for layer, shape in weights.items()}
