"""MLP, LeNet and ResNet-32 in jax.numpy, layer for layer as `crossbow_py.models` has them, images channels last.

A model is two pure functions: `make(key, shape, num_classes)` gives parameters and BatchNorm's running statistics, both
nested lists and dictionaries of arrays, and `forward(parameters, statistics, images)` gives logits and new statistics.
Arithmetic is in the type of the images; BatchNorm is in float32 whatever they are.

JAX was not installed where this was written: it has not been run yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax  # type: ignore[import-not-found, unused-ignore]
import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]
from jax import lax  # type: ignore[import-not-found, unused-ignore]

from crossbow_py.models.lenet import CHANNELS, HIDDEN_UNITS, KERNEL
from crossbow_py.models.resnet import STAGE_CHANNELS

Array = Any
Tree = Any

_MOMENTUM, _EPSILON = 0.1, 1e-5
_HIDDEN = (256, 256)
_BLOCKS_A_STAGE = 5


class Model(NamedTuple):
    """`make(key, (H, W, C), num_classes)` and `forward(parameters, statistics, images [B, H, W, C])`."""

    make: Callable[[Array, tuple[int, int, int], int], tuple[Tree, Tree]]
    forward: Callable[[Tree, Tree, Array], tuple[Array, Tree]]


def _dense(key: Array, into: int, out: int) -> Tree:
    bound = 1 / math.sqrt(into)
    weight = jax.random.uniform(key, (into, out), jnp.float32, -bound, bound)
    return {"weight": weight, "bias": jnp.zeros((out,), jnp.float32)}


def _kernel(key: Array, size: int, into: int, out: int) -> Array:
    return jax.random.normal(key, (size, size, into, out), jnp.float32) * math.sqrt(2 / (size * size * out))


def _apply_dense(layer: Tree, x: Array) -> Array:
    return x @ layer["weight"].astype(x.dtype) + layer["bias"].astype(x.dtype)


def _convolve(kernel: Array, x: Array, stride: int, padding: int) -> Array:
    """`padding` on every side; JAX's own "SAME" pads one side alone where the stride is 2, and torch both."""
    around = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), around, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _halve(x: Array) -> Array:
    """2x2 max pooling."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def make_mlp(key: Array, shape: tuple[int, int, int], num_classes: int) -> tuple[Tree, Tree]:
    """Two hidden layers of 256 units."""
    widths = (math.prod(shape), *_HIDDEN, num_classes)
    keys = jax.random.split(key, len(widths) - 1)
    return [_dense(k, into, out) for k, into, out in zip(keys, widths[:-1], widths[1:], strict=True)], []


def mlp(parameters: Tree, statistics: Tree, images: Array) -> tuple[Array, Tree]:
    """Logits [B, classes]."""
    x = images.reshape(images.shape[0], -1)
    for layer in parameters[:-1]:
        x = jax.nn.relu(_apply_dense(layer, x))
    return _apply_dense(parameters[-1], x), statistics


def make_lenet(key: Array, shape: tuple[int, int, int], num_classes: int) -> tuple[Tree, Tree]:
    """Two 5x5 convolutions without padding, each halved, a hidden layer and the output layer."""
    height, width, into = shape
    keys = jax.random.split(key, 4)
    convolutions = []
    for k, out in zip(keys[:2], CHANNELS, strict=True):
        convolutions.append({"kernel": _kernel(k, KERNEL, into, out), "bias": jnp.zeros((out,), jnp.float32)})
        height, width, into = (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2, out
    hidden = _dense(keys[2], height * width * into, HIDDEN_UNITS)
    return {"convolutions": convolutions, "hidden": hidden, "out": _dense(keys[3], HIDDEN_UNITS, num_classes)}, []


def lenet(parameters: Tree, statistics: Tree, images: Array) -> tuple[Array, Tree]:
    """Logits [B, classes]."""
    x = images
    for layer in parameters["convolutions"]:
        x = jax.nn.relu(_halve(_convolve(layer["kernel"], x, 1, 0) + layer["bias"].astype(x.dtype)))
    x = jax.nn.relu(_apply_dense(parameters["hidden"], x.reshape(x.shape[0], -1)))
    return _apply_dense(parameters["out"], x), statistics


def _norm(channels: int) -> tuple[Tree, Tree]:
    """Parameters and statistics of a BatchNorm."""
    ones, zeros = jnp.ones((channels,), jnp.float32), jnp.zeros((channels,), jnp.float32)
    return {"scale": ones, "shift": zeros}, {"mean": zeros, "variance": ones}


def _normalise(layer: Tree, statistics: Tree, x: Array) -> tuple[Array, Tree]:
    """BatchNorm in training; the running variance is that of a sample, as in torch."""
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    count = x.shape[0] * x.shape[1] * x.shape[2]
    y = (wide - mean) * lax.rsqrt(variance + _EPSILON) * layer["scale"] + layer["shift"]
    found = {"mean": mean, "variance": variance * (count / (count - 1))}
    moved = {name: (1 - _MOMENTUM) * statistics[name] + _MOMENTUM * found[name] for name in found}
    return y.astype(x.dtype), moved


def make_resnet32(key: Array, shape: tuple[int, int, int], num_classes: int) -> tuple[Tree, Tree]:
    """A 3x3 convolution, three stages of five blocks, and a linear layer."""
    keys = iter(jax.random.split(key, 2 + 2 * _BLOCKS_A_STAGE * len(STAGE_CHANNELS)))
    width = STAGE_CHANNELS[0]
    norm, moments = _norm(width)
    parameters: Tree = {"stem": _kernel(next(keys), 3, shape[-1], width), "norm": norm, "blocks": []}
    statistics: Tree = {"norm": moments, "blocks": []}
    for channels in STAGE_CHANNELS:
        for _ in range(_BLOCKS_A_STAGE):
            (first, first_moments), (second, second_moments) = _norm(channels), _norm(channels)
            kernels = [_kernel(next(keys), 3, width, channels), _kernel(next(keys), 3, channels, channels)]
            parameters["blocks"].append({"kernels": kernels, "norms": [first, second]})
            statistics["blocks"].append([first_moments, second_moments])
            width = channels
    parameters["out"] = _dense(next(keys), width, num_classes)
    return parameters, statistics


def resnet32(parameters: Tree, statistics: Tree, images: Array) -> tuple[Array, Tree]:
    """Logits [B, classes]."""
    moved: Tree = {"blocks": []}
    x, moved["norm"] = _normalise(
        parameters["norm"], statistics["norm"], _convolve(parameters["stem"], images, 1, 1)
    )
    x = jax.nn.relu(x)
    for block, moments in zip(parameters["blocks"], statistics["blocks"], strict=True):
        x, found = _block(block, moments, x)
        moved["blocks"].append(found)
    return _apply_dense(parameters["out"], x.mean((1, 2))), moved


def _block(block: Tree, statistics: Tree, x: Array) -> tuple[Array, Tree]:
    """`relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))`; the shortcut skips pixels and pads channels with zeros."""
    first, second = block["kernels"]
    more = first.shape[3] - x.shape[3]
    stride = 2 if more else 1
    y, first_moments = _normalise(block["norms"][0], statistics[0], _convolve(first, x, stride, 1))
    y, second_moments = _normalise(block["norms"][1], statistics[1], _convolve(second, jax.nn.relu(y), 1, 1))
    shortcut = jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))
    return jax.nn.relu(y + shortcut), [first_moments, second_moments]


MODELS = {"mlp": Model(make_mlp, mlp), "lenet": Model(make_lenet, lenet), "resnet32": Model(make_resnet32, resnet32)}
