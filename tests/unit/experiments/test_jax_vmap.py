"""The JAX side, where JAX is installed: its models are those of torch, and its step trains every one of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from crossbow_py.models import MODELS
from experiments.throughput import sides
from experiments.throughput.gate import FinishedError
from experiments.throughput.sides import Side
from experiments.throughput.workloads import Effort, Workload
from tests.unit.experiments.samples import BATCH, CountingGate

jax = pytest.importorskip("jax")
jax_models = pytest.importorskip("experiments.throughput.jax_models")


@pytest.mark.parametrize(("name", "shape"), [("mlp", (28, 28, 1)), ("lenet", (28, 28, 1)), ("resnet32", (32, 32, 3))])
def test_jax_model_has_the_parameters_of_the_torch_one_and_gives_logits(name: str, shape: tuple[int, int, int]) -> None:
    model = jax_models.MODELS[name]
    parameters, statistics = model.make(jax.random.PRNGKey(0), shape, 10)
    logits, moved = model.forward(parameters, statistics, np.ones((4, *shape), np.float32))
    theirs = MODELS[name]().build((shape[2], *shape[:2]), 10)
    sizes = [leaf.size for leaf in jax.tree_util.tree_leaves(parameters)]
    assert sum(sizes) == sum(parameter.numel() for parameter in theirs.parameters())
    assert logits.shape == (4, 10)
    assert jax.tree_util.tree_structure(moved) == jax.tree_util.tree_structure(statistics)


def test_jax_resnet_with_the_weights_of_torch_gives_its_logits() -> None:
    model = jax_models.MODELS["resnet32"]
    parameters, statistics = model.make(jax.random.PRNGKey(0), (32, 32, 3), 10)
    theirs = MODELS["resnet32"]().build((3, 32, 32), 10)

    def kernel(array: object) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).permute(3, 2, 0, 1)

    with torch.no_grad():
        theirs.conv1.weight.copy_(kernel(parameters["stem"]))
        for block, own in zip(theirs.blocks, parameters["blocks"], strict=True):
            block.conv1.weight.copy_(kernel(own["kernels"][0]))
            block.conv2.weight.copy_(kernel(own["kernels"][1]))
        theirs.fc.weight.copy_(torch.from_numpy(np.array(parameters["out"]["weight"])).T)
        theirs.fc.bias.zero_()
    images = torch.randn(4, 3, 32, 32)
    logits, _ = model.forward(parameters, statistics, images.permute(0, 2, 3, 1).numpy())
    np.testing.assert_allclose(np.array(logits), theirs(images).detach().numpy(), rtol=1e-3, atol=1e-4)


def test_jax_side_ticks_the_images_of_all_models(workload: Workload) -> None:
    gate = CountingGate(4 * 3 * BATCH)
    with pytest.raises(FinishedError):
        sides.run_side(Side("jax_vmap", 3, "none", "fp32"), replace(workload, model="mlp"), gate, Effort())  # type: ignore[arg-type]
    assert gate.images == 4 * 3 * BATCH
