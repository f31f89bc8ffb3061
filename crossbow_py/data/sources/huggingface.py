"""Data as Hugging Face's `datasets` has them: of the hub, saved to disk, or in files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import setting
from crossbow_py.data.datasets import Data, as_pair, has_integers, split_validation
from crossbow_py.data.images.decoding import in_mode
from crossbow_py.data.images.transforms import Transforms
from crossbow_py.data.sources.base import DataSource, SourceSettings

# The kinds of files by the suffix of a path, as `load_dataset` calls them.
_KINDS = {
    ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow",
}  # fmt: skip
_SAVED = ("dataset_dict.json", "state.json")  # files of `save_to_disk`
_LABELS = ("label", "labels", "target")
_TEST_SPLITS = ("test", "validation")
_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "I;16N")
_LONGEST_REASON = 300


class Columns(NamedTuple):
    """The columns that are used, and the names of the classes in the order of their numbers, if there are any."""

    inputs: tuple[str, ...]
    label: str
    class_names: tuple[str, ...]


class _Read(NamedTuple):
    columns: Columns
    train: Data
    validation: Data | None
    test: Data
    notes: tuple[str, ...]


@dataclass(frozen=True)
class HuggingFace(SourceSettings):
    """Data of Hugging Face: a name on the hub, a folder of `save_to_disk`, or parquet, JSON, CSV or Arrow files."""

    NAME = "huggingface"

    path: str = setting("", "name on the hub, folder, or file, which may be a pattern such as 'data/*.parquet'")
    subset: str | None = setting(None, "configuration of a data set on the hub that has several")
    train_split: str = setting(
        "train", "split to train on; of the hub and of files also a part, on the command line '\"train[:80%]\"'"
    )
    validation_split: str | None = setting(None, "split to validate on; null is data.validation_fraction")
    test_split: str | None = setting(None, "split to test on; null is test, or else validation")
    input: str | tuple[str, ...] | None = setting(
        None, "column of the input, or a list, which a model gets by name; null is the image, or the only one left"
    )
    label: str | None = setting(None, "column of the target; null is the only one with classes, or label")
    mean: tuple[float, ...] | None = setting(None, "of the pixels in [0, 1], one number a colour; null for none")
    std: tuple[float, ...] | None = setting(None, "standard deviation of the same", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_split is not None and self.validation_fraction:
            split, fraction = self.validation_split, self.validation_fraction
            both = f"data.validation_split={split} and data.validation_fraction={fraction}"
            raise UserError(f"{both} both say what to validate on; leave one out.")

    def load(self, progress: bool) -> DataSource:
        """See `SourceSettings.load`. Downloads by `datasets`, into its cache."""
        found = self._read(progress)
        train, validation = split_validation(found.train, self.validation_fraction)
        if found.validation is not None:
            validation = found.validation
        names = found.columns.class_names
        num_classes = len(names) or self.count_classes(found.train, found.test)
        return self._source(train, found.test, validation, num_classes, found.notes, names or None)

    def read(self, progress: bool) -> tuple[Data, Data]:
        found = self._read(progress)
        return found.train, found.test

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        return self.mean, self.std

    def count_classes(self, train: Data, test: Data) -> int | None:
        """Return the largest integer target + 1, None if targets are no classes."""
        counts = [count for count in map(_num_classes, (train, test)) if count is not None]
        return max(counts) if counts else None

    def transforms(self) -> Transforms:
        """Return the transforms, which also make tensors of Pillow images."""
        return super().transforms() or Transforms()

    def _read(self, progress: bool) -> _Read:
        splits = self._splits(progress)
        train = splits(self.train_split, "train_split")
        columns, test_split = self._columns(train), self._test_split(splits)
        validation = None if self.validation_split is None else splits(self.validation_split, "validation_split")
        test = splits(test_split, "test_split")
        is_found = self.test_split is None and test_split != _TEST_SPLITS[0]
        notes = (f"Tests are on the split {test_split}, as {self.path} has no split test.",) if is_found else ()
        of_validation = None if validation is None else _data(validation, columns)
        return _Read(columns, _data(train, columns), of_validation, _data(test, columns), notes)

    def _test_split(self, splits: _Splits) -> str:
        if self.test_split is not None:
            return self.test_split
        found = [name for name in _TEST_SPLITS if name in splits.names and name != self.validation_split]
        if not found:
            remedy = "set data.test_split, as in data.train_split='\"train[:80%]\"' data.test_split='\"train[80%:]\"'"
            raise UserError(f"data.path={self.path} has no split to test on, but {', '.join(splits.names)}; {remedy}.")
        return found[0]

    def _splits(self, progress: bool) -> _Splits:
        """Return the splits of the data set. Raises UserError."""
        if not self.path:
            rule = "data.path must be a name on the hub, a folder or a file"
            raise UserError(f"{rule}, got nothing; set it, as in data.path=mnist.")
        try:
            import datasets  # noqa: PLC0415 - optional
        except ImportError as error:
            missing = "data=huggingface needs the package datasets, which is not installed"
            raise UserError(f'{missing}; pip install "crossbow_py[huggingface]".') from error
        if not progress:
            datasets.utils.disable_progress_bars()
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # else it tells of every retry
        path = given_path("data.path", self.path)
        try:
            if path.is_dir() and any((path / name).is_file() for name in _SAVED):
                _check_saved(self.path, path)
                # A format may be saved with rows: it leaves out columns, and makes arrays H x W x C of images.
                return _saved_splits(self.path, datasets.load_from_disk(str(path)).with_format(None))
            given = self._arguments(path)
            return _Splits(
                self.path, datasets.load_dataset(**given), lambda part: datasets.load_dataset(**given, split=part)
            )
        except UserError:
            raise
        except Exception as error:  # of the network, of the hub, of files: there are very many
            generating = isinstance(error, datasets.exceptions.DatasetGenerationError)  # it has no reason of its own
            reason = one_line((generating and error.__cause__) or error)[:_LONGEST_REASON]
            is_named = path.suffix.lower() not in _KINDS and not path.exists()
            nowhere = " is no file or folder here, and" if is_named else ""
            remedy = "check the name, data.subset, the network, and that every split has rows, or give files"
            raise UserError(f"data.path={self.path}{nowhere} cannot be loaded ({reason}); {remedy}.") from error

    def _arguments(self, path: Path) -> dict[str, Any]:
        """Return the arguments of `load_dataset`. Raises UserError for a file that is not there."""
        kind = _KINDS.get(path.suffix.lower())
        if kind is not None:
            if not path.exists() and "*" not in self.path:
                raise UserError(f"data.path={self.path} is not there; give a file, a folder, or a name on the hub.")
            options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
            return {"path": kind, "data_files": str(path), **options}
        return {"path": str(path) if path.exists() else self.path, "name": self.subset}

    def _columns(self, rows: Any) -> Columns:
        """Return the columns to use. Raises UserError where the settings and the data do not tell them."""
        features: Mapping[str, Any] = rows.features
        for key, asked in (("label", self.label), ("input", self.input)):
            for name in (asked,) if isinstance(asked, str) else asked or ():
                if name not in features:
                    raise UserError(f"data.{key}={name} is no column of {self.path}; it has {_shown(features)}.")
        label = self.label or self._found_label(features)
        inputs = (self.input,) if isinstance(self.input, str) else self.input or self._found_input(features, label)
        if label in inputs:
            raise UserError(f"data.input and data.label are both {label}; {self.path} has {_shown(features)}.")
        names = tuple(getattr(features[label], "names", None) or ())
        if _dtype(features[label]) == "string":
            names = tuple(sorted({str(name) for name in _column(rows, label)}))
        return Columns(inputs, label, names)

    def _found_label(self, features: Mapping[str, Any]) -> str:
        classes = [name for name, feature in features.items() if _kind(feature) == "ClassLabel"]
        found = classes if len(classes) == 1 else [name for name in _LABELS if name in features]
        if len(found) != 1:
            raise UserError(f"data.label must name the column of the target; {self.path} has {_shown(features)}.")
        return found[0]

    def _found_input(self, features: Mapping[str, Any], label: str) -> tuple[str, ...]:
        others = [name for name in features if name != label]
        found = [name for name in others if _kind(features[name]) == "Image"] or others
        if len(found) != 1:
            there = f"{self.path} has {_shown(features)}"
            raise UserError(f"data.input must name the column of the input, or a list of columns; {there}.")
        return (found[0],)


class _Splits:
    """The splits of a data set by name, and parts of them where these can be loaded."""

    def __init__(self, path: str, whole: Mapping[Any, Any], part: Callable[[str], Any] | None) -> None:
        self._path, self._part = path, part
        self._whole = {str(name): rows for name, rows in whole.items()}
        self.names = tuple(self._whole)

    def __call__(self, name: str, key: str) -> Any:
        """Return the rows of a split, or of a part such as `train[:80%]`. Raises UserError."""
        if name in self._whole:
            return self._whole[name]
        if "[" not in name:
            raise UserError(f"data.{key}={name} is no split of {self._path}; it has {', '.join(self.names)}.")
        if self._part is None:
            part = f"data.{key}={name} is a part of a split, which data saved to disk do not have"
            raise UserError(f"{part}; set data.validation_fraction, or save the parts.")
        try:
            return self._part(name)
        except Exception as error:
            reason, known = one_line(error)[:_LONGEST_REASON], ", ".join(self.names)
            raise UserError(f"data.{key}={name} cannot be loaded ({reason}); {self._path} has {known}.") from error


def _check_saved(path: str, folder: Path) -> None:
    """Raise UserError for a split of `save_to_disk` without rows, which `datasets` writes and cannot read."""
    for file in (folder / "state.json", *sorted(folder.glob("*/state.json"))):
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("_data_files") == []:
            name = "" if file.parent == folder else f" in its split {file.parent.name}"
            raise UserError(f"data.path={path} has no rows{name}; save it with some, or without that split.")


def _saved_splits(path: str, found: Any) -> _Splits:
    """Return the splits of what `save_to_disk` has written: several, or one without a dictionary."""
    return _Splits(path, found if isinstance(found, Mapping) else {str(found.split or "train"): found}, None)


class _ImageRows:
    """Rows with images as items (input, target), or ({name: input}, target) if there are several inputs.

    If the first image is in colour, all are; where it is grey, one in colour is an error, as it would lose that.

    Raises UserError for missing inputs.
    """

    def __init__(self, rows: Any, columns: Columns, targets: npt.NDArray[Any]) -> None:
        self._rows, self._columns, self.targets = rows.select_columns(list(columns.inputs)), columns, targets
        if columns.class_names:
            self.classes = columns.class_names
        for name in columns.inputs:
            _check_no_nulls(rows, name)
        first = self._rows[0]
        self._grey = {name: own.mode in _GREY for name, own in first.items() if isinstance(own, Image.Image)}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._rows[int(index)]
        values = {name: self._value(name, row[name]) for name in self._columns.inputs}
        return (values if len(values) > 1 else next(iter(values.values()))), torch.as_tensor(self.targets[index])

    def _value(self, name: str, value: Any) -> Any:
        if not isinstance(value, Image.Image):
            return torch.as_tensor(np.asarray(value))
        if self._grey[name] and value.mode not in _GREY:
            raise ValueError(f"{name} is in colour, and the first one is grey: cast the column to Image(mode='RGB')")
        return in_mode(value, "L" if self._grey[name] else "RGB")


def _data(rows: Any, columns: Columns) -> Data:
    """Return rows as a data set: with images as items, else as tensors. Raises UserError for what is no number."""
    targets = _targets(rows, columns)
    if any(_kind(rows.features[name]) == "Image" for name in columns.inputs):
        return _ImageRows(rows, columns, targets.numpy())
    values = {name: _tensor(rows, name) for name in columns.inputs}
    if len(values) > 1:
        return values, targets
    (only,) = values.values()
    return (only if only.ndim > 1 else only.unsqueeze(1)), targets


def _targets(rows: Any, columns: Columns) -> Tensor:
    """Return the targets; text becomes the number of its class."""
    if _dtype(rows.features[columns.label]) != "string":
        found = _tensor(rows, columns.label)
        return found.long() if found.dtype == torch.bool else found
    numbers, names = {name: number for number, name in enumerate(columns.class_names)}, _column(rows, columns.label)
    classes = [numbers.get(str(name), -1) for name in names]
    if -1 in classes:
        unknown = names[classes.index(-1)]
        has = f"data.label={columns.label} has {unknown!r} in a split to evaluate"
        raise UserError(f"{has}, which is no class of the training data; correct it, or leave it out.")
    return torch.tensor(classes)


def _num_classes(data: Any) -> int | None:
    """Return the largest class of a data set + 1, None if its targets are no classes."""
    pair = as_pair(data)
    targets = torch.as_tensor(data.targets) if pair is None else pair[1]
    return int(targets.max()) + 1 if targets.ndim == 1 and has_integers(targets) else None


def _column(rows: Any, name: str) -> Sequence[Any]:
    """Return the values of a column. Raises UserError for missing ones."""
    _check_no_nulls(rows, name)
    values: Sequence[Any] = rows.select_columns([name])[:][name]
    return values


def _tensor(rows: Any, name: str) -> Tensor:
    """Return a column of numbers, or of arrays of one shape, as a tensor. Raises UserError."""
    _check_no_nulls(rows, name)
    kind = _dtype(rows.features[name])
    try:
        array = np.asarray(rows.select_columns([name]).with_format("numpy")[:][name])
    except ValueError:  # lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        reason = "is not of numbers, or its lists are of different lengths: pad them"
        if kind == "string":
            reason = "is text, which no model takes: turn it into numbers"
        others = f"or set data.input and data.label; there are {_shown(rows.features)}"
        raise UserError(f"the column {name} {reason} (rows.map, save_to_disk), {others}.")
    return torch.from_numpy(np.array(array, dtype=np.uint8 if kind == "uint8" else None))  # a copy that may be written


def _check_no_nulls(rows: Any, name: str) -> None:
    """Raise UserError for a column with missing values, of which `datasets` makes NaN and None."""
    values = rows.select_columns([name]).with_format("arrow")[:][name]
    missing = sum(map(_num_nulls, values.chunks))
    if missing:
        has = f"the column {name} has {missing:,} missing value{'s' * (missing > 1)}"
        raise UserError(f"{has}; leave these rows out (rows.filter, save_to_disk), or fill them in.")


def _num_nulls(values: Any) -> int:
    """Return how many values of an array of Arrow's are missing, also within its lists, but not within its images."""
    values = getattr(values, "storage", values)  # of an extension type, as Array2D is
    found = int(values.null_count)
    is_list = hasattr(values, "value_lengths") or hasattr(values.type, "list_size")
    return found + (_num_nulls(values.flatten()) if is_list else 0)


def _kind(feature: Any) -> str:
    return type(feature).__name__


def _dtype(feature: Any) -> str | None:
    """Return the dtype of a column's values, of lists and arrays the innermost one."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    found = getattr(feature, "dtype", None)
    return "string" if found == "large_string" else found


def _shown(features: Mapping[str, Any]) -> str:
    """Return the columns with their kinds, for messages: `image (Image), label (ClassLabel)`."""
    kinds = {name: _dtype(own) if _kind(own) == "Value" else _kind(own) for name, own in features.items()}
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
