"""Text as samples of tokens: where they are cut, what is test data, which tokens there are, and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.text import Text


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_samples_are_consecutive_tokens_with_those_behind_them_as_targets(folder: Path) -> None:
    (folder / "a.txt").write_bytes(bytes(range(40)))
    source = Text(file="a.txt", context=4, test_fraction=0.25).load(progress=False)
    inputs, targets = source.train
    assert inputs.tolist() == [[4 * row + place for place in range(4)] for row in range(7)]  # 29 of 30 have a next one
    assert torch.equal(targets, inputs + 1)
    assert source.test[0].tolist() == [[30, 31, 32, 33], [34, 35, 36, 37]]
    assert (source.num_classes, source.input_shape, inputs.dtype) == (256, (4,), torch.int64)


def test_files_of_a_pattern_are_read_in_the_order_of_their_names(folder: Path) -> None:
    for name, text in (("b.txt", "BBBB"), ("a.txt", "AAAA"), ("c.md", "CCCC")):
        (folder / name).write_text(text, encoding="utf-8")
    source = Text(file="*.txt", context=2, test_fraction=0.4).load(progress=False)
    assert bytes(source.train[0].flatten().tolist()) == b"AAAA"
    assert bytes(source.test[0].flatten().tolist()) == b"BB"


@pytest.mark.parametrize(("text", "first"), [("abcabcabcäabcabcabc", 0), ("\ufeffabcabcabcäabcabcab", 4)])
def test_characters_are_numbered_by_their_code_points(folder: Path, text: str, first: int) -> None:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    source = Text(file="a.txt", context=2, vocabulary="characters", test_fraction=0.4).load(progress=False)
    known = sorted(set(text))
    assert source.train[0].flatten().tolist() == [known.index(own) for own in text[: source.train[0].numel()]]
    assert source.train[0][0, 0] == first
    assert source.num_classes == len(known)


def test_python_library_is_read_by_default() -> None:
    source = Text().load(progress=False)
    assert source.train[0].numel() > 1_000_000
    assert b"import" in bytes(source.train[0][:200].flatten().tolist())


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (b"", {"file": "none.txt"}, "none.txt matches no file"),
        (b"short", {}, "5 tokens of training data|tokens of training data, and a sample takes 128"),
        (b"x" * 2000, {"test_fraction": 0.01}, "20 tokens of test data"),
        (b"\xff\xfe" * 500, {"vocabulary": "characters", "context": 8}, "is not UTF-8.*data.vocabulary=bytes"),
        (b"", {}, "0 tokens of training data"),
    ],
)
def test_text_that_makes_no_samples_is_refused(folder: Path, content: bytes, options: Any, says: str) -> None:
    (folder / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=says):
        Text(**{"file": "a.txt", **options}).load(progress=False)


def test_folders_are_left_out_of_what_a_pattern_matches(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a.txt").write_text("AAAA", encoding="utf-8")
    assert bytes(Text(file="**", context=1, test_fraction=0.5).load(progress=False).train[0].flatten().tolist()) == b"A"
    with pytest.raises(UserError, match="matches no file"):
        Text(file="su*").load(progress=False)
    with pytest.raises(UserError, match="cannot be read"):
        Text(file="sub").load(progress=False)


def test_a_name_that_is_no_pattern_but_looks_like_one_is_a_file(folder: Path) -> None:
    (folder / "notes[1].txt").write_text("AAAA", encoding="utf-8")
    assert len(Text(file="notes[1].txt", context=1, test_fraction=0.5).load(progress=False).train[0]) == 1
