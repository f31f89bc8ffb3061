"""Many models by JAX: flax's layers, optax's SGD, `vmap` over models, `jit`, an epoch in one `scan`.

    python jax_side.py FILE.npz NAME

Runs in an environment of its own (`experiments/bench/environments.py`). FILE has what `jobs.py` writes: data, the
samples of each model, rates and sizes. Prints JSON: seconds with and without compiling, and the mean test loss.
"""

from __future__ import annotations

import json
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class MLP(nn.Module):
    hidden: tuple[int, ...]
    outputs: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for units in self.hidden:
            x = nn.relu(nn.Dense(units)(x))
        return nn.Dense(self.outputs)(x)


class Series(nn.Module):
    units: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.RNN(nn.GRUCell(self.units))(x)[:, -1])


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for channels in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


MODELS = {
    "MLP 20-64-64-2": MLP((64, 64), 2),
    "MLP 784-64-10": MLP((64,), 10),
    "GRU 32": Series(32),
    "CNN": CNN(),
}


def main(path: str, name: str) -> None:
    data = np.load(path)
    batch, epochs = int(data["batch"]), int(data["epochs"])
    steps = data["ids"].shape[1] // batch
    model, is_classes = MODELS[name], data["y"].dtype.kind == "i"

    def loss_of(parameters, x, y):
        out = model.apply(parameters, x)
        if is_classes:
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
        return jnp.mean((out - y) ** 2)

    def begin(key, x, rate):
        parameters = model.init(key, x[:1])
        return parameters, optax.sgd(rate, momentum=0.9).init(parameters)

    def epoch(state, key, ids, rate, x, y):
        order = ids[jax.random.permutation(key, len(ids))[: steps * batch]].reshape(steps, batch)

        def step(state, picks):
            parameters, momenta = state
            gradients = jax.grad(loss_of)(parameters, x[picks], y[picks])
            changes, momenta = optax.sgd(rate, momentum=0.9).update(gradients, momenta, parameters)
            return (optax.apply_updates(parameters, changes), momenta), None

        return jax.lax.scan(step, state, order)[0]

    begun = time.perf_counter()
    x, y, ids, rates = (jnp.asarray(data[key]) for key in ("x", "y", "ids", "rates"))
    states = jax.jit(jax.vmap(begin, in_axes=(0, None, 0)))(jax.random.split(jax.random.key(0), len(ids)), x, rates)
    train = jax.jit(jax.vmap(epoch, in_axes=(0, 0, 0, 0, None, None)), donate_argnums=0)
    keys = jax.random.split(jax.random.key(1), (epochs, len(ids)))
    train = train.lower(states, keys[0], ids, rates, x, y).compile()
    jax.block_until_ready(states)
    compiled = time.perf_counter()
    for own in keys:
        states = train(states, own, ids, rates, x, y)
    jax.block_until_ready(states)
    trained = time.perf_counter()
    test = jax.jit(jax.vmap(loss_of, in_axes=(0, None, None)))
    losses = test(states[0], jnp.asarray(data["test_x"]), jnp.asarray(data["test_y"]))
    found = {"test_loss": float(losses.mean()), "compiling": compiled - begun, "seconds": time.perf_counter() - begun}
    print(json.dumps({**found, "images_per_s": len(ids) * steps * batch * epochs / (trained - compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
