"""The source image_folder: where it looks, what it gives, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.image_folder import ImageFolder
from tests.unit.data.images.pictures import truncate, write_part


def photos(root: Path, **settings: Any) -> ImageFolder:
    return ImageFolder(**{"folder": "photos", "root": str(root), "size": 16, "resize": 20, **settings})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_part(tmp_path / "photos" / "train")
    write_part(tmp_path / "photos" / "val", per_class=1)
    return tmp_path


def test_source_gives_images_classes_and_moments(root: Path) -> None:
    source = ImageFolder(folder=str(root / "photos"), size=16, resize=20).load(progress=False)
    assert (len(source.train), len(source.test), source.validation) == (9, 3, None)
    assert (source.num_classes, source.input_shape, source.notes) == (3, (3, 16, 16), ())
    assert (source.mean, source.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (source.augmentation.crop_padding, source.augmentation.flip) == (0, True)
    assert isinstance(source.train, ImageFolderData)
    assert (source.train.max_bad, source.train.timeout_s) == (0, 120.0)


def test_source_looks_in_the_folder_of_data_sets(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert photos(root).load(False).num_classes == 3
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(root))
    assert ImageFolder(folder="photos", size=16, resize=20).load(False).num_classes == 3


def test_source_takes_parts_of_other_names(root: Path) -> None:
    (root / "photos" / "val").rename(root / "photos" / "held out")
    assert len(photos(root, val="held out").load(False).test) == 3


def test_source_with_a_cache_fills_it_for_both_parts_and_says_so(root: Path) -> None:
    settings = photos(root, cache=True, cache_dir=str(root / "caches"))
    source = settings.load(progress=False)
    assert [note.split(" was filled")[0].rpartition("/")[2] for note in source.notes] == ["train", "val"]
    assert settings.load(progress=False).notes == ()


def test_source_without_room_for_a_cache_says_so_once(root: Path) -> None:
    (root / "file").touch()
    source = photos(root, cache=True, cache_dir=str(root / "file" / "x")).load(progress=False)
    assert len(source.notes) == 1
    assert source.notes[0].startswith("There is no image cache in")


def test_source_whose_first_image_cannot_be_read_stops_unless_that_is_allowed(root: Path) -> None:
    truncate(root / "photos" / "train" / "ant" / "ant_0.png")
    with pytest.raises(UserError, match=r"ant_0\.png cannot be read \(.*max_bad_images=0; replace the file"):
        photos(root).load(False)
    source = photos(root, max_bad_images=1).load(False)
    assert source.input_shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_padding": 4}, r"data\.crop_padding must be 0 for data\.name=image_folder, got 4; leave it out"),
        ({"size": 224, "resize": 200}, r"data\.resize must be at least data\.size=224, got 200; enlarge it"),
        ({"mean": (0.5,)}, r"data\.mean must be three numbers, got \[0\.5\]; write one a colour"),
        ({"std": (1.0, 0.0, 1.0)}, r"data\.std must be greater than 0, got 0\.0"),
        ({"min_area": 0.0}, r"data\.min_area must be greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImageFolder(**settings)


def test_source_without_a_folder_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"data\.folder must name a folder with train/<class>/\* .*data\.folder=PATH"):
        ImageFolder().load(progress=False)


def test_source_whose_folder_is_not_there_says_where_it_looked(root: Path) -> None:
    said = rf"data\.folder=paintings is not there in {root}, .* or the current folder; write the folder"
    with pytest.raises(UserError, match=said):
        ImageFolder(folder="paintings", root=str(root)).load(progress=False)
    with pytest.raises(UserError, match=rf"data\.folder={root}/paintings is not there; write the folder"):
        ImageFolder(folder=str(root / "paintings")).load(progress=False)


def test_folder_is_also_looked_for_in_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paintings" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "paintings" / "train" / "cat" / "a.png").touch()
    monkeypatch.chdir(tmp_path)
    declared = ImageFolder(folder="paintings", root=str(tmp_path / "elsewhere")).declared()
    assert declared is not None and (declared.num_classes, declared.num_train, declared.note) == (1, 1, None)
