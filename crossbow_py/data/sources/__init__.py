"""The data sources by name: the choices of the config group `data`."""

from __future__ import annotations

from crossbow_py.data.sources.base import DataSource, SourceSettings
from crossbow_py.data.sources.cifar import Cifar10, Cifar100
from crossbow_py.data.sources.custom import Custom
from crossbow_py.data.sources.digits import Digits
from crossbow_py.data.sources.huggingface import HuggingFace
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.sources.mnist import FashionMnist, Mnist
from crossbow_py.data.sources.synthetic import Synthetic
from crossbow_py.data.sources.text import Text

__all__ = ["SOURCES", "DataSource", "SourceSettings"]

SOURCES: dict[str, type[SourceSettings]] = {
    source.NAME: source
    for source in (Digits, Mnist, FashionMnist, Cifar10, Cifar100, ImageFolder, HuggingFace, Text, Synthetic, Custom)
}
