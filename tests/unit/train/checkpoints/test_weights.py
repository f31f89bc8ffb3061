"""Models as safetensors: they are read as they were written, and errors name what does not fit."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from torch import nn

from crossbow_py.core import files
from crossbow_py.core.errors import CheckpointError
from crossbow_py.models.lora import LoRA
from crossbow_py.train.checkpoints.weights import load_weights, save_weights
from tests.support import linear_model, norm_model


class Tied(nn.Module):
    """A model whose tied weight has a later name that sorts first, and a buffer that is never saved."""

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


def test_base_that_does_not_fit_an_adapted_model_is_named_by_its_own_layers_and_adapters_by_what_loads_them(tmp_path):
    pytest.importorskip("peft")

    def make(width):
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))

    adapted, path = LoRA(lambda: make(5), rank=1, targets=["0"])(), tmp_path / "model.safetensors"
    save_weights(make(6), path)
    with pytest.raises(CheckpointError, match=r"0.bias is \[6\] in the file and \[5\] in the model"):
        load_weights(adapted, path)
    save_weights(adapted, path)
    with pytest.raises(CheckpointError, match=r"give model.lora as it was there, or the merged.safetensors"):
        load_weights(make(5), path)


def test_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"something else")
    for name in ("model.pt", "nowhere.safetensors"):
        with pytest.raises(CheckpointError, match=rf"init_from=.*{name} cannot be read as safetensors"):
            load_weights(linear_model(), tmp_path / name)


def test_weights_that_cannot_be_written_are_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        save_weights(linear_model(), tmp_path / "nowhere" / "model.safetensors")


def test_weights_saved_by_two_at_the_same_moment_are_whole(tmp_path, monkeypatch):
    """The second process writes everything between the first one's write and its rename."""
    first, second, loaded, path = linear_model(), nn.Linear(4, 3), nn.Linear(4, 3), tmp_path / "model.safetensors"
    sync, synced = files.sync, []

    def interleaved(written):
        sync(written)
        synced.append(written)
        if len(synced) == 1:
            save_weights(second, path)
            load_weights(loaded, path)
            assert torch.equal(loaded.weight, second.weight)

    monkeypatch.setattr(files, "sync", interleaved)
    save_weights(first, path)
    load_weights(loaded, path)
    assert torch.equal(loaded.weight, first.weight) and not torch.equal(first.weight, second.weight)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_weights_that_the_disk_refuses_leave_the_old_ones_and_no_part(tmp_path, monkeypatch):
    old, loaded, path = nn.Linear(4, 3), nn.Linear(4, 3), tmp_path / "model.safetensors"
    save_weights(old, path)

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="no space left"):
        save_weights(linear_model(), path)
    load_weights(loaded, path)
    assert torch.equal(loaded.weight, old.weight)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_load_weights_of_a_file_with_a_flipped_bit_refuses_it_in_its_run_folder_alone(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    path = run / "model.safetensors"
    digest = save_weights(linear_model(), path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    (run / "summary.json").write_text(json.dumps({"model_sha256": {"model.safetensors": digest}}))
    load_weights(linear_model(), path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"init_from=.*is not what its run has written.*it is damaged"):
        load_weights(linear_model(), path)
    (elsewhere / "model.safetensors").write_bytes(damaged)
    load_weights(linear_model(), elsewhere / "model.safetensors")  # nobody says what it was


@pytest.mark.parametrize("summary", ["", "[]", '{"model_sha256": 3}', '{"model_sha256": {}}'])
def test_load_weights_beside_a_summary_without_a_digest_takes_the_file(tmp_path, summary):
    save_weights(linear_model(), tmp_path / "model.safetensors")
    (tmp_path / "summary.json").write_text(summary)
    load_weights(linear_model(), tmp_path / "model.safetensors")
