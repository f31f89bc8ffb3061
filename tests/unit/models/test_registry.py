"""What holds for every model: its name, its defaults in conf/, channels-last, and being exportable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from crossbow_py.core.settings import from_mapping, to_mapping
from crossbow_py.models import MODELS

CONF = Path(__file__).parents[3] / "conf" / "model"
BUILT_IN = {"mlp": (1, 8, 8), "lenet": (1, 16, 16), "resnet20": (3, 8, 8), "vgg16": (3, 32, 32)}


def build(name: str) -> nn.Module:
    return MODELS[name]().build(BUILT_IN[name], 10).eval()


@pytest.mark.parametrize("name", MODELS)
def test_defaults_in_conf_equal_those_of_the_settings(name: str) -> None:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert values.pop("name") == name == MODELS[name].NAME
    assert values == to_mapping(MODELS[name]())
    assert from_mapping(MODELS[name], values, "model") == MODELS[name]()


@pytest.mark.parametrize("name", BUILT_IN)
def test_forward_in_channels_last_equals_the_default_layout(name: str) -> None:
    model, x = build(name), torch.randn(2, *BUILT_IN[name])
    with torch.no_grad():
        expected = model(x)
        actual = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_resnet_in_channels_last_keeps_that_layout_through_the_shortcut() -> None:
    model = build("resnet20").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    features = nn.Sequential(model.conv1, model.bn1, model.relu, model.blocks)(x)
    assert features.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet20"])
def test_export_in_training_mode_gives_the_same_logits(name: str) -> None:
    model, x = build(name).train(), torch.randn(2, *BUILT_IN[name])
    exported = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("name", BUILT_IN)
def test_build_after_the_same_seed_gives_the_same_weights(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(build(name).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
