"""`jax_vmap`: K independent models in one jitted step of JAX, over float32 masters; nothing is averaged.

The step gathers, crops, flips and normalises its images, maps `jax.grad` of one model's loss over stacked models by
`jax.vmap`, and updates them by SGD with momentum; XLA sees all of it. Images lie on the device, and so do the tables of
a few epochs, which are used over and over.

JAX was not installed where this was written: it has not been run yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import jax  # type: ignore[import-not-found, unused-ignore]
import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]
import numpy as np
from jax import lax  # type: ignore[import-not-found, unused-ignore]

from crossbow_py.core.errors import UserError
from crossbow_py.data.sampler import epoch_order
from experiments.throughput.captured import EPOCHS, SEED
from experiments.throughput.gate import Gate, Ready
from experiments.throughput.jax_models import MODELS, Array, Model, Tree
from experiments.throughput.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Workload

_PLATFORMS = {"cuda": "gpu", "cpu": "cpu"}

Step = Callable[[Tree, Tree], tuple[Tree, Array]]


def jax_vmapped(precision: str, num_learners: int, workload: Workload, gate: Gate) -> None:
    """Train `num_learners` models for ever.

    Raises:
        RuntimeError: JAX has no such device, or no memory left.
        UserError: the model is none of those in jax_models.py.
    """
    if workload.model not in MODELS:
        raise UserError(f"jax_vmap has no {workload.model}; choose one of {', '.join(MODELS)}.")
    # JAX would take most of the device's memory for itself; it asks when it first touches the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    with jax.default_device(jax.devices(_PLATFORMS[workload.device])[0]):
        model, data = MODELS[workload.model], make_data(workload)
        state = make_state(model, num_learners, workload)
        step = make_step(model, num_learners, workload, dtype)
        state, loss = step(state, data)
        loss.block_until_ready()
        gate.ready(Ready(1, f"{precision}, jitted"))
        while True:
            state, next_loss = step(state, data)
            loss.block_until_ready()  # of the step before: one is under way while the next is handed over
            loss = next_loss
            gate.tick(num_learners * workload.batch_size)


def make_data(workload: Workload) -> Tree:
    """On the device: padded uint8 images [N, H, W, C], labels [N], and picks [4, S], one a place in the stream.

    A pick is a sample, top and left of its crop, and whether it is mirrored.
    """
    images, labels = (tensor.numpy() for tensor in workload.tensors())
    padding = workload.augmentation.crop_padding
    sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    tables = []
    for epoch in range(EPOCHS):
        order = epoch_order(SEED, epoch, len(images))
        drawn = workload.augmentation.draw(SEED, epoch, len(images))
        tables.append(np.stack([order, *(each[order] for each in drawn)]))
    return {
        "images": jnp.asarray(np.pad(images.transpose(0, 2, 3, 1), sides)),
        "labels": jnp.asarray(labels.astype(np.int32)),
        "picks": jnp.asarray(np.concatenate(tables, axis=1).astype(np.int32)),
    }


def make_state(model: Model, num_learners: int, workload: Workload) -> Tree:
    """K models of weights of their own, stacked, and the place in the stream."""
    channels, height, width = workload.image_shape
    keys = jax.random.split(jax.random.PRNGKey(SEED), num_learners)
    shape, num_classes = (height, width, channels), workload.num_classes
    parameters, statistics = jax.jit(jax.vmap(lambda key: model.make(key, shape, num_classes)))(keys)
    velocity = jax.tree_util.tree_map(jnp.zeros_like, parameters)
    learners = {"parameters": parameters, "statistics": statistics, "velocity": velocity}
    return {"learners": learners, "place": jnp.zeros((), jnp.int32)}


def make_step(model: Model, num_learners: int, workload: Workload, dtype: Array) -> Step:
    """`step(state, data)` gives the next state, in the memory of the one before, and the mean loss."""
    images = num_learners * workload.batch_size
    learn = partial(_learn, model)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, data: Tree) -> tuple[Tree, Array]:
        places = (state["place"] + jnp.arange(images)) % data["picks"].shape[1]
        inputs, labels = _take(workload, data, data["picks"][:, places], dtype)
        shape = (num_learners, workload.batch_size)
        learners, losses = jax.vmap(learn)(
            state["learners"], inputs.reshape(*shape, *inputs.shape[1:]), labels.reshape(shape)
        )
        place = (state["place"] + images) % data["picks"].shape[1]
        return {"learners": learners, "place": place}, losses.mean()

    made: Step = step
    return made


def _take(workload: Workload, data: Tree, picks: Array, dtype: Array) -> tuple[Array, Array]:
    """Images [B, H, W, C], augmented and normalised, and labels [B], of picks [4, B]."""
    channels, height, width = workload.image_shape

    def crop(pick: Array) -> Array:
        sample, top, left, mirrored = pick
        corner = (sample, top, left, jnp.zeros_like(sample))
        found = lax.dynamic_slice(data["images"], corner, (1, height, width, channels))[0]
        return jnp.where(mirrored, found[:, ::-1], found)

    pixels = jax.vmap(crop, in_axes=1)(picks).astype(jnp.float32) / 255
    normalised = (pixels - jnp.asarray(workload.mean)) / jnp.asarray(workload.std)
    return normalised.astype(dtype), data["labels"][picks[0]]


def _learn(model: Model, learner: Tree, inputs: Array, labels: Array) -> tuple[Tree, Array]:
    """One step of one model by SGD; its new state and its loss."""

    def loss_of(parameters: Tree) -> tuple[Array, Tree]:
        logits, statistics = model.forward(parameters, learner["statistics"], inputs)
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean(), statistics

    parameters = learner["parameters"]
    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    velocity = jax.tree_util.tree_map(
        lambda v, g, p: MOMENTUM * v + g + WEIGHT_DECAY * p, learner["velocity"], gradients, parameters
    )
    parameters = jax.tree_util.tree_map(lambda p, v: p - LEARNING_RATE * v, parameters, velocity)
    return {"parameters": parameters, "statistics": statistics, "velocity": velocity}, loss
