"""What holds for every model: its name and defaults in conf/, parameters, gradients, channels-last, what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import MODELS, MobileNet, alexnet, resnet_imagenet
from crossbow_py.models.airbench import AirbenchNet
from crossbow_py.models.alexnet import OneTower
from crossbow_py.models.densenet import DenseLayer, DenseNet
from crossbow_py.models.mobilenet import InvertedResidual, MobileNetV2
from crossbow_py.models.resnet3d import ResNet3d

BUILT_IN = {"mlp": (1, 8, 8), "lenet": (1, 16, 16), "resnet20": (3, 8, 8), "vgg16": (3, 32, 32)}
# Every family in a small form, for its smallest samples; few units save time and change no operator.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (lambda name=name: build(name), shape) for name, shape in BUILT_IN.items()},
    "lenet, wide": (lambda: MODELS["lenet"]().build((3, 32, 32), 10), (3, 32, 32)),
    "lenet, oblong": (lambda: MODELS["lenet"]().build((1, 16, 17), 10), (1, 16, 17)),
    "airbench": (lambda: AirbenchNet((4, 8, 8), 3, 10), (3, 17, 17)),
    "alexnet": (lambda: OneTower(3, 10, dropout=0.0), (3, 63, 63)),
    "densenet121": (lambda: DenseNet((1, 2, 1, 1), 3, 10), (3, 32, 32)),
    "densenet40": (lambda: MODELS["densenet40"]().build((1, 8, 8), 10), (1, 8, 8)),
    "mobilenet": (lambda: MobileNetV2(0.25, 3, 10), (3, 16, 16)),
    "resnet18": (lambda: MODELS["resnet18"]().build((3, 32, 32), 10), (3, 32, 32)),
    "resnet3d10": (lambda: ResNet3d((1, 1, 1, 1), 3, 10), (3, 8, 16, 16)),
}


def build(name: str) -> nn.Module:
    return MODELS[name]().build(BUILT_IN[name], 10).eval()


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Tensor]:
    """A family's small model, and two samples."""
    torch.manual_seed(3)
    with monkeypatch.context() as patched:
        patched.setattr(alexnet, "CLASSIFIER_UNITS", 16)
        if name == "resnet3d10":
            patched.setattr(resnet_imagenet, "STAGE_CHANNELS", (4, 6, 8, 8))
        make, shape = SMALL[name]
        return make(), torch.randn(2, *shape)


