"""Data of Hugging Face, made here: images, numbers and words, saved to disk and in files, and what is refused."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from crossbow_py.cli.overrides import parse
from crossbow_py.core.errors import UserError
from crossbow_py.data.build import make_feed
from crossbow_py.data.sources.huggingface import HuggingFace
from crossbow_py.data.streaming.transformed import TransformedData


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'not installed; pip install "crossbow_py\[huggingface\]"'):
        HuggingFace(path="mnist").load(False)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.path must be a name on the hub, a folder or a file"):
        HuggingFace().load(False)
    with pytest.raises(UserError, match=r"validation_split=dev and data\.validation_fraction=0\.1 both say"):
        HuggingFace(path="x", validation_split="dev", validation_fraction=0.1)


class _FormattedRows:
    """What `datasets` reads of a folder that was saved with a format: arrays for images, until told otherwise."""

    def __init__(self, form: str | None, names: tuple[str, ...] = ("image", "label")) -> None:
        self.form, self.names = form, names
        kinds = {"image": type("Image", (), {})(), "label": type("ClassLabel", (), {"names": ["ant", "bee"]})()}
        self.features, self.split = {name: kinds[name] for name in names}, None

    def with_format(self, form: str | None) -> _FormattedRows:
        return _FormattedRows(form, self.names)

    def select_columns(self, names: list[str]) -> _FormattedRows:
        return _FormattedRows(self.form, tuple(names))

    def __getitem__(self, place: int | slice) -> dict[str, Any]:
        image, labels = Image.new("RGB", (5, 4), (10, 20, 30)), np.arange(2)
        if self.form == "arrow":
            return {self.names[0]: SimpleNamespace(chunks=[SimpleNamespace(null_count=0, type=None)])}
        row = {"image": image if self.form is None else np.asarray(image), "label": labels}
        return {name: row[name] for name in self.names}


def test_images_saved_with_a_format_are_read_as_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        utils=SimpleNamespace(disable_progress_bars=lambda: None),
        load_from_disk=lambda _: _FormattedRows("numpy"),
    )
    monkeypatch.setitem(sys.modules, "datasets", package)
    (tmp_path / "state.json").write_text("{}")
    source = HuggingFace(path=str(tmp_path), test_split="train").load(False)
    assert source.train[0][0][:, 0, 0].tolist() == [10, 20, 30]
    assert source.input_shape == (3, 4, 5)


class TestWithDatasets:
    """What needs the package."""

    @pytest.fixture(autouse=True)
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No network, and a cache of its own."""
        self.datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(self.datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(self.datasets.config, "HF_HUB_OFFLINE", True)
        self.folder = tmp_path

    def images(self, modes: tuple[str, ...] = ("RGB",) * 6, labels: bool = True, **columns: list[Any]) -> Any:
        """Image i of 5 x 4 pixels is filled with 10·i; its class is i mod 3."""
        own = [Image.new("L", (5, 4), 10 * place).convert(mode) for place, mode in enumerate(modes)]
        datasets, rows = self.datasets, {"image": own, **columns}
        features = {"image": datasets.Image(), **{name: datasets.Value("float32") for name in columns}}
        if labels:
            rows["label"] = [place % 3 for place in range(len(modes))]
            features["label"] = datasets.ClassLabel(names=["ant", "bee", "cat"])
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    def saved(self, train: Any, test: Any, **others: Any) -> str:
        path = self.folder / "saved"
        self.datasets.DatasetDict({"train": train, "test": test, **others}).save_to_disk(path)
        return str(path)

    def files(self, rows: dict[str, Any], test: dict[str, Any] | None = None, kind: str = "parquet") -> str:
        folder = self.folder / "files"
        folder.mkdir()
        for name, own in (("train", rows), ("test", test or rows)):
            made = self.datasets.Dataset.from_dict(own)
            {"parquet": made.to_parquet, "csv": made.to_csv, "json": made.to_json}[kind](folder / f"{name}.{kind}")
        return str(folder)

    def test_images_are_found_and_stream_as_bytes_with_the_names_of_their_classes(self) -> None:
        source = HuggingFace(path=self.saved(self.images(), self.images(("RGB",) * 3))).load(False)
        assert isinstance(source.train, TransformedData)
        assert (source.num_classes, source.class_names, source.input_shape) == (3, ("ant", "bee", "cat"), (3, 4, 5))
        assert (len(source.train), len(source.test), source.validation, source.notes) == (6, 3, None, ())
        for workers in (0, 1):
            feed = make_feed(source.train, 6, 0, num_workers=workers)
            batch = feed.batch(0)
            order = (batch.inputs[:, 0, 0, 0] * 25.5).round().long()
            assert sorted(order.tolist()) == list(range(6))
            assert torch.equal(batch.targets, order % 3)
            assert torch.equal((batch.inputs * 255).round(), (10.0 * order).view(-1, 1, 1, 1).expand(-1, 3, 4, 5))
            feed.close()

    def test_grey_images_have_one_channel_and_grey_ones_among_colours_three(self) -> None:
        grey = HuggingFace(path=self.saved(self.images(("L",) * 4), self.images(("L",) * 2))).load(False)
        assert grey.input_shape == (1, 4, 5)

    def test_grey_images_among_colours_have_three_channels(self) -> None:
        mixed = self.images(("RGB", "L", "RGB", "LA"))
        source = HuggingFace(path=self.saved(mixed, mixed)).load(False)
        assert [source.train[place][0].shape[0] for place in range(4)] == [3] * 4
        assert source.train[1][0].unique().tolist() == [10]

    def test_a_colour_image_among_grey_ones_is_an_error_with_its_number(self) -> None:
        mixed = self.images(("L", "L", "RGB"))
        source = HuggingFace(path=self.saved(mixed, mixed)).load(False)
        feed = make_feed(source.train, 3, 0)
        with pytest.raises(UserError, match=r"item 2 of the data set cannot be read \(ValueError: image is in colour"):
            feed.batch(0)

    def test_a_validation_split_and_parts_of_splits_are_taken_where_they_are(self) -> None:
        own = self.images()
        path = self.saved(own, own, validation=self.images(("RGB",) * 2))
        source = HuggingFace(path=path, validation_split="validation").load(False)
        assert (len(source.train), len(source.validation), len(source.test)) == (6, 2, 6)
        source = HuggingFace(path=path, validation_fraction=0.5).load(False)
        assert (len(source.train), len(source.validation)) == (3, 3)
        with pytest.raises(UserError, match=r"train_split=train\[:50%\] is a part of a split, which data saved"):
            HuggingFace(path=path, train_split="train[:50%]").load(False)
        with pytest.raises(UserError, match=r"test_split=tests is no split of .*; it has train, test, validation"):
            HuggingFace(path=path, test_split="tests").load(False)

    def test_validation_stands_in_for_a_test_split_and_is_told(self) -> None:
        path = str(self.folder / "saved")
        self.datasets.DatasetDict({"train": self.images(), "validation": self.images()}).save_to_disk(path)
        (note,) = HuggingFace(path=path).load(False).notes
        assert note.startswith("Tests are on the split validation, as ")

    def test_one_split_without_a_test_is_an_error_that_names_the_splits(self) -> None:
        self.images().save_to_disk(self.folder / "one")
        with pytest.raises(UserError, match="has no split to test on, but train; set data.test_split"):
            HuggingFace(path=str(self.folder / "one")).load(False)

    def test_empty_file_is_an_error_with_the_reason(self) -> None:
        (self.folder / "empty.csv").touch()
        with pytest.raises(UserError, match=r"empty\.csv cannot be loaded \(EmptyDataError: No columns to parse from"):
            HuggingFace(path=str(self.folder / "empty.csv")).load(False)

    def test_several_inputs_reach_a_model_by_name(self) -> None:
        own = self.images(age=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        source = HuggingFace(path=self.saved(own, own), input=("image", "age")).load(False)
        inputs, target = source.train[4]
        assert (sorted(inputs), float(inputs["age"]), int(target)) == (["age", "image"], 5.0, 1)
        assert make_feed(source.train, 3, 0).batch(0).inputs["image"].shape == (3, 3, 4, 5)

    def test_two_images_of_a_sample_may_be_of_two_sizes_and_are_not_transformed(self) -> None:
        datasets, sizes = self.datasets, {"left": (5, 4), "right": (2, 3)}
        rows = {name: [Image.new("RGB", size, 10 * n) for n in range(4)] for name, size in sizes.items()}
        features = datasets.Features({**dict.fromkeys(sizes, datasets.Image()), "label": datasets.Value("int64")})
        own = datasets.Dataset.from_dict({**rows, "label": [0, 1, 0, 1]}, features=features)
        path = self.saved(own, own)
        batch = make_feed(HuggingFace(path=path, input=("left", "right")).load(False).train, 4, 0).batch(0)
        assert [tuple(batch.inputs[name].shape) for name in sizes] == [(4, 3, 4, 5), (4, 3, 3, 2)]
        with pytest.raises(UserError, match=r"data\.transform\.target=torch\.nn\.Identity transforms .* has 2 among"):
            settings = {"input": ("left", "right"), "transform": {"target": "torch.nn.Identity"}}
            HuggingFace(path=path, **settings).load(False)

    @pytest.mark.parametrize("kind", ["parquet", "json"])
    def test_numbers_of_files_are_tensors_on_the_device(self, kind: str) -> None:
        rows = {"values": [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], "label": [0, 4, 1]}
        source = HuggingFace(path=self.files(rows, kind=kind)).load(False)
        inputs, targets = source.train
        assert torch.equal(inputs, torch.tensor(rows["values"])) and targets.tolist() == [0, 4, 1]
        assert (source.num_classes, source.input_shape, source.class_names) == (5, (2,), None)

    def test_parts_of_a_file_train_and_test(self) -> None:
        rows = {"x": [float(place) for place in range(10)], "label": [place % 2 for place in range(10)]}
        file = f"{self.files(rows)}/train.parquet"
        source = HuggingFace(path=file, train_split="train[:80%]", test_split="train[80%:]").load(False)
        assert source.train[0].flatten().tolist() == list(range(8)) and source.test[0].flatten().tolist() == [8, 9]
        with pytest.raises(UserError, match="has no split to test on, but train") as refused:
            HuggingFace(path=file).load(False)
        words = [word for word in shlex.split(str(refused.value).rstrip(".")) if "_split=" in word]  # as a shell does
        said = [override.value() for override in map(parse, words)]
        assert said == ["train[:80%]", "train[80%:]"]

    def test_classes_in_words_are_numbered_in_order(self) -> None:
        rows = {"x": [1.0, 2.0, 3.0], "label": ["owl", "cat", "owl"]}
        path = self.files(rows, {"x": [1.0], "label": ["cat"]}, kind="csv")
        source = HuggingFace(path=path).load(False)
        assert (source.train[1].tolist(), source.test[1].tolist()) == ([1, 0, 1], [0])
        assert (source.num_classes, source.class_names) == (2, ("cat", "owl"))

    def test_a_class_that_training_lacks_is_an_error(self) -> None:
        rows = {"x": [1.0], "label": ["cat"]}
        path = self.files(rows, {"x": [1.0], "label": ["dog"]})
        with pytest.raises(UserError, match="label=label has 'dog' in a split to evaluate"):
            HuggingFace(path=path).load(False)

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ({"x": [1.0, 2.0, 3.0], "label": ["a", None, "b"]}, "the column label has 1 missing value, which"),
            ({"x": [1.0, 2.0, 3.0], "label": [0, None, 1]}, "the column label has 1 missing value, which"),
            ({"x": [1.0, None, 3.0], "label": [0, 1, 0]}, "the column x has 1 missing value, which"),
            ({"x": [[1.0, 2.0], [None, None], [0.0, 4.0]], "label": [0, 1, 0]}, "the column x has 2 missing values"),
            ({"x": [[1.0, 2.0], None, [0.0, 4.0]], "label": [0, 1, 0]}, "the column x has 1 missing value"),
        ],
    )
    @pytest.mark.parametrize("split", ["train", "test"])
    def test_missing_values_are_refused_by_their_column(self, rows: dict[str, Any], said: str, split: str) -> None:
        whole = {name: [values[0], values[2]] for name, values in rows.items()}
        splits = {"train": whole, "test": whole, split: rows}
        with pytest.raises(UserError, match=rf"{said}.*leave these rows out \(rows\.filter, save_to_disk\)"):
            HuggingFace(path=self.saved(*map(self.datasets.Dataset.from_dict, splits.values()))).load(False)

    def test_a_missing_image_and_a_missing_array_are_refused(self) -> None:
        datasets, value, image = self.datasets, [[1.0, 2.0]], Image.new("L", (5, 4))
        features = {"image": datasets.Image(), "array": datasets.Array2D((1, 2), "float32")}
        features["label"] = datasets.Value("int64")
        whole = {"image": [image, image], "array": [value, value], "label": [0, 1]}
        for name in ("image", "array"):
            rows = {**whole, name: [None, whole[name][1]]}
            own = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
            with pytest.raises(UserError, match=f"the column {name} has 1 missing value, which"):
                HuggingFace(path=self.saved(own, own), input=("image", "array")).load(False)

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_a_split_without_rows_is_refused_by_its_name(self, split: str) -> None:
        own = self.datasets.Dataset.from_dict({"x": [1.0], "label": [0]})
        path = self.saved(**{"train": own, "test": own, split: own.select([])})
        with pytest.raises(UserError, match=rf"data\.path={path} has no rows in its split {split}; save it with some"):
            HuggingFace(path=path).load(False)

    def test_numbers_to_predict_are_no_classes_and_bytes_stay_bytes(self) -> None:
        datasets = self.datasets
        features = datasets.Features({"x": datasets.Array3D((1, 2, 2), "uint8"), "label": datasets.Value("float64")})
        pixels = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
        own = datasets.Dataset.from_dict({"x": list(pixels), "label": [0.5, 1.5, 2.5]}, features=features)
        source = HuggingFace(path=self.saved(own, own)).load(False)
        assert source.num_classes is None and source.train[1].tolist() == [0.5, 1.5, 2.5]
        assert source.train[0].dtype == torch.uint8 and torch.equal(source.train[0], torch.from_numpy(pixels))

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({}, r"data\.input must name the column .*; .* has x \(float64\), text \(string\), ragged \(List\), label"),
            ({"input": "text"}, "the column text is text, which no model takes: turn it into numbers"),
            ({"input": "ragged"}, "the column ragged is not of numbers, or its lists are of different lengths"),
            ({"input": "y"}, r"data\.input=y is no column of .*; it has x \(float64\), "),
            ({"label": "y"}, r"data\.label=y is no column of "),
            ({"input": "label"}, r"data\.input and data\.label are both label"),
        ],
    )
    def test_columns_that_are_not_plain_are_named_with_those_there_are(self, settings: Any, said: str) -> None:
        rows = {"x": [1.0, 2.0], "text": ["a", "b"], "ragged": [[1], [1, 2]], "label": [0, 1]}
        with pytest.raises(UserError, match=said):
            HuggingFace(path=self.files(rows), **settings).load(False)

    def test_a_label_that_is_not_plain_is_asked_for(self) -> None:
        with pytest.raises(UserError, match=r"data\.label must name the column of the target; .* x \(float64\), y"):
            HuggingFace(path=self.files({"x": [1.0], "y": [0]})).load(False)

    def test_names_that_are_nowhere_are_one_line(self) -> None:
        with pytest.raises(UserError, match=r"data\.path=nobody/nothing is .* here, and cannot .*\(.*check") as raised:
            HuggingFace(path="nobody/nothing").load(False)
        assert "\n" not in str(raised.value)
        with pytest.raises(UserError, match=r"data\.path=.*none\.parquet is not there; give a file"):
            HuggingFace(path=str(self.folder / "none.parquet")).load(False)
