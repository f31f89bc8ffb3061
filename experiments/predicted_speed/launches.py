"""The work of launches: bytes, FLOPs, programs, and how long the chain of a program's memory accesses is.

A launch is one of the package's Triton kernels, as `core.triton_launch.recorded` gives it, or an operator of torch. Of
kernels everything follows from their arguments. Of torch's operators the kernels of a GPU are not known here: their
number is a range, and their programs are those of tiles as libraries usually have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from crossbow_py.core.triton_launch import Launch
from experiments.throughput.roofline import OperatorCounter

# Launches of an operator on CUDA: fewest and most. BatchNorm is one kernel of cuDNN, or a few of torch's own (moments,
# running statistics, outputs; in bfloat16 always); a convolution may bring a change of layout, or a sum of split depth.
_NUM_LAUNCHES: Mapping[str, tuple[int, int]] = {
    "native_batch_norm": (1, 4),
    "native_batch_norm_backward": (1, 3),
    "convolution": (1, 2),
    "convolution_backward": (1, 2),  # for each gradient that is asked for
    "max_pool2d_with_indices_backward": (1, 2),
    "mm": (1, 2),
    "addmm": (1, 2),
    "bmm": (1, 2),
    "baddbmm": (1, 2),
    "_foreach_norm": (2, 2),
    "sort": (2, 4),
    "nonzero": (2, 4),
}
_TENSORS_A_LAUNCH = (110, 32)  # most and fewest tensors that one launch of a `_foreach` operator takes
_ROWS, _COLUMNS, _DEPTH, _STEP = 128, 64, 64, 16  # a library's tile: at most, and what it is a multiple of
_MULTIPROCESSORS = 132  # among which libraries split depth
_POINTS = 1024  # values that a program of another operator handles
_PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Node:
    """A node of a graph: one kernel, or one operator of torch.

    Attributes:
        name: of the kernel or operator.
        fewest, most: how many launches it is.
        num_bytes: values read and written once each.
        loaded_bytes: what programs load and store, through the caches; `num_bytes` where nothing is known.
        flops: of convolutions and matrix products.
        tile_flops: the same with tiles filled up, as multiply-add units are busy with.
        programs: the grid.
        chain: dependent accesses to memory, one after another, of a program, other than those of `steps`.
        steps: turns of the main loop of the program that has the most, which may be pipelined.
        turns: the same, of all programs together.
        grouped: launches if convolutions are grouped operators of cuDNN; 0 where that changes nothing.
        cubin: key of the compiled kernel, "" for operators.
    """

    name: str
    num_bytes: int
    programs: int
    fewest: int = 1
    most: int = 1
    loaded_bytes: int = 0
    flops: int = 0
    tile_flops: int = 0
    chain: int = 1
    steps: int = 0
    turns: int = 0
    grouped: int = 0
    cubin: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def node_of_launch(launch: Launch, cubin: str) -> Node:
    """Return the work of a kernel. Raises KeyError for a kernel that is not known here."""
    programs = prod(launch.grid)
    named = {**dict(zip(launch.names, launch.arguments, strict=False)), **launch.constants, "programs": programs}
    return Node(name=launch.kernel, programs=programs, cubin=cubin, **_WORK[launch.kernel](named))


def _bytes(named: Mapping[str, Any], *names: str) -> int:
    """The bytes of arguments, each as often as it is named; absent ones have none."""
    tensors = [named[name] for name in names if named[name] is not None]
    return sum(each.numel() * each.itemsize for each in tensors)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _forward(named: Mapping[str, Any]) -> dict[str, int]:
    n, size, programs = named, named["inputs"].itemsize, named["programs"]
    depth = n["KH"] * n["KW"] * n["C"]
    steps = _ceil(depth, n["BK"])
    statistics = n["partials"] is not None
    return {
        "num_bytes": _bytes(n, "inputs", "filters", "out", "partials", "partials"),
        "loaded_bytes": programs * (n["BM"] + n["BN"]) * depth * size + _bytes(n, "out", "partials", "partials"),
        "flops": 2 * n["rows"] * n["O"] * depth * n["groups"],
        "tile_flops": 2 * programs * n["BM"] * n["BN"] * steps * n["BK"],
        # Stores, a ticket, the tiles' moments, and what is stored of them.
        "chain": 2 + (3 + _ceil(_ceil(n["rows"], n["BM"]), n["LANES"]) if statistics else 0),
        "steps": steps,
        "turns": steps * programs,
        "grouped": 1 + statistics,
    }


def _backward(named: Mapping[str, Any]) -> dict[str, int]:
    n, size, groups = named, named["inputs"].itemsize, named["groups"]
    taps = n["KH"] * n["KW"]
    data = n["data_programs"] * groups
    of_filters = n["programs"] - data
    steps = _ceil(taps * n["O"], n["BK"]) if n["DATA"] else 0
    split_steps = _ceil(_ceil(n["out_rows"], n["FK"]), n["splits"]) if n["FILTERS"] else 0
    gradients = ("inputs", "d_filters", "partials", "partials") if n["FILTERS"] else ()
    products = int(n["DATA"]) + int(n["FILTERS"])
    loads = data * (n["BM"] + n["BN"]) * taps * n["O"] + of_filters * (n["FM"] + n["FN"]) * split_steps * n["FK"]
    return {
        "num_bytes": _bytes(n, "outputs", *(("filters", "d_inputs") if n["DATA"] else ()), *gradients),
        "loaded_bytes": loads * size + _bytes(n, "d_inputs", "d_filters", "partials", "partials"),
        "flops": products * 2 * n["out_rows"] * n["O"] * taps * n["C"] * groups,
        "tile_flops": 2 * data * n["BM"] * n["BN"] * steps * n["BK"]
        + 2 * of_filters * n["FM"] * n["FN"] * split_steps * n["FK"],
        "chain": 2 + (2 + n["splits"] // 4 if n["splits"] > 1 else 0),
        "steps": max(steps, split_steps),
        "turns": data * steps + of_filters * split_steps,
        "grouped": int(n["DATA"]) + 2 * int(n["FILTERS"]),  # the filters' gradient is copied to the bank
    }


def _of(*names: str, chain: Callable[[Mapping[str, Any]], int] | int) -> Callable[[Mapping[str, Any]], dict[str, int]]:
    return lambda named: {
        "num_bytes": _bytes(named, *names), "chain": chain if isinstance(chain, int) else chain(named)
    }  # fmt: skip


def _update(named: Mapping[str, Any]) -> dict[str, int]:
    names = ["w", "w", "g", "tiles"]
    names += ["s0", "s0"] if named["STATES"] else []
    names += ["s1", "s1"] if named["ADAMW"] else []
    names += ["shadow"] if named["SHADOW"] else []
    names += ["z"] if named["AVERAGES"] else []
    names += ["z", "z_prev", "z_prev"] if named["MOVES"] else []
    names += ["total"] if named["KEEPS_TOTAL"] else []
    # A learner's coefficients say what of its row is read.
    return {"num_bytes": _bytes(named, *names), "chain": 3 + 2 * named["num_learners"]}


def _gather(named: Mapping[str, Any]) -> dict[str, int]:
    return {"num_bytes": named["inputs"].numel() + _bytes(named, "inputs", "targets", "targets", "picks"), "chain": 4}


_WORK: Mapping[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "_forward": _forward,
    "_backward": _backward,
    "_statistics_kernel": _of("x", "partials", "partials", chain=lambda n: 6 + n["rows_per_tile"] // n["ROWS"]),
    "_normalise_kernel": _of("x", "residual", "y", chain=2),
    "_backward_sums_kernel": _of(
        "first", "second", "x", "y", "partials", "partials",
        chain=lambda n: 5 + n["rows_per_tile"] // n["ROWS"] + _ceil(n["num_tiles"], n["ROWS"]),
    ),
    "_backward_inputs_kernel": _of("first", "second", "x", "y", "dx", "d_residual", chain=2),
    "_cross_entropy": _of(
        "outputs", "gradient", "targets", "targets", chain=lambda n: 3 + 2 * _ceil(n["batch"], n["SAMPLES"])
    ),
    "_gather": _gather,
    "_squares": _of("gradients", "out", "tiles", chain=lambda n: 2 + n["num_learners"]),
    "_prepare": _of("partials", chain=lambda n: 4 + _ceil(n["num_tiles"], 1024)),
    "_update": _update,
    "_move": _of("z", "z", "z_prev", "z_prev", "total", chain=2),
}  # fmt: skip


class OperatorNodes(OperatorCounter):  # type: ignore[no-untyped-call]
    """Collects the operators that launch something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        launches, moved = self.num_kernels, self.operator_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.num_kernels > launches:
            self.nodes += self._nodes(func, args, kwargs or {}, result, self.operator_bytes - moved)
        return result

    def _nodes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, num_bytes: int
    ) -> list[Node]:
        name, packet = func._opname, func._overloadpacket
        count = flop_registry.get(packet)
        flops = int(count(*args, **kwargs, out_val=result)) if count else 0
        fewest, most = _num_launches(name, args)
        if name == "convolution_backward":
            given, inputs, filters = args[:3]
            wanted = [place for place in range(2) if args[-1][place]]
            share = max(1, len(wanted))
            rows, taps, size = _rows_of(given), filters[0, 0].numel(), given.itemsize
            products = (
                _product(_rows_of(inputs), inputs.shape[1], taps * given.shape[1], size),
                _product(given.shape[1], taps * inputs.shape[1], rows, size),
            )
            return [
                Node(name, num_bytes // share, fewest=fewest, most=most, flops=flops // share, **products[place])
                for place in wanted
            ]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        written = outputs or [each for each in tree_leaves([args, kwargs]) if isinstance(each, Tensor)]
        values = max(each.numel() for each in written)
        if name in _PRODUCTS:
            columns = outputs[0].shape[1] if name == "convolution" else outputs[0].shape[-1]
            rows, size = values // columns, outputs[0].itemsize
            product = _product(rows, columns, max(1, flops // (2 * rows * columns)), size)
            return [Node(name, num_bytes, fewest=fewest, most=most, flops=flops, **product)]
        programs = max(1, _ceil(num_bytes // max(1, written[0].itemsize) // 2, _POINTS))
        return [Node(name, num_bytes, programs, fewest, most, chain=2)]


def _num_launches(name: str, args: tuple[Any, ...]) -> tuple[int, int]:
    fewest, most = _NUM_LAUNCHES.get(name, (1, 1))
    if name.startswith("_foreach"):
        tensors = len(args[0])
        return fewest * _ceil(tensors, _TENSORS_A_LAUNCH[0]), most * _ceil(tensors, _TENSORS_A_LAUNCH[1])
    return fewest, most


def _rows_of(images: Tensor) -> int:
    return images.numel() // images.shape[1]


def _product(rows: int, columns: int, depth: int, size: int) -> dict[str, Any]:
    """Return the work of a matrix product of a library, by tiles as it might have, for values of `size` bytes.

    A deep product with few tiles is split among as many programs as a GPU has multiprocessors.
    """
    wide = min(_COLUMNS, _ceil(columns, _STEP) * _STEP)
    tiles = _ceil(rows, _ROWS) * _ceil(columns, wide)
    splits = max(1, min(_MULTIPROCESSORS // tiles, _ceil(depth, 8 * _DEPTH)))
    padded = _ceil(depth, _STEP) * _STEP
    return {
        "programs": tiles * splits,
        "loaded_bytes": (tiles * (min(rows, _ROWS) + wide) * depth + rows * columns * splits) * size,
        "tile_flops": 2 * tiles * min(_ceil(rows, _STEP) * _STEP, _ROWS) * wide * padded,
        "chain": 2 + 2 * (splits > 1),
        "steps": _ceil(depth, _DEPTH * splits),
        "turns": tiles * _ceil(depth, _DEPTH),
    }


POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip


def compiled_form(launch: Launch) -> dict[str, Any]:
    """Return what a launch is compiled for, as plain values: kernel, types and properties of arguments, constants.

    Alignments are those that Triton itself looks for. The number of learners is left to the first launch that is alike
    in everything else, as it only says how far apart rows are.
    """
    arguments: dict[str, Any] = {}
    for name, value in zip(launch.names, launch.arguments, strict=False):
        if isinstance(value, Tensor):
            arguments[name] = POINTERS[value.dtype]
        elif value is None or (value == 1 and not isinstance(value, float)):
            arguments[name] = value
        elif isinstance(value, float):
            arguments[name] = "fp32"
        else:
            arguments[name] = "i32, 16" if value % 16 == 0 else "i32"
    constants = {name: _plain_constant(value) for name, value in sorted(launch.constants.items())}
    if constants.get("PRECISION") == "widened":  # in the interpreter alone
        constants["PRECISION"] = "ieee"
    return {"module": launch.module, "kernel": launch.kernel, "arguments": arguments, "constants": constants}


def _plain_constant(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else {"dtype": str(value)}
