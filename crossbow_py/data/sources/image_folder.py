"""The data source of images in folders `train/<class>/*` and `val/<class>/*`, the layout of ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import setting
from crossbow_py.data.augmentation import FLIP_HELP, Flip
from crossbow_py.data.datasets import Data
from crossbow_py.data.images.cache import Opened, open_or_fill
from crossbow_py.data.images.folder import ImageFiles, count, scan
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.base import Declared, SourceSettings
from crossbow_py.data.sources.downloads import data_folders, find

# The usual moments of ImageNet's training images.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ASSUMED_CLASSES = 1000
_LARGEST = 2**14  # pixels of a side
_MOST_COUNTED = 100_000  # files are counted up to here for `declared`


@dataclass(frozen=True)
class ImageFolder(SourceSettings):
    """Images in folders, train/<class>/* and val/<class>/*, decoded while training."""

    NAME = "image_folder"

    crop_padding: int = setting(0, "must be 0: training crops are random and resized", minimum=0)
    flip: Flip = setting(True, FLIP_HELP)
    folder: str = setting("", "folder with the images: a path, or its name in the folder of data sets")
    root: str | None = setting(None, "folder of data sets; null is $CROSSBOW_DATA_DIR, else ~/.cache/crossbow_py")
    train: str = setting("train", "folder in it with the training images, one folder a class")
    val: str = setting("val", "the same for the images to test on")
    size: int = setting(224, "height and width of the crops", minimum=1, maximum=_LARGEST)
    resize: int = setting(
        256, "short side an image is resized to before its centre is evaluated", minimum=1, maximum=_LARGEST
    )
    min_area: float = setting(0.08, "smallest part of an image's area a training crop shows", above=0, maximum=1)
    mean: tuple[float, ...] = setting(_MEAN, "of the pixels in [0, 1], one number a colour")
    std: tuple[float, ...] = setting(_STD, "standard deviation of the same", above=0)
    max_bad_images: int = setting(0, "images that cannot be read and are passed over before training stops", minimum=0)
    worker_timeout_s: float = setting(120.0, "a data worker that is longer over one image hangs", above=0)
    cache: bool = setting(False, "crop from images resized to `resize`, decoded once and kept in a file")
    cache_dir: str | None = setting(None, "folder of that file; null is images in the user's cache folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_padding:
            rule = f"data.crop_padding must be 0 for data.name={self.NAME}, got {self.crop_padding}"
            raise UserError(f"{rule}; leave it out, and set data.min_area for how much training crops vary.")
        if self.resize < self.size:
            raise UserError(f"data.resize must be at least data.size={self.size}, got {self.resize}; enlarge it.")
        for name in ("mean", "std"):
            values = list(getattr(self, name))
            if len(values) != 3:
                raise UserError(f"data.{name} must be three numbers, got {values}; write one a colour.")

    def read(self, progress: bool) -> tuple[Data, Data]:
        """Return (train, val), and fill the cache if it is wanted and not filled yet."""
        train, val = scan(self._folder(), self.train, self.val)
        return self._data(train, progress), self._data(val, progress)

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        return self.mean, self.std

    def count_classes(self, train: Data, test: Data) -> int | None:
        assert isinstance(train, ImageFolderData), "given what `read` returns"
        return len(train.classes)

    def _declared(self) -> Declared | None:
        """Return the shape of crops and the counted classes and files; without a folder, ImageNet's classes."""
        shape = (3, self.size, self.size)
        found = self._found() if self.folder else None
        if found is None:
            note = f"data.folder={self.folder!r} is not there: {_ASSUMED_CLASSES} classes are assumed, as in ImageNet."
            return Declared(shape, _ASSUMED_CLASSES, None, None, resident=False, note=note)
        num_classes, num_train = count(found / self.train, _MOST_COUNTED)
        return Declared(shape, num_classes, num_train, None, resident=False)

    def notes(self, train: Data, test: Data) -> tuple[str, ...]:
        assert isinstance(train, ImageFolderData), "given what `read` returns"
        assert isinstance(test, ImageFolderData), "given what `read` returns"
        return tuple(dict.fromkeys([*train.notes, *test.notes]))

    def _folder(self) -> Path:
        if not self.folder:
            rule = f"data.folder must name a folder with {self.train}/<class>/* and {self.val}/<class>/*"
            raise UserError(f"{rule}, got ''; write data.folder=PATH.")
        found = self._found()
        if found is None:
            folders = ", ".join(map(str, data_folders(self.root)))
            looked = "" if Path(self.folder).is_absolute() else f" in {folders} or the current folder"
            remedy = f"write the folder that holds {self.train} and {self.val}, or set data.root"
            raise UserError(f"data.folder={self.folder} is not there{looked}; {remedy}.")
        return found

    def _found(self) -> Path | None:
        """Return the folder, looked for in the folders of data sets and then in the current one."""
        return find((str(given_path("data.folder", self.folder)),), (*data_folders(self.root), Path.cwd()))

    def _data(self, files: ImageFiles, progress: bool) -> ImageFolderData:
        opened = Opened(None)
        if self.cache:
            folder = given_path("data.cache_dir", self.cache_dir) if self.cache_dir else None
            opened = open_or_fill(files, self.resize, folder, timeout_s=self.worker_timeout_s, progress=progress)
        return ImageFolderData(
            files,
            size=self.size,
            resize=self.resize,
            min_area=self.min_area,
            max_bad=self.max_bad_images,
            timeout_s=self.worker_timeout_s,
            shrinks=self.cache,
            cache=opened.cache,
            notes=opened.notes,
        )
