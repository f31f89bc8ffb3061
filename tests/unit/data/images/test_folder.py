"""What a scan finds, in which order, and what it refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.images.folder import scan, scan_part


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def make_set(root: Path, train: str = "ab", val: str = "ab") -> None:
    touch(*(root / part / name / "1.jpg" for part, names in (("train", train), ("val", val)) for name in names))


def test_scan_finds_images_sorted_by_class_and_name(tmp_path: Path) -> None:
    names = ["b/2.PNG", "b/10.jpeg", "a/z.webp", "a/é.JPG", "c/x y.jpg"]
    touch(*(tmp_path / name for name in names))
    files = scan_part(tmp_path)
    relative = ["a/z.webp", "a/é.JPG", "b/10.jpeg", "b/2.PNG", "c/x y.jpg"]
    assert [files.relative(index) for index in range(len(files))] == relative
    assert [files.path(index) for index in range(len(files))] == [f"{tmp_path}/{name}" for name in relative]
    assert files.classes == ("a", "b", "c")
    assert files.labels.tolist() == [0, 0, 1, 1, 2]
    assert files.labels.dtype == files.ends.dtype == np.int64


def test_scan_passes_over_what_is_hidden(tmp_path: Path) -> None:
    make_set(tmp_path)
    touch(tmp_path / "train" / ".DS_Store", tmp_path / "train" / "a" / ".2.jpg", tmp_path / "val" / ".cache" / "x")
    touch(tmp_path / "LICENSE.txt", tmp_path / "other" / "x.csv")
    train, val = scan(tmp_path, "train", "val")
    assert (len(train), len(val)) == (2, 2)


def test_scan_of_names_that_are_no_utf8_finds_the_file(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.jpg")
    touch(tmp_path / "a" / name)
    assert scan_part(tmp_path).path(0) == f"{tmp_path}/a/{name}"


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        ("train/readme.txt", "train must hold one folder a class and no files, got {root}/train/readme.txt; remove"),
        ("train/a/notes.txt", r"a must hold JPEG, PNG or WebP images .*, got {root}/train/a/notes.txt; convert or"),
        ("val/b/deep/1.jpg", "b must hold images and no folders, got {root}/val/b/deep; remove"),
        ("val/c/.hidden", "class folder {root}/val/c must hold JPEG"),
    ],
)
def test_scan_of_a_stray_file_or_an_empty_class_is_refused_with_its_path(tmp_path, stray: str, message: str) -> None:
    make_set(tmp_path)
    touch(tmp_path / stray)
    with pytest.raises(UserError, match=message.replace("{root}", re.escape(str(tmp_path)))):
        scan(tmp_path, "train", "val")


def test_scan_takes_a_circle_of_links_for_an_image_that_is_not_there(tmp_path: Path) -> None:
    make_set(tmp_path)
    circle = tmp_path / "train" / "a" / "z.png"
    circle.symlink_to(circle)
    assert scan(tmp_path, "train", "val")[0].relative(1) == "a/z.png"


@pytest.mark.parametrize(
    ("train", "val", "part", "message"),
    [
        ("ab", "", "val", r"{root}/val must hold one folder a class, with images"),
        ("ab", "ab", "test", r"{root}/test cannot be read \(No such file or directory\)"),
        ("abc", "abde", "val", r"only {root}/train has c and only {root}/val has d, e; add or remove"),
        ("abcdefghi", "a", "val", r"only \S+/train has b, c, d, e, f and 3 more; add"),
    ],
)
def test_scan_of_parts_that_do_not_match_is_refused(tmp_path, train: str, val: str, part: str, message: str) -> None:
    make_set(tmp_path, train, val)
    (tmp_path / "val").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=message.replace("{root}", re.escape(str(tmp_path)))):
        scan(tmp_path, "train", part)
