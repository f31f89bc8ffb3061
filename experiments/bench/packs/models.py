"""The models that packs consist of: some of the zoo and a few small ones, by names that say all of their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from crossbow_py.models import MLP, MobileNet
from crossbow_py.models import MODELS as ZOO

FIVE_LAYERS_WIDTH = 16
RECURRENT_UNITS = 64
LAYER_UNITS = 256  # a layer is wider than the data set has classes
FIVE_LAYERS_WIDTHS = (8, 32, 128)
MLP_UNITS = (64, 256, 2048)
MOBILENET_WIDTH = 0.25
# The zoo's, as they are.
_FROM_ZOO = ("mlp", "lenet", "resnet20", "resnet32", "densenet40")
_ON_MNIST = ("layer", "mlp", "lenet", "lstm", "gru", *(f"mlp_{units}" for units in MLP_UNITS))

ImageShape = tuple[int, int, int]
Build = Callable[[ImageShape, int], nn.Module]


class RowReader(nn.Module):
    """Reads images row by row: `[B, C, H, W]` → an LSTM or GRU, H steps of C·W values → logits `[B, num_classes]`."""

    def __init__(self, cells: type[nn.LSTM | nn.GRU], image: ImageShape, num_classes: int) -> None:
        super().__init__()
        channels, _, width = image
        self.cells = cells(channels * width, RECURRENT_UNITS, batch_first=True)
        self.head = nn.Linear(RECURRENT_UNITS, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, from what the cells say after the last row."""
        rows = x.transpose(1, 2).flatten(2)
        logits: Tensor = self.head(self.cells(rows)[0][:, -1])
        return logits


def five_layers(width: int, image: ImageShape, num_classes: int) -> nn.Module:
    """AlexNet's beginning and end, for 32x32 images: three convolutions with a pooling each, two linear layers."""
    channels, height, _ = image
    for _ in range(3):
        height = (height - 3) // 2 + 1
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2), *_pooled(),
        nn.Conv2d(width, 2 * width, 5, padding=2), *_pooled(),
        nn.Conv2d(2 * width, 3 * width, 3, padding=1), *_pooled(),
        nn.Flatten(),
        nn.Linear(3 * width * height**2, 4 * width), nn.ReLU(inplace=True),
        nn.Linear(4 * width, num_classes),
    )  # fmt: skip


def _pooled() -> list[nn.Module]:
    return [nn.MaxPool2d(3, stride=2), nn.ReLU(inplace=True)]


def _layer(image: ImageShape, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image), num_classes))


def _five_layers_of(width: int) -> Build:
    return lambda image, num_classes: five_layers(width, image, num_classes)


def _rows_by(cells: type[nn.LSTM | nn.GRU]) -> Build:
    return lambda image, num_classes: RowReader(cells, image, num_classes)


BUILDS: dict[str, Build] = {
    **{name: ZOO[name]().build for name in _FROM_ZOO},
    "mobilenet": MobileNet(width=MOBILENET_WIDTH).build,
    "layer": _layer,
    "five_layers": _five_layers_of(FIVE_LAYERS_WIDTH),
    "lstm": _rows_by(nn.LSTM),
    "gru": _rows_by(nn.GRU),
    **{f"five_layers_{width}": _five_layers_of(width) for width in FIVE_LAYERS_WIDTHS},
    **{f"mlp_{units}": MLP(hidden=(units, units)).build for units in MLP_UNITS},
}


def classes_of(model: str, num_classes: int) -> int:
    """Return the number of a model's outputs, of which the data set uses `num_classes`."""
    return LAYER_UNITS if model == "layer" else num_classes


def data_of(model: str) -> str:
    return "mnist" if model in _ON_MNIST else "cifar10"
