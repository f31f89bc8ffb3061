"""Checkpoints: whole or not there, verified on load, the last k kept; and models as safetensors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from crossbow_py import checkpoint
from crossbow_py.checkpoint import (
    CheckpointSettings,
    checkpoints,
    differences,
    load,
    load_newest,
    load_weights,
    save,
    save_weights,
)
from crossbow_py.errors import CheckpointError, UserError
from tests.support import linear_model, norm_model


def state(mark: float = 1.0):
    return {
        "choices": {"executor": "serial"},
        "bank": {"weights": {"0.weight": torch.full((2, 3), mark)}, "step_counts": [1, 2]},
        "state": {"samples_seen": 8, "best_accuracy": None},
    }


def mark_of(saved) -> float:
    return saved["bank"]["weights"]["0.weight"][0, 0].item()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


class Crash(BaseException):
    """The process ends here."""


def test_save_and_load_return_the_same_tensors_and_plain_values(tmp_path):
    written = {**state(), "half": torch.randn(3).bfloat16(), "count": torch.tensor(3)}
    folder = save(tmp_path, written, samples_seen=320, keep=2)
    assert folder == tmp_path / "checkpoints" / "samples-000000000320"
    read = load(folder)
    assert torch.equal(read["half"], written["half"])
    assert (read["half"].dtype, read["count"].dtype) == (torch.bfloat16, torch.int64)
    assert mark_of(read) == 1.0
    assert (read["state"], read["choices"]) == (written["state"], written["choices"])


def test_manifest_holds_the_format_the_samples_and_the_hash_of_the_file(tmp_path):
    folder = save(tmp_path, state(), samples_seen=320, keep=2)
    assert json.loads((folder / "manifest.json").read_text()) == {
        "format_version": 1,
        "samples_seen": 320,
        "sha256": {"rank-0.pt": hashlib.sha256((folder / "rank-0.pt").read_bytes()).hexdigest()},
    }
    torch.load(folder / "rank-0.pt", weights_only=True)


def test_load_newest_takes_a_run_folder_its_checkpoints_folder_or_one_checkpoint(tmp_path):
    older, newer = (save(tmp_path, state(mark), mark * 100, keep=2) for mark in (1, 2))
    for path, mark, folder in [
        (tmp_path, 2, newer),
        (tmp_path / "checkpoints", 2, newer),
        (newer, 2, newer),
        (older, 1, older),
    ]:
        saved, found, problems = load_newest(path)
        assert (mark_of(saved), found, problems) == (mark, folder, [])


@pytest.mark.parametrize(("keep", "left"), [(1, [400]), (2, [400, 300]), (9, [400, 300, 200, 100])])
def test_save_keeps_the_last_k(tmp_path, keep, left):
    for samples in (100, 200, 300, 400):
        save(tmp_path, state(), samples, keep)
    assert [int(path.name.split("-")[1]) for path in checkpoints(tmp_path)] == left


@pytest.mark.parametrize("keep", [1, 2])
def test_save_after_going_back_drops_the_checkpoints_of_the_other_future(tmp_path, keep):
    for samples in (100, 200, 300):
        save(tmp_path, state(mark=1.0), samples, keep=3)
    save(tmp_path, state(mark=2.0), 250, keep)  # resumed from 200, or started afresh
    saved, folder, _ = load_newest(tmp_path)
    assert (mark_of(saved), folder.name) == (2.0, "samples-000000000250")
    assert len(checkpoints(tmp_path)) == keep


def test_save_at_the_same_samples_replaces(tmp_path):
    for mark in (1.0, 2.0):
        save(tmp_path, state(mark), 100, keep=1)
    assert mark_of(load_newest(tmp_path)[0]) == 2.0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["samples-000000000100"]


def test_hidden_folder_of_a_crash_is_ignored_and_removed_by_the_next_save(tmp_path):
    save(tmp_path, state(mark=1.0), 100, keep=2)
    torn = tmp_path / "checkpoints" / ".samples-000000000200.partial"
    torn.mkdir()
    (torn / "rank-0.pt").write_bytes(b"half a file")
    assert mark_of(load_newest(tmp_path)[0]) == 1.0
    save(tmp_path, state(mark=3.0), 300, keep=2)
    assert not torn.exists()


@pytest.mark.parametrize("call", range(5))
@pytest.mark.parametrize("target", [(os, "fsync"), (Path, "rename"), (torch, "save")])
def test_crash_at_any_moment_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, monkeypatch, target, call):
    save(tmp_path, state(mark=1.0), 100, keep=1)
    owner, name = target
    original, calls = getattr(owner, name), []

    def crash(*arguments, **options):
        calls.append(name)
        if len(calls) > call:
            raise Crash
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, crash)
    crashed = False
    try:
        save(tmp_path, state(mark=2.0), 200, keep=1)
    except Crash:
        crashed = True
    assert mark_of(load_newest(tmp_path)[0]) in ((1.0, 2.0) if crashed else (2.0,))
    monkeypatch.undo()
    save(tmp_path, state(mark=3.0), 300, keep=1)
    assert mark_of(load_newest(tmp_path)[0]) == 3.0


def test_full_disk_is_an_os_error_that_leaves_the_old_checkpoint_and_no_rest(tmp_path, monkeypatch):
    save(tmp_path, state(mark=1.0), 100, keep=1)
    # Writing to /dev/full fails as a full disk does; torch reports that as a RuntimeError.
    full = open("/dev/full", "wb")  # noqa: SIM115  # closed by save
    monkeypatch.setattr(checkpoint, "open", lambda path, mode: full, raising=False)
    big = {"weights": torch.zeros(1_000_000)}
    with pytest.raises(OSError, match=r"."):
        save(tmp_path, big, 200, keep=1)
    monkeypatch.undo()
    assert mark_of(load_newest(tmp_path)[0]) == 1.0
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_failing_fsync_is_an_os_error_that_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, state(mark=1.0), 100, keep=1)

    def fail(descriptor):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output error"):
        save(tmp_path, state(mark=2.0), 200, keep=1)
    assert mark_of(load_newest(tmp_path)[0]) == 1.0


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: flip_a_bit(folder / "rank-0.pt"), "is corrupted: the hash of rank-0.pt differs"),
        (lambda folder: os.truncate(folder / "rank-0.pt", 100), "is corrupted: the hash of rank-0.pt differs"),
        (lambda folder: (folder / "rank-0.pt").unlink(), "cannot be read .*No such file"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no readable manifest.json"),
        (lambda folder: os.truncate(folder / "manifest.json", 20), "has no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "has no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "has no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"format_version": 1}'), "has no readable manifest"),
    ],
)  # fmt: skip
def test_damaged_checkpoint_is_refused_alone_and_passed_over_for_the_one_before(tmp_path, harm, message):
    save(tmp_path, state(mark=1.0), 100, keep=2)
    newest = save(tmp_path, state(mark=2.0), 200, keep=2)
    harm(newest)
    with pytest.raises(CheckpointError, match=rf"samples-000000000200 {message}"):
        load(newest)
    saved, folder, problems = load_newest(tmp_path)
    assert (mark_of(saved), folder.name) == (1.0, "samples-000000000100")
    assert len(problems) == 1
    assert "samples-000000000200" in problems[0]
    assert problems[0].endswith("; falling back to the one before.")


def test_no_valid_checkpoint_left_is_one_error_that_names_the_newest_and_the_remedy(tmp_path):
    for samples in (100, 200):
        flip_a_bit(save(tmp_path, state(), samples, keep=2) / "rank-0.pt")
    with pytest.raises(CheckpointError, match=r"none of the 2 .*200 is corrupted.*another output_dir") as caught:
        load_newest(tmp_path)
    assert "Falling back" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_newer_format_is_refused_with_the_remedy(tmp_path):
    folder = save(tmp_path, state(), 100, keep=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(CheckpointError, match="has format 2,? and this version reads up to 1; update crossbow_py"):
        load(folder)


@pytest.mark.parametrize("name", ["", "nowhere", "nowhere/checkpoints", "nowhere/checkpoints/samples-000000000100"])
def test_folder_without_checkpoints_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"^(no )?checkpoint "):
        load_newest(tmp_path / name)


def test_differences_name_every_leaf_with_both_values():
    saved = {"a": 1, "b": {"c": [1, 2], "d": 0.5}, "e": None}
    assert differences(saved, {"a": 1, "b": {"c": [1, 3], "d": 0.5}, "f": 2}) == [
        "b.c: [1, 2] → [1, 3]",
        "f: None → 2",
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


class Tied(nn.Module):
    """The first name of the tied weight is not the first in the alphabet, and one buffer is never saved."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False)
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("positions", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("make_model", [linear_model, norm_model, Tied])
def test_weights_saved_and_loaded_are_equal_also_when_tied(tmp_path, make_model):
    model, other, path = make_model(), make_model(), tmp_path / "model.safetensors"
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randint(0, 9, value.shape))
    save_weights(model, path)
    load_weights(other, path)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    if isinstance(other, Tied):
        assert other.decoder.weight is other.encoder.weight


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 2), r"bias is \[3\] in the file and \[2\] in the model|weight is \[3, 4\] in the file"),
        (nn.Linear(4, 3, bias=False), "bias is only in the file"),
        (nn.Sequential(nn.Linear(4, 3)), "0.bias is only in the model"),
        (nn.ParameterDict({"weight": torch.zeros(3, 4)}), "bias is only in the file"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused_naming_what_does_not_fit(tmp_path, model, message):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(linear_model(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"init_from=.*model.safetensors does not fit this model: .*({message})"):
        load_weights(model, tmp_path / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"something else")
    for name in ("model.pt", "nowhere.safetensors"):
        with pytest.raises(CheckpointError, match=rf"init_from=.*{name} cannot be read as safetensors"):
            load_weights(linear_model(), tmp_path / name)


def test_weights_that_cannot_be_written_are_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        save_weights(linear_model(), tmp_path / "nowhere" / "model.safetensors")
