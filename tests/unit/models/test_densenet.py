"""DenseNets: channels of blocks and transitions, what a layer leaves alone. The rest: test_registry."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.models import DenseNet40, DenseNet121
from crossbow_py.models.densenet import DenseLayer, DenseNet


def on_meta() -> DenseNet:
    with torch.device("meta"):
        model = DenseNet121().build((3, 224, 224), 1000)
    assert isinstance(model, DenseNet)
    return model


def test_blocks_end_with_the_channels_and_positions_of_the_papers_table() -> None:
    model = on_meta()
    x, shapes = model.stem(torch.empty(2, 3, 224, 224, device="meta")), []
    for module in model.blocks:
        x = module(x)
        if isinstance(module, nn.AvgPool2d):
            shapes.append(tuple(x.shape[1:]))
    assert [*shapes, tuple(x.shape[1:])] == [(128, 28, 28), (256, 14, 14), (512, 7, 7), (1024, 7, 7)]


def test_blocks_of_40_halve_the_image_twice() -> None:
    torch.manual_seed(3)
    model, x = DenseNet40().build((1, 8, 8), 10), torch.randn(1, 1, 8, 8)
    assert isinstance(model, DenseNet)
    assert model.blocks(model.stem(x)).shape == (1, 132, 2, 2)
    gradients = torch.autograd.grad(model(x).logsumexp(1).sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.count_nonzero() for gradient in gradients)


def test_dense_layer_gives_its_input_untouched_and_32_channels_behind_it() -> None:
    layer, x = DenseLayer(5), torch.randn(2, 5, 4, 4)
    kept = x.clone()
    found = layer(x)
    assert found.shape == (2, 37, 4, 4)
    assert torch.equal(found[:, :5], kept) and torch.equal(x, kept)
    norm, _, narrow, other, _, wide = layer.layer
    by_hand = wide(other(narrow(norm(x).relu())).relu())
    torch.testing.assert_close(found[:, 5:], by_hand)
