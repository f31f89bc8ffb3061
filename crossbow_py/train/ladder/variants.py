"""The variants of kernels that runs launch, each compared with torch's operators before one of them does.

The model of `child.py` is small, and so are its tiles, its optimizer is one of several, and it trains without TF32. A
kernel is compiled for each of these, and each may fault on its own. So what a run of another model may launch is
launched here: every tile of convolutions, TF32 and not, every optimizer, erasing, norms of every form, losses of few
and of many classes.

Triton takes 0.1 to 0.8 s of a CPU to compile each of them, in each of fp32 and bf16 (measured for compute capability
9.0 without a GPU). `compile_ahead.py` shares them out among all cores:

    update            13
    loss               6
    batches            8
    layers            36
    convolutions      63: 21 tiles forward, 36 backward, and 6 of other forms; in fp32 twice, with TF32 and without
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from crossbow_py.averaging import SMA
from crossbow_py.core.triton_launch import KernelError, check_size, compiles, interprets
from crossbow_py.engine.device.cudnn import uses_tf32
from crossbow_py.engine.kernels.checks import ConvolutionCase, NormCase, check_convolution, check_norm
from crossbow_py.engine.kernels.geometry import Blocking, Geometry, Tiles, every_tiles
from crossbow_py.engine.modules.precision import BF16, FP32, Precision
from crossbow_py.engine.update import kernel_update
from crossbow_py.engine.update.optimizers import SGD, AdamW, Optimizer

PRECISIONS = {each.name: each for each in (FP32, BF16)}
_OPTIMIZERS: dict[str, Optimizer] = {
    "SGD without momentum": SGD(momentum=0.0, weight_decay=1e-3),
    "SGD": SGD(momentum=0.9, weight_decay=1e-3, clip_norm=1.0),
    "SGD with Nesterov's momentum": SGD(momentum=0.9, nesterov=True),
    "AdamW": AdamW(weight_decay=1e-2),
}
# (samples, classes): programs of 4, 8 and 16 warps, of one and of several turns, and of as many as there may be.
_LOSSES = (16, 10), (128, 10), (256, 10), (64, 100), (16, 1000), (4, 16384)
_IMAGES = ((32, 32), 3), ((28, 28), 1)  # CIFAR's and MNIST's
# The channels and the height of images by the columns of a tile: those of ResNets on images of 224 pixels, for tiles
# without splits, and of ResNet-32 on CIFAR-10. What compilers make of a kernel depends on these sizes.
_LAYERS = {16: ((16, 28), (16, 32)), 32: ((32, 14), (32, 16)), 64: ((128, 7), (64, 8))}
_ROWS, _COLUMNS = (20_000, 304), (16, 48)  # both blocks of columns; by device, see `check_size`


@dataclass(frozen=True)
class Variant:
    """A variant: its name for the user, and what raises KernelError if it gives other numbers than torch."""

    name: str
    check: Callable[[], None]


def failure_of(variant: Variant) -> str:
    """Launch a variant and return why it failed, on one line that begins with its name; empty if it passed.

    The whole of it goes to stderr.
    """
    try:
        compiles(variant.check)
    except KernelError as error:
        traceback.print_exc()
        return f"{variant.name}: {error}"
    return ""


def variants(kernels: str, device: torch.device, precision: Precision) -> Iterator[Variant]:
    """Yield the variants of some kernels (`core/switches.py`) in a precision. Needs Triton."""
    families = {
        "update": _updates, "loss": _losses, "batches": _batches, "layers": _norms, "convolutions": _convolutions,
    }  # fmt: skip
    return families[kernels](device, precision)


def _updates(device: torch.device, precision: Precision) -> Iterator[Variant]:
    for (name, optimizer), moves in itertools.product(_OPTIMIZERS.items(), (True, False)):
        where = "one device" if moves else "several devices"
        check = partial(kernel_update.check, optimizer, SMA(), device, precision, moves)
        yield Variant(f"update by {name} on {where} in {precision.name}", check)


def _losses(device: torch.device, precision: Precision) -> Iterator[Variant]:
    from crossbow_py.engine.kernels import cross_entropy  # noqa: PLC0415  needs Triton

    for batch, classes in _LOSSES:
        check = partial(cross_entropy.check, device, precision.compute, batch, classes)
        yield Variant(f"loss of {batch} samples of {classes} classes in {precision.name}", check)


def _batches(device: torch.device, precision: Precision) -> Iterator[Variant]:
    from crossbow_py.data.resident import image_kernels  # noqa: PLC0415  likewise

    for size, channels in _IMAGES:
        check = partial(image_kernels.check, device, precision.compute, size, channels)
        name = f"{channels}x{size[0]}x{size[1]}"
        yield Variant(f"batches of {name}, with and without erasing, in {precision.name}", check)


def _norms(device: torch.device, precision: Precision) -> Iterator[Variant]:
    for columns, relu, residual, users in itertools.product(_COLUMNS, (True, False), (True, False), (1, 2)):
        case = NormCase(check_size(*_ROWS), columns, relu, residual, users, running=users == 1)
        name = f"{columns} columns{', ReLU' * relu}{', residual' * residual}, {users} gradients"
        check = partial(check_norm, case, device, precision.compute, interpreted=1)
        yield Variant(f"BatchNorm of {name} in {precision.name}", check)


def _convolutions(device: torch.device, precision: Precision) -> Iterator[Variant]:
    in_float32 = precision.compute == torch.float32
    for tf32 in (False, True) if in_float32 and _has_tf32() else (False,):
        multiplied = f"{precision.name} {'with' if tf32 else 'without'} TF32" if in_float32 else precision.name
        for name, case in _cases():
            check = partial(_check_convolution, case, device, precision.compute, tf32)
            yield Variant(f"convolution {name} in {multiplied}", check)


def _has_tf32() -> bool:
    return not interprets()  # which multiplies in float32, whatever it is told


def _check_convolution(case: ConvolutionCase, device: torch.device, dtype: torch.dtype, tf32: bool) -> None:
    with _tf32_set(tf32):
        check_convolution(case, device, dtype, interpreted=1)


@contextmanager
def _tf32_set(value: bool) -> Iterator[None]:
    before = uses_tf32()
    torch.backends.cudnn.allow_tf32 = value
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _cases() -> Iterator[tuple[str, ConvolutionCase]]:
    """Yield every tile once, and then the other forms of the kernels, by their names."""
    seen = set()
    for tiles in every_tiles():
        first = tiles.forward not in seen
        seen.add(tiles.forward)
        name = f"{_shape(tiles.forward)}, filters' gradient {_shape(tiles.filters)}"
        yield name, ConvolutionCase(_sizes(tiles), tiles, forward=first, inputs=first)
    g = Geometry(check_size(64, 2), 2, 16, 16, 7, 6, (3, 3), stride=(2, 2), padding=(1, 1))
    yield "with a bias, strides", ConvolutionCase(g, bias=True, statistics=False)
    yield "without running statistics, inputs' gradient alone", ConvolutionCase(g, filters=False, running=False)
    yield "without statistics, filters' gradient alone", ConvolutionCase(g, inputs=False, statistics=False)


def _sizes(tiles: Tiles) -> Geometry:
    """Return sizes of several programs and steps; on GPUs those that usual models have with such tiles."""
    wide = tiles.forward.columns
    if interprets():
        batch = 4 if tiles.forward.rows == 128 else 2
        return Geometry(batch, 1, 24, wide, 6, 6, (3, 1), padding=(1, 0))
    channels, high = _LAYERS[wide][tiles.filters.splits > 1]
    return Geometry(64, 2, channels, channels, high, high, (3, 3), padding=(1, 1))


def _shape(tile: Blocking) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth}{' split' * (tile.splits > 1)}"
