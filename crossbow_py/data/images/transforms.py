"""Transforms of images in worker processes: the user's own, such as those of torchvision and timm, and RandAugment.

A transform is a function of a Pillow image or a tensor. It may draw from the generators of Python, NumPy and torch,
which are seeded before each sample by the run's seed, the epoch and the sample: a run repeats whichever process calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from crossbow_py.core.errors import UserError, one_line, raised_at
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.settings import shown
from crossbow_py.core.targets import import_target, installing
from crossbow_py.data.images.decoding import channels_first

_ALIKE = "give data.transform and data.test_transform that make them alike"


class Form(NamedTuple):
    """The shape and dtype of an image."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, image: Tensor) -> Form:
        """Return those of a tensor."""
        return cls(tuple(image.shape), image.dtype)

    def __str__(self) -> str:
        """Return them for a message."""
        return f"{list(self.shape)} of {str(self.dtype).removeprefix('torch.')}"


class Transform:
    """A transform of images, and its name in messages: the setting that asks for it. It is sent to worker processes."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        self.name, self._function = name, function

    def __call__(self, image: Any, name: str) -> Any:
        """Return what becomes of an image, which messages call `name`. Raises UserError if the function fails."""
        try:
            return self._function(image)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.name} cannot take {name}, {_described(image)} ({one_line(error)}{raised_at(error)}); correct "
                "it, or give one for such images."
            ) from error


@dataclass(frozen=True)
class Transforms:
    """The transforms of a data set's images.

    Attributes:
        training: the user's own, for training images.
        evaluation: the user's own, for images to evaluate.
        rand_augment: follows the one for training, or takes its place.
    """

    training: Transform | None = None
    evaluation: Transform | None = None
    rand_augment: Transform | None = None

    def own(self, training: bool) -> Transform | None:
        """Return the user's own transform, None if there is none."""
        return self.training if training else self.evaluation

    def changes(self, training: bool) -> bool:
        """Return whether there is any transform."""
        return self.own(training) is not None or (training and self.rand_augment is not None)

    def name(self, training: bool) -> str:
        """Return the name of what makes the images, for messages."""
        last = (self.rand_augment if training else None) or self.own(training)
        return "the data set" if last is None else last.name

    def __call__(self, image: Any, training: bool, name: str, form: Form | None = None) -> Tensor:
        """Return a Pillow image or tensor, which messages call `name`, transformed: bytes or floating values [C, H, W].

        Raises UserError for anything else, and for an image of another form than `form`.
        """
        own = self.own(training)
        result = image if own is None else own(image, name)
        if training and self.rand_augment is not None:
            result = self.rand_augment(result, name)
        if isinstance(result, Image.Image):
            result = channels_first(result)
        fits = isinstance(result, Tensor) and result.ndim == 3
        if not fits or not (result.dtype == torch.uint8 or result.is_floating_point()):
            raise UserError(
                f"{self.name(training)} must give images as tensors [C, H, W] of bytes or floating values, got "
                f"{_described(result)} for {name}; end with torchvision.transforms.v2.ToImage, or torch.from_numpy."
            )
        if form is not None and Form.of(result) != form:
            raise UserError(
                f"{self.name(training)} must give images of one shape and dtype, got {Form.of(result)} for {name} and "
                f"{form} for the first one; give data.transform and data.test_transform that end with a crop."
            )
        plain: Tensor = result.as_subclass(Tensor)  # torchvision has classes of its own
        return plain

    def form(self, first_image: Callable[[bool], Tensor]) -> Form:
        """Return the form of images; `first_image` returns the first one for training (True) or to evaluate (False).

        Raises UserError if they differ.
        """
        with kept_generators():
            trained, evaluated = (Form.of(first_image(training)) for training in (True, False))
        if trained != evaluated:
            name = self.name(training=self.changes(training=True))
            raise UserError(f"{name}: training images are {trained}, and those to evaluate {evaluated}; {_ALIKE}.")
        return trained


def transform_of(key: str, entry: Mapping[str, Any]) -> Transform | None:
    """Return the transform that a target makes, with the keys beside it as its arguments; None for an empty entry.

    Raises UserError.
    """
    if not entry:
        return None
    path, given = entry.get("target"), {word: value for word, value in entry.items() if word != "target"}
    if not isinstance(path, str):
        raise UserError(
            f"{key} must have a target, the dotted name of what makes the transform, got {shown(dict(entry))}; set "
            f"{key}.target=package.module.name."
        )
    target, name = import_target(f"{key}.target", path), f"{key}.target={path}"
    try:
        function = target(**given)
    except UserError:
        raise
    except Exception as error:
        words = ", ".join(f"{key}.{own}" for own in given) or "no arguments"
        remedy = installing(error) or (
            f"the keys beside {key}.target are its arguments, and it returns the transform, a function of an image"
        )
        raise UserError(f"{name} cannot be called with {words} ({one_line(error)}); {remedy}.") from error
    if not callable(function):
        raise UserError(
            f"{name} must return a transform, got {type(function).__name__}; name a class such as "
            "torchvision.transforms.v2.RandomCrop, or a function that returns a function of an image."
        )
    return Transform(name, function)


def rand_augment_of(magnitude: int) -> Transform | None:
    """Return RandAugment of a magnitude, torchvision's; None for 0. Raises UserError without torchvision."""
    if not magnitude:
        return None
    name = f"data.rand_augment={magnitude}"
    try:
        from torchvision.transforms import v2  # noqa: PLC0415 - optional
    except (ImportError, RuntimeError) as error:  # the latter if it was built for another torch
        raise UserError(
            f"{name} needs torchvision, which cannot be imported ({one_line(error)}); pip install torchvision, or set "
            "data.rand_augment=0."
        ) from error
    return Transform(name, _OfBytes(name, v2.RandAugment(magnitude=magnitude)))


class _OfBytes:
    """A function of images in bytes, which refuses others."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        self._name, self._function = name, function

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, Image.Image) and getattr(image, "dtype", None) != torch.uint8:
            raise UserError(f"{self._name} is for bytes, got {_described(image)}; put RandAugment into data.transform.")
        return self._function(image)


def _described(image: Any) -> str:
    if isinstance(image, Image.Image):
        return "a Pillow image of {} x {} pixels, mode {}".format(*image.size, image.mode)
    return f"a tensor {Form.of(image)}" if isinstance(image, Tensor) else type(image).__name__
