"""Finding and reading checkpoints: verified, of several ranks, and skipped if damaged."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from crossbow_py.core.errors import CheckpointError, UserError
from crossbow_py.core.plain_values import differences
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings, find_newest, open_checkpoint
from crossbow_py.train.checkpoints.writer import save
from tests.unit.train.checkpoints.marked_checkpoints import mark_of, state


def by_hand(run_folder: Path, samples: int, marks: list[float]) -> Path:
    """Write a checkpoint in format 2 as the page describes it, with one mark per rank."""
    folder = run_folder / "checkpoints" / f"samples-{samples:012d}"
    folder.mkdir(parents=True)
    for rank, mark in enumerate(marks):
        torch.save(state(mark), folder / f"rank-{rank}.pt")
    files = [folder / f"rank-{rank}.pt" for rank in range(len(marks))]
    manifest = {
        "format_version": 2,
        "samples_seen": samples,
        "num_ranks": len(marks),
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def edit(folder: Path, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def hash_again(folder: Path) -> None:
    right = hashlib.sha256((folder / "rank-0.pt").read_bytes()).hexdigest()
    edit(folder, lambda manifest: manifest["sha256"].update({"rank-0.pt": right}))


def rename_rank_1(folder: Path, name: str) -> None:
    edit(folder, lambda manifest: manifest["sha256"].update({name: manifest["sha256"].pop("rank-1.pt")}))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def pipe_as_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def link_outside(folder: Path) -> None:
    (folder / "rank-1.pt").rename(folder.parent / "elsewhere.pt")
    (folder / "rank-1.pt").symlink_to(folder.parent / "elsewhere.pt")


def link_to_itself(folder: Path) -> None:
    (folder / "rank-1.pt").unlink()
    (folder / "rank-1.pt").symlink_to("rank-1.pt")


def test_parts_of_three_ranks_are_read_each_by_its_number(tmp_path):
    saved = open_checkpoint(by_hand(tmp_path, 320, [1.0, 2.0, 3.0]))
    assert (saved.folder.name, saved.samples_seen, saved.num_ranks) == ("samples-000000000320", 320, 3)
    assert [mark_of(saved.part(rank)) for rank in (2, 0, 1)] == [3.0, 1.0, 2.0]


def test_part_is_verified_alone(tmp_path):
    folder = by_hand(tmp_path, 320, [1.0, 2.0])
    flip_a_bit(folder / "rank-1.pt")
    saved = open_checkpoint(folder)
    assert mark_of(saved.part(0)) == 1.0
    with pytest.raises(CheckpointError, match="is corrupted: the hash of rank-1.pt differs"):
        saved.part(1)


def test_file_is_hashed_once(tmp_path):
    folder = by_hand(tmp_path, 320, [1.0])
    saved = open_checkpoint(folder)
    saved.part(0)
    torch.save(state(mark=5.0), folder / "rank-0.pt")  # would not be accepted again
    assert mark_of(saved.part(0)) == 5.0


def test_load_newest_takes_a_run_folder_its_checkpoints_folder_or_one_checkpoint(tmp_path):
    older, newer = (save(tmp_path, state(mark), mark * 100, keep=2) for mark in (1, 2))
    for path in (tmp_path, tmp_path / "checkpoints", newer, older):
        saved, problems = find_newest(path)
        mark, folder = (1, older) if path == older else (2, newer)
        assert (mark_of(saved.part(0)), saved.folder, problems) == (mark, folder, [])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: flip_a_bit(folder / "rank-1.pt"), "is corrupted: the hash of rank-1.pt differs"),
        (lambda folder: os.truncate(folder / "rank-0.pt", 100), "is corrupted: the hash of rank-0.pt differs"),
        (lambda folder: (folder / "rank-1.pt").unlink(), "cannot be read .*No such file"),
        (link_outside, "cannot be read .rank-1.pt is outside of it"),
        (link_to_itself, "cannot be read .*(loop|levels)"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no readable manifest.json"),
        (lambda folder: os.truncate(folder / "manifest.json", 20), "has no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "has no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "has no readable manifest.json .*holds a list"),
        (lambda folder: (folder / "manifest.json").write_text('{"format_version": 2}'), "has no readable manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10**6), "has no readable .*Recursion"),
        (lambda folder: (folder / "manifest.json").write_text("9" * 10**5), "has no readable manifest.json"),
        (lambda folder: os.truncate(folder / "manifest.json", 10**9), "has no readable manifest.json .*more than"),
        (pipe_as_manifest, "has no readable manifest.json .*not a file"),
        (lambda folder: edit(folder, lambda m: m.update(num_ranks=3)), "sha256 is not of 3 files"),
        (lambda folder: edit(folder, lambda m: m.update(num_ranks=10**12)), "sha256 is not of 1000000000000 files"),
        (lambda folder: edit(folder, lambda m: m.update(num_ranks=True)), "num_ranks is True"),
        (lambda folder: edit(folder, lambda m: m.update(num_ranks=0)), "num_ranks is 0"),
        (lambda folder: edit(folder, lambda m: m.pop("num_ranks")), "num_ranks"),
        (lambda folder: edit(folder, lambda m: m.update(samples_seen=-1)), "samples_seen is -1"),
        (lambda folder: edit(folder, lambda m: m.update(samples_seen="9" * 99)), "samples_seen is '9{39}\\.\\.\\."),
        (lambda folder: edit(folder, lambda m: m.update(format_version=1.5)), "format_version is 1.5"),
        (lambda folder: edit(folder, lambda m: m.update(format_version=3)), "has format 3, .* up to 2; update crossb"),
        (lambda folder: edit(folder, lambda m: m.update(sha256=[])), "sha256 is not of 2 files"),
        (lambda folder: edit(folder, lambda m: m["sha256"].update({"rank-1.pt": None})), "sha256 .* is None"),
        (lambda folder: edit(folder, lambda m: m["sha256"].update({"rank-1.pt": "ab"})), "of 'rank-1.pt' is 'ab'"),
        (lambda folder: rename_rank_1(folder, "../elsewhere/rank-1.pt"), "'../elsewhere/rank-1.pt' is not the file"),
        (lambda folder: rename_rank_1(folder, "/rank-1.pt"), "'/rank-1.pt' is not the file of a rank below 2"),
        (lambda folder: rename_rank_1(folder, "rank-01.pt"), "'rank-01.pt' is not the file of a rank below 2"),
        (lambda folder: rename_rank_1(folder, "rank-2.pt"), "'rank-2.pt' is not the file of a rank below 2"),
    ],
)  # fmt: skip
def test_damaged_checkpoint_is_refused_alone_and_passed_over_for_the_one_before(tmp_path, harm, message):
    by_hand(tmp_path, 100, [1.0, 1.0])
    newest = by_hand(tmp_path, 200, [2.0, 2.0])
    harm(newest)
    with pytest.raises(CheckpointError, match=rf"samples-000000000200 .*{message}") as caught:
        find_newest(newest)[0].part(0)
    assert "\n" not in str(caught.value)
    saved, problems = find_newest(tmp_path)
    assert (mark_of(saved.part(1)), saved.folder.name) == (1.0, "samples-000000000100")
    assert len(problems) == 1
    assert "samples-000000000200" in problems[0]
    assert problems[0].endswith("; falling back to the one before.")


class Malicious:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_part_that_would_run_code_is_refused_and_runs_none(tmp_path, write):
    folder = by_hand(tmp_path, 100, [1.0])
    write({"bank": Malicious(tmp_path / "taken")}, folder / "rank-0.pt")
    hash_again(folder)
    with pytest.raises(CheckpointError, match=r"cannot be read .*; use another one\.$") as caught:
        open_checkpoint(folder).part(0)
    assert not (tmp_path / "taken").exists()
    assert "\n" not in str(caught.value)


def test_part_that_is_no_mapping_is_refused(tmp_path):
    folder = by_hand(tmp_path, 100, [1.0])
    torch.save(torch.zeros(3), folder / "rank-0.pt")
    hash_again(folder)
    with pytest.raises(CheckpointError, match="rank-0.pt holds a Tensor"):
        open_checkpoint(folder).part(0)


def test_no_valid_checkpoint_left_is_one_error_that_names_the_newest_and_the_remedy(tmp_path):
    for samples in (100, 200):
        flip_a_bit(save(tmp_path, state(), samples, keep=2) / "rank-0.pt")
    with pytest.raises(CheckpointError, match=r"none of the 2 .*200 is corrupted.*another output_dir") as caught:
        find_newest(tmp_path)
    assert "Falling back" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_format_1_without_a_number_of_ranks_is_one_rank(tmp_path):
    folder = by_hand(tmp_path, 100, [4.0])
    edit(folder, lambda manifest: (manifest.pop("num_ranks"), manifest.update(format_version=1)))
    saved = open_checkpoint(folder)
    assert (saved.num_ranks, mark_of(saved.part(0))) == (1, 4.0)


@pytest.mark.parametrize("name", ["", "nowhere", "nowhere/checkpoints", "nowhere/checkpoints/samples-000000000100"])
def test_folder_without_checkpoints_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"^(no )?checkpoint "):
        find_newest(tmp_path / name)


def test_differences_name_every_leaf_with_both_values():
    saved = {"a": 1, "b": {"c": [1, 2], "d": 0.5}, "e": None}
    assert differences(saved, {"a": 1, "b": {"c": [1, 3], "d": 0.5}, "f": 2}) == [
        "b.c: [1,2] → [1,3]",
        "f: null → 2",
    ]
    assert differences(saved, {**saved}) == []


def test_differences_of_two_things_with_names_are_their_names_alone():
    saved = {"seed": 0, "optimizer": {"name": "sgd", "momentum": 0.9}}
    current = {"seed": 1, "optimizer": {"name": "adamw", "beta1": 0.9}}
    assert differences(saved, current) == ["optimizer.name: sgd → adamw", "seed: 0 → 1"]


@pytest.mark.parametrize(("field", "value"), [("every_epochs", 0), ("every_s", 0.0), ("keep", 0)])
def test_checkpoint_settings_that_keep_nothing_are_refused(field, value):
    with pytest.raises(UserError, match=rf"{field} must be"):
        CheckpointSettings(**{field: value})