def resnet_count(depth: int) -> int:
    """The paper's table 6 networks: 3x3 convolutions without bias, two numbers a BatchNorm channel, ten classes."""
    total = 3 * 9 * 16 + 2 * 16 + 64 * 10 + 10
    for into, out in ((16, 16), (16, 32), (32, 64)):
        first, other = into * out * 9 + out * out * 9 + 2 * 2 * out, 2 * out * out * 9 + 2 * 2 * out
        total += first + ((depth - 2) // 6 - 1) * other
    return total


def densenet40_count() -> int:
    """DenseNet-BC, k = 12: a stem to 24 channels, three blocks of six layers, two transitions that halve channels."""
    total, width = 3 * 9 * 24, 24
    for block in range(3):
        if block:
            total += 2 * width + width * (width // 2)
            width //= 2
        for _ in range(6):
            total += 2 * width + width * 48 + 2 * 48 + 48 * 9 * 12
            width += 12
    return total + 2 * width + width * 10 + 10


def airbench_count() -> int:
    """24 filters of 2x2, two 3x3 convolutions a group with two numbers a BatchNorm channel, a head without a bias."""
    groups = ((24, 64), (64, 256), (256, 256))
    return 24 * 12 + sum(9 * out * (into + out) + 4 * out for into, out in groups) + 256 * 10


def resnet3d10_count() -> int:
    stem, first = 3 * 64 * 3 * 7 * 7 + 2 * 64, 2 * (27 * 64 * 64) + 2 * 64 * 2
    others = (27 * (into + out) * out + into * out + 3 * out * 2 for into, out in ((64, 128), (128, 256), (256, 512)))
    return stem + first + sum(others) + 512 * 10 + 10


def vgg16_count() -> int:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * into * out + 2 * out for into, out in itertools.pairwise(widths))
    return convolutions + (512 * 512 + 512) + (512 * 10 + 10)


# As published, or counted by hand.
PARAMETERS = [
    ("mlp", (1, 28, 28), 10, (784 * 256 + 256) + (256 * 256 + 256) + (256 * 10 + 10)),
    ("lenet", (1, 28, 28), 10, 431_080),
    *((f"resnet{depth}", (3, 32, 32), 10, resnet_count(depth)) for depth in (20, 32, 44, 56, 110)),
    ("resnet110", (3, 32, 32), 10, 1_727_962),
    ("resnet18", (3, 224, 224), 1000, 11_689_512),
    ("resnet34", (3, 224, 224), 1000, 21_797_672),
    ("resnet50", (3, 224, 224), 1000, 25_557_032),
    ("resnet101", (3, 224, 224), 1000, 44_549_160),
    ("resnet152", (3, 224, 224), 1000, 60_192_808),
    ("resnet3d10", (3, 16, 112, 112), 10, resnet3d10_count()),
    ("resnet3d18", (3, 16, 112, 112), 400, 33_371_472),
    ("alexnet", (3, 224, 224), 1000, 61_100_840),
    ("densenet121", (3, 224, 224), 1000, 7_978_856),
    ("densenet40", (3, 32, 32), 10, densenet40_count()),
    ("vgg16", (3, 32, 32), 10, vgg16_count()),
    ("airbench", (3, 32, 32), 10, airbench_count()),
]


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), PARAMETERS)
def test_parameters_match_what_is_published(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    with torch.device("meta"):
        model = MODELS[name]().build(shape, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("width", "parameters"), [(1.0, 3_504_872), (1.4, 6_108_776), (0.5, 1_968_680)])
def test_parameters_of_a_width_match_what_is_published_for_large_images(width: float, parameters: int) -> None:
    with torch.device("meta"):
        model = MobileNet(width=width).build((3, 32, 32), 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("make", "variance"),
    [
        (lambda: MODELS["resnet20"]().build((3, 32, 32), 10).blocks[-1].conv2, 2 / (9 * 64)),
        (lambda: MODELS["resnet18"]().build((3, 32, 32), 10).blocks[-1].branch[0], 2 / (9 * 512)),
        (lambda: DenseLayer(256).layer[2], 2 / 256),
        (lambda: InvertedResidual(16, 96, expansion=6, stride=1).layers[-2], 2 / 96),
    ],
    ids=["resnet20", "resnet18", "densenet", "mobilenet"],
)
def test_convolutions_after_building_have_the_standard_deviation_of_he(make: Callable, variance: float) -> None:
    weight = make().weight
    assert weight.std().item() == pytest.approx(math.sqrt(variance), rel=0.03)
    assert weight.mean().item() == pytest.approx(0, abs=0.05 * math.sqrt(variance))


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_reach_every_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(name, monkeypatch)
    kept = x.clone()
    logits = model.train()(x)
    gradients = torch.autograd.grad(logits.logsumexp(1).sum(), [own for own in model.parameters() if own.requires_grad])
    assert logits.shape == (2, 10)
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)
    assert torch.equal(x, kept)


FEATURES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "densenet121": lambda model: nn.Sequential(model.stem, model.blocks[:1]),
    "mobilenet": lambda model: model.features,
    "resnet18": lambda model: nn.Sequential(model.stem, model.blocks[:2]),
    "resnet20": lambda model: nn.Sequential(model.conv1, model.bn1, model.relu, model.blocks),
}


@pytest.mark.parametrize("name", [name for name, (_, shape) in SMALL.items() if len(shape) == 3])
def test_forward_in_channels_last_equals_the_default_layout_and_keeps_its_own(name: str, monkeypatch) -> None:
    model, x = small(name, monkeypatch)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        if name in FEATURES:
            assert FEATURES[name](model)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "needs", "shapes"),
    [
        ("lenet", "images .* 16x16", [(1, 8, 8)]),
        ("vgg16", "images .* 32x32", [(1, 28, 28)]),
        ("resnet20", "images .* 8x8", [(64,), (3, 4, 32), (2, 3, 32, 32)]),
        ("resnet50", "images .* 32x32", [(64,), (3, 28, 28)]),
        ("resnet3d10", "clips .* 8 frames of 16x16", [(3, 32, 32), (3, 7, 32, 32), (3, 8, 16, 15)]),
        ("alexnet", "images .* 63x63", [(3, 62, 64), (64,)]),
        ("densenet121", "images .* 32x32", [(64,), (3, 28, 28), (3, 8, 32, 32)]),
        ("densenet40", "images .* 8x8", [(3, 4, 4)]),
        ("mobilenet", "images .* 16x16", [(64,), (3, 12, 32), (3, 8, 32, 32)]),
    ],
)
def test_build_for_unfit_samples_is_refused_in_one_line(name: str, needs: str, shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        with pytest.raises(UserError, match=rf"^model={name} needs {needs} pixels, got samples of .*model=mlp") as said:
            MODELS[name]().build(shape, 10)
        assert str(shape) in str(said.value)


@pytest.mark.parametrize(("name", "side"), [("resnet20", 8), ("vgg16", 32), ("mobilenet", 16), ("densenet40", 8)])
def test_smallest_images_train_in_a_batch_of_one(name: str, side: int) -> None:
    model = MODELS[name]().build((3, side, side), 10).train()
    gradients = torch.autograd.grad(model(torch.randn(1, 3, side, side)).logsumexp(1).sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
