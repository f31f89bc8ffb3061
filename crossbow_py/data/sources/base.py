"""A loaded data set (`DataSource`), and the settings that all sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting
from crossbow_py.data.augmentation import CUTMIX_HELP, ERASING_HELP, FLIP_HELP, MIXUP_HELP, Augmentation, Flip
from crossbow_py.data.datasets import Data, input_shape, split_validation
from crossbow_py.data.images.transforms import Transforms, rand_augment_of, transform_of
from crossbow_py.data.streaming.transformed import transformed

_NOT_NORMALISED = "Images are floating values of {}, and stay as they are: data.mean and data.std are not applied."

# The one-line meaning of a setting whose default differs between sources.
CROP_HELP = "pixels of zero padding around a training image before a random crop of its size; 0 for no crop"


@dataclass(frozen=True)
class DataSource:
    """A loaded data set: images uint8 [N, C, H, W] and targets int64 [N], or whatever a custom source returns.

    `mean` and `std` of pixels scaled to [0, 1] have one value per channel; None leaves inputs unnormalised.
    `num_classes` is None if the targets are no classes. `augmentation` is for `train` only. `class_names` are the
    names of the classes, if they are known.
    """

    name: str
    train: Data
    test: Data
    validation: Data | None
    num_classes: int | None
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    augmentation: Augmentation
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Declared:
    """The facts that are known of a data set without reading it.

    Attributes:
        input_shape: shape of a sample, which is stored as bytes.
        num_classes: number of classes.
        num_train, num_test: numbers of samples; None if only reading tells.
        resident: whether it lives on the device; else it is streamed.
        note: a sentence for the user on what was assumed.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_train: int | None
    num_test: int | None
    resident: bool
    note: str | None = None


@dataclass(frozen=True)
class SourceSettings(ABC):
    """Base of the settings of every source; `read` gets train and test."""

    GROUP: ClassVar[str] = "data"
    NAME: ClassVar[str]
    CLASS_NAMES: ClassVar[tuple[str, ...] | None] = None

    validation_fraction: float = setting(0.0, "part of the training data held out for validation", minimum=0, below=1)
    crop_padding: int = setting(0, CROP_HELP, minimum=0)
    flip: Flip = setting(False, FLIP_HELP)
    random_erasing: float = setting(0.0, ERASING_HELP, minimum=0, maximum=1)
    rand_augment: int = setting(
        0, "magnitude of RandAugment, two random operations on a training image; 0 for none, 9 is usual",
        minimum=0, maximum=30,
    )  # fmt: skip
    mixup: float = setting(0.0, MIXUP_HELP, minimum=0)
    cutmix: float = setting(0.0, CUTMIX_HELP, minimum=0)
    transform: dict[str, Any] = setting(
        {},
        "transform of training images in workers: data.transform.target=package.module.name makes it, with its "
        "arguments beside it, as in data.transform.size=32",
    )
    test_transform: dict[str, Any] = setting({}, "the same for images to evaluate")

    def __post_init__(self) -> None:
        check(self)

    def load(self, progress: bool) -> DataSource:
        """Read the data set, and download it if it is missing. `progress` shows downloads on stderr.

        Raises:
            UserError: files are missing, damaged or cannot be downloaded, or the settings do not fit the data.
        """
        train, test, *own = self.read(progress)
        num_classes, notes = self.count_classes(train, test), self.notes(train, test)
        train, validation = (train, own[0]) if own else split_validation(train, self.validation_fraction)
        return self._source(train, test, validation, num_classes, notes, self.CLASS_NAMES)

    def _source(
        self,
        train: Data,
        test: Data,
        validation: Data | None,
        num_classes: int | None,
        notes: tuple[str, ...],
        class_names: tuple[str, ...] | None,
    ) -> DataSource:
        """Return the source of data that were read, with their images transformed. Raises UserError."""
        mean, std = self.moments()
        if (transforms := self.transforms()) is not None:
            train, test = transformed(train, transforms, training=True), transformed(test, transforms, training=False)
            validation = None if validation is None else transformed(validation, transforms, training=False)
            form = getattr(train, "form", None)
            if form is not None and form.dtype.is_floating_point and mean is not None:
                notes = (*notes, _NOT_NORMALISED.format(transforms.name(training=True)))
                mean = std = None
        shape = input_shape(train)
        if len(shape) == 3 and self.crop_padding > min(shape[1:]):
            most = f"at most {min(shape[1:])}, the short side of the images"
            raise UserError(f"data.crop_padding must be {most}, got {self.crop_padding}; lower it.")
        own = self.augmentation
        return DataSource(
            self.NAME, train, test, validation, num_classes, shape, mean, std, own, notes, class_names
        )  # fmt: skip

    @property
    def augmentation(self) -> Augmentation:
        """Return the augmentation of training images."""
        return Augmentation(self.crop_padding, self.flip, self.random_erasing, self.mixup, self.cutmix)

    def transforms(self) -> Transforms | None:
        """Return the transforms of images that workers call, None if there are none. Raises UserError."""
        found = Transforms(
            transform_of("data.transform", self.transform),
            transform_of("data.test_transform", self.test_transform),
            rand_augment_of(self.rand_augment),
        )
        return found if found.changes(training=True) or found.changes(training=False) else None

    @abstractmethod
    def read(self, progress: bool) -> tuple[Data, Data] | tuple[Data, Data, Data]:
        """Return (train, test), before anything is held out; or (train, test, validation)."""

    @abstractmethod
    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Return (mean, std) to normalise with."""

    @abstractmethod
    def count_classes(self, train: Data, test: Data) -> int | None:
        """Return the number of classes, None if the targets are no classes."""

    def declared(self) -> Declared | None:
        """Return what is known without reading anything; None for data that must be read or transformed."""
        return None if self.transform or self.test_transform or self.rand_augment else self._declared()

    def _declared(self) -> Declared | None:
        return None

    def notes(self, train: Data, test: Data) -> tuple[str, ...]:
        """Return sentences for the user on how the data was loaded."""
        return ()


class PublishedSettings(SourceSettings):
    """Settings of a published data set, whose shape, number of classes and moments are known."""

    CLASSES: ClassVar[int] = 10
    MEAN: ClassVar[tuple[float, ...]]
    STD: ClassVar[tuple[float, ...]]
    SHAPE: ClassVar[tuple[int, ...]]
    NUM_TRAIN: ClassVar[int]
    NUM_TEST: ClassVar[int]

    def _declared(self) -> Declared | None:
        return Declared(self.SHAPE, self.CLASSES, self.NUM_TRAIN, self.NUM_TEST, resident=True)

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        return self.MEAN, self.STD

    def count_classes(self, train: Data, test: Data) -> int | None:
        """Return the published number of classes, even if a small part of the data set lacks some."""
        return self.CLASSES


@dataclass(frozen=True)
class DownloadedSettings(PublishedSettings):
    """Settings of a published data set that is found in a folder or downloaded into it."""

    root: str | None = setting(None, "folder of data sets; null is $CROSSBOW_DATA_DIR, else ~/.cache/crossbow_py")
    download: bool = setting(True, "download what is not found there")
