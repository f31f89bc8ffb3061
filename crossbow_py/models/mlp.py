"""Multi-layer perceptron: flattens any input, then linear layers with ReLU between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings


@dataclass(frozen=True)
class MLP(ModelSettings):
    """Fully connected network. An empty `hidden` is logistic regression."""

    NAME = "mlp"

    hidden: tuple[int, ...] = setting(
        (256, 256), "units of each hidden layer; an empty list is logistic regression", minimum=1
    )
    dropout: float = setting(0.0, "share of hidden units dropped while training", minimum=0, below=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for units in self.hidden:
            layers += [nn.Linear(width, units), nn.ReLU(inplace=True)]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            width = units
        return nn.Sequential(*layers, nn.Linear(width, num_classes))
