"""Linear layers of several learners with a function after each, and the cross-entropy after them, in C: see dense.c.

A chain of layers is one call forward and one backward, in which each learner's values stay in a core's cache. It is
for float32 on CPUs; the rules of linear and element-wise operators (engine/fusion/rules) do the same by torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from crossbow_py.engine.modules.losses import IGNORED
from crossbow_py.engine.native import library
from crossbow_py.engine.native.library import Code, loaded, num_threads, padded

_MOST_OUTPUTS = 2**21  # of a learner
FUNCTIONS = ("identity", "relu", "tanh", "sigmoid")  # in the order of dense.c


class _Layer(Structure):
    """The struct `Layer` in dense.c."""

    _fields_ = [
        *((name, c_int64) for name in ("inputs", "outputs", "function")),
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("weights_stride", "bias_stride")),
        *((name, c_void_p) for name in ("values", "d_weights", "d_bias")),
    ]


class _Chain(Structure):
    """The struct `Chain` in dense.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "rows")),
        ("layers", POINTER(_Layer)),
        ("inputs", c_void_p),
        ("inputs_stride", c_int64),
        *((name, c_void_p) for name in ("d_outputs", "d_inputs", "scratch")),
        ("scratch_size", c_int64),
    ]


class _Loss(Structure):
    """The struct `Loss` in dense.c."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "classes", "ignored")),
        *((name, c_void_p) for name in ("outputs", "targets")),
        ("targets_stride", c_int64),
        *((name, c_void_p) for name in ("losses", "gradient", "num_correct")),
        ("num_unknown", c_int64),
    ]


_CHAIN = (POINTER(_Chain), c_int64, c_int64)
_CODE = Code(
    "dense",
    {
        "crossbow_dense_forward": _CHAIN,
        "crossbow_dense_backward": _CHAIN,
        "crossbow_cross_entropy": (POINTER(_Loss), c_int64, c_int64),
    },
    flags=("-ffp-contract=fast", "-fno-trapping-math"),
    headers=("small.h",),
)


def serves(*tensors: Tensor) -> bool:
    """Return whether layers and losses with these values are run by C code here."""
    return library.serves(_CODE, *tensors)


def serves_loss(outputs: Tensor) -> bool:
    """Return whether the cross-entropy of outputs `[K, B, C]` is computed by C code here; a learner has one core."""
    return serves(outputs) and outputs[0].numel() <= _MOST_OUTPUTS


class Layers(NamedTuple):
    """The layers of a chain: the function after each, and whether it has a bias."""

    functions: tuple[str, ...]
    biases: tuple[bool, ...]

    def pairs(self, given: Iterable[Tensor | None]) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the weights and the bias of each layer, or their gradients, from all in order."""
        each = iter(given)
        return [(next(each), next(each) if has_bias else None) for has_bias in self.biases]


class DenseChain(torch.autograd.Function):
    """y = f(x·Wᵀ + b), layer by layer, for K learners and N rows of each."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, inputs: Tensor, *parameters: Tensor) -> Tensor:
        """Return outputs `[K, N, O]`.

        Args:
            ctx: of autograd.
            layers: what they are.
            inputs: `[K, N, I]`; learners may have the same memory.
            parameters: weights `[K, O, I]` and biases `[K, O]`, layer by layer.
        """
        if not inputs[0].is_contiguous():
            inputs = inputs.contiguous()
        given = tuple(own if own[0].is_contiguous() else own.contiguous() for own in parameters)
        learners, rows, _ = inputs.shape
        widths = [own.shape[1] for own in given if own.ndim == 3]
        values = [inputs.new_empty(learners, rows, padded(width)) for width in widths[:-1]]
        values.append(inputs.new_empty(learners, rows, widths[-1]))
        ctx.layers = layers
        ctx.save_for_backward(inputs, *given, *values)
        scratch_size = max(padded(own.shape[1]) * (1 + own.shape[2]) for own in _weights(given))
        _run("forward", layers, inputs, given, values, scratch_size)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed."""
        layers: Layers = ctx.layers
        count, (inputs, *saved) = len(layers.functions), ctx.saved_tensors
        parameters, values = saved[:-count], saved[-count:]
        _, needs_inputs, *needed = ctx.needs_input_grad

        def room(like: Tensor, is_needed: bool) -> Tensor | None:
            return torch.empty_like(like, memory_format=torch.contiguous_format) if is_needed else None

        gradients, d_inputs = list(map(room, parameters, needed)), room(inputs, needs_inputs)
        rows, weights = inputs.shape[1], _weights(parameters)
        widest, wide = max(padded(own.shape[1]) for own in weights), [padded(own.shape[2]) for own in weights]
        copies = [own.shape[1] * each for own, each in zip(weights, wide, strict=True)]
        size = 2 * rows * widest + max(rows * wide[0], *copies)
        _run("backward", layers, inputs, parameters, values, size, d_outputs[0].contiguous(), d_inputs, gradients)
        return None, d_inputs, *gradients


def _weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [own for own in parameters if own.ndim == 3]


def _run(
    direction: str, layers: Layers, inputs: Tensor, parameters: Sequence[Tensor], values: Sequence[Tensor], size: int,
    d_outputs: Tensor | None = None, d_inputs: Tensor | None = None, gradients: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    code = loaded(_CODE)
    assert code is not None, "callers ask `serves`"
    own, written = (_Layer * len(values))(), gradients or [None] * len(parameters)
    pairs = zip(layers.pairs(parameters), layers.pairs(written), strict=True)
    for place, ((weights, bias), (d_weights, d_bias)) in enumerate(pairs):
        assert weights is not None, "every layer has weights"
        own[place] = _Layer(
            weights.shape[2], weights.shape[1], FUNCTIONS.index(layers.functions[place]), weights.data_ptr(),
            _address(bias), weights.stride(0), 0 if bias is None else bias.stride(0), values[place].data_ptr(),
            _address(d_weights), _address(d_bias),
        )  # fmt: skip
    threads = num_threads(len(inputs))
    scratch = inputs.new_empty(min(threads, len(inputs)), size)  # the first threads have one learner or more each
    chain = _Chain(
        len(values), inputs.shape[1], own, inputs.data_ptr(), inputs.stride(0), _address(d_outputs), _address(d_inputs),
        scratch.data_ptr(), size,
    )  # fmt: skip
    getattr(code, f"crossbow_dense_{direction}")(byref(chain), len(inputs), threads)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def cross_entropy_of_learners(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the kernel of the same name gives (engine/kernels/cross_entropy.py), for float32 on CPUs.

    Args:
        outputs: `[K, B, C]`.
        targets: int64 `[K, B]`.

    Raises what torch does for a target that is no class.
    """
    code, outputs = loaded(_CODE), outputs.contiguous()
    assert code is not None, "callers ask `serves`"
    learners, rows, classes = outputs.shape
    targets = targets if targets.stride(1) == 1 else targets.contiguous()
    losses, gradient = outputs.new_empty(learners), torch.empty_like(outputs)
    num_correct = targets.new_empty(learners)
    loss = _Loss(
        rows, classes, IGNORED, outputs.data_ptr(), targets.data_ptr(), targets.stride(0), losses.data_ptr(),
        gradient.data_ptr(), num_correct.data_ptr(), 0,
    )  # fmt: skip
    code.crossbow_cross_entropy(byref(loss), learners, num_threads(learners))
    if loss.num_unknown:
        nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return losses, num_correct, gradient
