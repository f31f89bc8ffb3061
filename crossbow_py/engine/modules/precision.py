"""The precisions that models are trained in, and the choice of precision and device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.distributed.launch import launched

PrecisionName = Literal["auto", "fp32", "bf16"]


@contextmanager
def ordinary_modes() -> Iterator[None]:
    """Have the block compute with gradients and without autocast, in whatever modes the caller is.

    Under the caller's autocast, serial learners would compute with copies of their first weights, which autocast keeps
    until its outermost block ends.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclass(frozen=True)
class Precision:
    """The dtypes of training.

    Attributes:
        name: the name in settings.
        master: the dtype of weights, optimizer state and averages.
        compute: the dtype of activations, and of the weights they are computed with.
    """

    name: str
    master: torch.dtype
    compute: torch.dtype

    @property
    def has_shadow(self) -> bool:
        """True if models compute with a lower-precision copy of the weights."""
        return self.master != self.compute


FP32 = Precision("fp32", torch.float32, torch.float32)
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
FP64 = Precision("fp64", torch.float64, torch.float64)  # the reference in tests of exactness; not a setting


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether bfloat16 has matrix instructions here: AMX or AVX512-BF16 on CPU, any GPU that supports it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def choose_precision(name: PrecisionName, device: torch.device) -> Precision:
    """Return the precision of a name; `auto` is bf16 if it is fast on the device, else fp32."""
    if name == "auto":
        return BF16 if has_fast_bf16(device) else FP32
    return BF16 if name == "bf16" else FP32


def check_precision(name: object) -> None:
    """Raise UserError for float16, whose remedy is another format with as many bits."""
    if str(name) in ("fp16", "float16", "half", "16"):
        raise UserError(
            f"precision must be one of auto, fp32, bf16, got {str(name)!r}: gradients below 6e-8 become 0 in float16 "
            "unless losses are scaled, which learners do not; set precision=bf16, which has the range of float32."
        )


def check_device(name: object) -> None:
    """Raise UserError for `cuda:N`, whose remedy is not among the names of devices."""
    kind, colon, number = str(name).partition(":")
    if kind == "cuda" and colon:
        remedy = f"choose the GPU by the environment: CUDA_VISIBLE_DEVICES={number if number.isdecimal() else 0}"
        if launched():
            remedy = "each rank takes the GPU of its own number on the host, of those in CUDA_VISIBLE_DEVICES"
        raise UserError(
            f"device must be one of auto, cpu, cuda, got {str(name)[:40]!r}; set device=cuda, and {remedy}."
        )


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a name; `auto` is CUDA if there is one. Raises UserError for `cuda` without CUDA."""
    check_device(name)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device=cuda, but {why_no_cuda()}; set device=cpu or device=auto.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def why_no_cuda() -> str:
    """Return, as half a sentence, that there is no CUDA device, and why as far as this process can know."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    elif visible is not None:
        reason = f"CUDA_VISIBLE_DEVICES is '{visible[:40]}'"
    else:
        reason = "nvidia-smi says whether the driver sees one"
    return f"no CUDA device is visible here ({reason})"


def device_uuids(device: torch.device) -> tuple[str, ...]:
    """Return the UUID of a CUDA device, by which NVML identifies it; () for other devices."""
    return (str(torch.cuda.get_device_properties(device).uuid),) if device.type == "cuda" else ()


def full_precision_parameters(module: nn.Module) -> set[str]:
    """Return the names of the parameters that stay in master precision under bf16: BatchNorm's, whose sums need it."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._NormBase)
        for name, _ in child.named_parameters(recurse=False)
    }


def cast_module(module: nn.Module, precision: Precision) -> nn.Module:
    """Cast a model to the dtypes that learners have in a bank, in place, to run it outside of one."""
    full = full_precision_parameters(module)
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.master if name in full else precision.compute)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(precision.master)
    return module
