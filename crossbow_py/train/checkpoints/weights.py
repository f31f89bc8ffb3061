"""Models as safetensors: written atomically, and read into a module that fits."""

from __future__ import annotations

import copy
import hashlib
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from crossbow_py.core.errors import CheckpointError, UserError
from crossbow_py.core.files import replacing, sync
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.modules.standardized import NAMES, is_standardized, standardize_as
from crossbow_py.models.lora import SAVE_MERGED, names_in_base
from crossbow_py.telemetry.records import DIGESTS, read_summary

MODEL_FILE = "model.safetensors"  # in the folder of a run with one model
ADAPTER_FOLDER = "adapter"  # beside it, if it has adapters
MERGED_FILE = "merged.safetensors"  # in that, if it was asked for


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


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is a `peft.PeftModel` whose adapter is all that it has learned.

    One that counts in standard deviations of its targets would be saved without these.
    """
    peft = sys.modules.get("peft")  # two seconds to import, and no model is PEFT's before it is
    return peft is not None and isinstance(module, peft.PeftModel) and not is_standardized(module)


def save_adapter(module: Any, folder: Path) -> None:
    """Write a model's adapter as `PeftModel.from_pretrained` reads it, in place of what the folder has.

    With `MERGED_FILE`, plain weights of the base with the adapter in them, if the model is to be saved so. Does nothing
    for what is no adapter. Raises OSError.
    """
    if not is_adapter(module):
        return
    partial = folder.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        try:
            # Whether embeddings were resized is not asked of the hub.
            module.save_pretrained(str(partial), save_embedding_layers=False)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        for path in partial.rglob("*.safetensors"):
            path.chmod((path.parent / "adapter_config.json").stat().st_mode)  # see `save_weights`
            sync(path)
        if getattr(module, SAVE_MERGED, False):
            save_weights(copy.deepcopy(module).merge_and_unload(), partial / MERGED_FILE)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    ends = [""] if single else [f"_{j}" for j in range(len(models))]
    names = [f"model{end}.safetensors" for end in ends]
    with ranks.together():
        for name, end, module in zip(names, ends, models, strict=True) if ranks.is_first else ():
            try:
                digests[name] = save_weights(module, folder / name)
                save_adapter(module, folder / f"{ADAPTER_FOLDER}{end}")
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
    names = names_in_base(own)
    if wrong and names and not any(adapted in values for adapted, name in names.items() if adapted != name):
        # A file of the base. Adapters begin as they are; of tied tensors the file has one name.
        if not (wrong := _unfitting({name: own[adapted] for adapted, name in names.items()}, values)):
            values = {adapted: values[name] for adapted, name in names.items() if name in values}
    elif wrong and not names and any(".base_layer." in f".{name}" for name in values):
        remedy = "give model.lora as it was there, or the merged.safetensors of a run with save_merged=true"
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
