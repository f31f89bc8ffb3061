"""Models, one family a file, and their registry: `MODELS[name](...).build(input_shape, num_classes)`."""

from __future__ import annotations

from crossbow_py.models.airbench import Airbench
from crossbow_py.models.alexnet import AlexNet
from crossbow_py.models.base import ModelSettings
from crossbow_py.models.custom import CustomModel
from crossbow_py.models.densenet import DenseNet40, DenseNet121
from crossbow_py.models.gpt import GPT
from crossbow_py.models.lenet import LeNet
from crossbow_py.models.mlp import MLP
from crossbow_py.models.mobilenet import MobileNet
from crossbow_py.models.resnet import ResNet20, ResNet32, ResNet44, ResNet56, ResNet110
from crossbow_py.models.resnet3d import ResNet3d10, ResNet3d18
from crossbow_py.models.resnet_imagenet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152
from crossbow_py.models.vgg import VGG16

MODELS: dict[str, type[ModelSettings]] = {
    cls.NAME: cls
    for cls in (
        *(MLP, LeNet, ResNet20, ResNet32, ResNet44, ResNet56, ResNet110, VGG16),
        *(ResNet18, ResNet34, ResNet50, ResNet101, ResNet152),
        *(AlexNet, DenseNet40, DenseNet121, MobileNet, ResNet3d10, ResNet3d18),
        *(Airbench, GPT, CustomModel),
    )
}

__all__ = [
    "GPT", "MLP", "MODELS", "VGG16", "Airbench", "AlexNet", "CustomModel", "DenseNet40", "DenseNet121", "LeNet",
    "MobileNet", "ModelSettings", "ResNet3d10", "ResNet3d18", "ResNet18", "ResNet20", "ResNet32", "ResNet34",
    "ResNet44", "ResNet50", "ResNet56", "ResNet101", "ResNet110", "ResNet152",
]  # fmt: skip
