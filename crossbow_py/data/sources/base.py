"""What a data source gives (`DataSource`) and what the settings of all sources have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting
from crossbow_py.data.augmentation import ERASING_HELP, FLIP_HELP, Augmentation, Flip
from crossbow_py.data.datasets import Data, input_shape, split_validation

# The one-line meaning of a field whose default differs between sources.
CROP_HELP = "pixels of zero padding around a training image before a random crop of its size; 0 for no crop"


@dataclass(frozen=True)
class DataSource:
    """A data set, loaded: images are uint8 [N, C, H, W] and targets int64 [N], or what a custom source returns.

    `mean` and `std`, of pixels scaled to [0, 1], have one value a channel; None leaves inputs unnormalised.
    `num_classes` is None when the targets are no classes. `augmentation` is for `train` alone. `class_names` are what
    people call the classes, where that is known.
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
    """What is known of a data set before any of it is read.

    Attributes:
        input_shape: of a sample, which is stored as bytes.
        num_classes: of the targets.
        num_train, num_test: samples; None where only reading would tell.
        resident: whether it lies on the device; else it is streamed.
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
    """Settings every source has. A source says in `read` where train and test come from."""

    GROUP: ClassVar[str] = "data"
    NAME: ClassVar[str]
    CLASS_NAMES: ClassVar[tuple[str, ...] | None] = None

    validation_fraction: float = setting(0.0, "part of the training data held out for validation", minimum=0, below=1)
    crop_padding: int = setting(0, CROP_HELP, minimum=0)
    flip: Flip = setting(False, FLIP_HELP)
    random_erasing: float = setting(0.0, ERASING_HELP, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check(self)

    def load(self, progress: bool) -> DataSource:
        """Read (and, where needed, download) the data set. `progress` shows downloads on stderr.

        Raises:
            UserError: files are missing, damaged or cannot be downloaded, or the settings do not fit the data.
        """
        train, test = self.read(progress)
        num_classes, notes = self.count_classes(train, test), self.notes(train, test)
        train, validation = split_validation(train, self.validation_fraction)
        mean, std = self.moments()
        shape = input_shape(train)
        if len(shape) == 3 and self.crop_padding > min(shape[1:]):
            raise UserError(
                f"data.crop_padding must be at most {min(shape[1:])}, the short side of the images, got "
                f"{self.crop_padding}; lower it."
            )
        return DataSource(
            name=self.NAME,
            train=train,
            test=test,
            validation=validation,
            num_classes=num_classes,
            input_shape=shape,
            mean=mean,
            std=std,
            augmentation=self.augmentation,
            notes=notes,
            class_names=self.CLASS_NAMES,
        )

    @property
    def augmentation(self) -> Augmentation:
        """What is done to training images."""
        return Augmentation(self.crop_padding, self.flip, self.random_erasing)

    @abstractmethod
    def read(self, progress: bool) -> tuple[Data, Data]:
        """(train, test), before anything is held out."""

    @abstractmethod
    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """(mean, std) to normalise with."""

    @abstractmethod
    def count_classes(self, train: Data, test: Data) -> int | None:
        """Number of classes."""

    def declared(self) -> Declared | None:
        """What is known without reading anything; None for data that must be read."""
        return None

    def notes(self, train: Data, test: Data) -> tuple[str, ...]:
        """Sentences for the user on how what `read` gave was loaded."""
        return ()


@dataclass(frozen=True)
class PublishedSettings(SourceSettings):
    """A published data set whose shape, number of classes and moments are known."""

    CLASSES: ClassVar[int] = 10
    MEAN: ClassVar[tuple[float, ...]]
    STD: ClassVar[tuple[float, ...]]
    SHAPE: ClassVar[tuple[int, ...]]
    NUM_TRAIN: ClassVar[int]
    NUM_TEST: ClassVar[int]

    def declared(self) -> Declared | None:
        """As published."""
        return Declared(self.SHAPE, self.CLASSES, self.NUM_TRAIN, self.NUM_TEST, resident=True)

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Of the published training set."""
        return self.MEAN, self.STD

    def count_classes(self, train: Data, test: Data) -> int | None:
        """As published, also when a small part of the data set lacks some."""
        return self.CLASSES


@dataclass(frozen=True)
class DownloadedSettings(PublishedSettings):
    """A published data set that is found in a folder or downloaded into it."""

    root: str | None = setting(None, "folder of data sets; null is $CROSSBOW_DATA_DIR, else ~/.cache/crossbow_py")
    download: bool = setting(True, "download what is not found there")
