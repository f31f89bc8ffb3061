"""Models as safetensors: written atomically, and read into a module that fits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from crossbow_py.core.errors import CheckpointError, UserError
from crossbow_py.core.files import replacing
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.modules.standardized import NAMES, standardize_as
from crossbow_py.models.lora import names_in_base
from crossbow_py.telemetry.records import DIGESTS, read_summary

MODEL_FILE = "model.safetensors"  # in the folder of a run with one model


def save_weights(module: nn.Module, path: Path) -> str:
    """Write a model as safetensors, atomically; tied parameters are stored once. Returns the file's SHA-256.

    Raises OSError.
    """
    with replacing(path, synced=True) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # by the umask; safetensors would write a file that only its owner can read
        try:
            save_model(module, str(partial))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(mode)
        return _sha256(partial)


class SavedModels(NamedTuple):
    """The path of a run's saved models, None if there is none, and the SHA-256 of each file by its name.

    `samples_seen` is how many samples the models had seen, also of a run without a folder.
    """

    path: str | None
    digests: dict[str, str]
    samples_seen: int | None = None


def save_models(
    models: Sequence[nn.Module], folder: Path | None, samples_seen: int, single: bool, ranks: Ranks
) -> SavedModels:
    """Write a run's `single` model, or each of its independent ones, to its folder, if it has one.

    All ranks call it; the first one writes. Raises UserError when they cannot be written.
    """
    if folder is None:
        return SavedModels(None, {}, samples_seen)
    digests = dict[str, str]()
    names = [MODEL_FILE] if single else [f"model_{j}.safetensors" for j in range(len(models))]
    with ranks.together():
        for name, module in zip(names, models, strict=True) if ranks.is_first else ():
            try:
                digests[name] = save_weights(module, folder / name)
            except OSError as error:
                raise UserError(
                    f"cannot write {folder / name} ({error}); make room there and resume the run."
                ) from error
    return SavedModels(str(folder / names[0]) if single else str(folder), digests, samples_seen)


def load_weights(
    module: nn.Module,
    path: str | Path,
    key: str = "init_from",
    model: str = "this model",
    remedy: str = "choose the model it was saved from, or fill in what fits where the model is made",
) -> None:
    """Load a safetensors file into a module, or into the base of a module with adapters.

    Args:
        module: the module, filled in place. It counts in standard deviations if the one that was saved did.
        path: the file.
        key, model, remedy: for errors: the setting that named the file, the module, and what the user can do.

    Raises CheckpointError if the file does not fit, or is not the one that the run in its folder wrote.
    """
    _check_digest(Path(path), key)
    try:
        if not Path(path).is_file():
            raise OSError("it is no file")  # reading a pipe might block for ever
        values = load_file(str(path))
    except Exception as error:
        raise CheckpointError(
            f"{key}={path} cannot be read as safetensors ({error}); give a .safetensors file."
        ) from error
    standardize_as(module, values)
    own = module.state_dict(keep_vars=True)
    wrong = _unfitting(own, values)
    if wrong and (names := names_in_base(own)) and not _unfitting({n: own[o] for o, n in names.items()}, values):
        # Adapters begin as they are; of tied tensors the file has one name.
        values = {adapted: values[name] for adapted, name in names.items() if name in values}
        wrong = ""
    if wrong and wrong.startswith(NAMES) and not any(name in values for name in NAMES):
        raise CheckpointError(f"{key}={path} is of a model of plain targets; set standardize_targets=False.")
    if wrong:
        raise CheckpointError(f"{key}={path} does not fit {model}: {wrong}; {remedy}.")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _check_digest(path: Path, key: str) -> None:
    """Compare the file with the digest in the summary beside it, if there is one."""
    digests = read_summary(path.parent).get(DIGESTS)
    expected = digests.get(path.name) if isinstance(digests, dict) else None
    if expected is not None and path.is_file() and _sha256(path) != expected:
        raise CheckpointError(
            f"{key}={path} is not what its run has written, as the SHA-256 in summary.json says: it is damaged, or was "
            "replaced; restore it from a copy, or, if it is as you want it, move it to another folder."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unfitting(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> str:
    # Tied tensors are one object under several names; the file has one of them.
    filled = {id(own[name]) for name in values if name in own}
    for name in sorted(own.keys() | values.keys()):
        if name not in own or id(own[name]) not in filled:
            return f"{name} is only in the {'model' if name in own else 'file'}"
    for name, value in values.items():
        if own[name].shape != value.shape:
            return f"{name} is {list(value.shape)} in the file and {list(own[name].shape)} in the model"
    return ""
