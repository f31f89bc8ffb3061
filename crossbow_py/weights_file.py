"""Models as safetensors: written whole or not at all, and read into a module that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from crossbow_py.errors import CheckpointError
from crossbow_py.file_writing import replacing

MODEL_FILE = "model.safetensors"  # of the one model of a run, in its folder


def save_weights(module: nn.Module, path: Path) -> None:
    """Write a model as safetensors, atomically; tied parameters are stored once. Raises OSError."""
    with replacing(path, synced=True) as partial:
        _write(module, partial)


def _write(module: nn.Module, path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # as the umask says; safetensors would leave a file only its owner can read
    try:
        save_model(module, str(path))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def load_weights(
    module: nn.Module,
    path: str | Path,
    key: str = "init_from",
    model: str = "this model",
    remedy: str = "choose the model it was saved from, or fill in what fits where the model is made",
) -> None:
    """Fill a module from safetensors, which `key` named.

    Raises CheckpointError naming what does not fit, in words for the module and for what the user can do.
    """
    try:
        if not Path(path).is_file():
            raise OSError("it is no file")  # reading a pipe may take for ever
        values = load_file(str(path))
    except Exception as error:
        raise CheckpointError(
            f"{key}={path} cannot be read as safetensors ({error}); give a .safetensors file."
        ) from error
    own = module.state_dict(keep_vars=True)
    wrong = _unfitting(own, values)
    if wrong:
        raise CheckpointError(f"{key}={path} does not fit {model}: {wrong}; {remedy}.")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _unfitting(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> str:
    # Tied tensors are one object under several names, of which the file has any one.
    filled = {id(own[name]) for name in values if name in own}
    for name in sorted(own.keys() | values.keys()):
        if name not in own or id(own[name]) not in filled:
            return f"{name} is only in the {'model' if name in own else 'file'}"
    for name, value in values.items():
        if own[name].shape != value.shape:
            return f"{name} is {list(value.shape)} in the file and {list(own[name].shape)} in the model"
    return ""
