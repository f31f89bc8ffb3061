"""The network of airbench94: its whitening filters, initial values, and evaluation on mirror images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.models.airbench import EPSILON, Airbench, AirbenchNet


def _images(count: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    smooth = nn.functional.avg_pool2d(torch.randn(count, 3, 24, 24, generator=generator), 3, 1)
    return smooth + 0.2 * torch.randn(smooth.shape, generator=generator)


def _whitened(images: Tensor) -> tuple[AirbenchNet, np.ndarray]:
    """A network, and what its first layer makes of each patch, [patches, filters]."""
    net = AirbenchNet((4, 8, 8), 3, 10)
    net.initialise_from(images)
    return net, net.whiten(images).movedim(1, -1).flatten(0, -2).double().numpy()


def test_filters_turn_patches_into_uncorrelated_values_of_equal_size() -> None:
    # Patches cut by NumPy one by one: an order of channels, rows and columns other than the convolution's shows here.
    images = _images()
    net, found = _whitened(images)
    pixels = images.double().numpy()
    patches = np.array(
        [image[:, y : y + 2, x : x + 2].ravel() for image in pixels for y in range(21) for x in range(21)]
    )
    values = np.linalg.eigvalsh(patches.T @ patches / len(patches))
    moments = found[:, :12].T @ found[:, :12] / len(found)
    assert np.allclose(moments, np.diag(values / (values + EPSILON)), atol=1e-4)
    assert np.array_equal(net.whiten.weight[12:].numpy(), -net.whiten.weight[:12].numpy())


def test_whitening_layer_is_not_trained_and_norms_have_no_scale() -> None:
    net = AirbenchNet((4, 8, 8), 3, 10)
    frozen = {name for name, own in net.named_parameters() if not own.requires_grad}
    norms = {f"groups.{group}.norm{number}.weight" for group in range(3) for number in (1, 2)}
    assert frozen == {"whiten.weight"} | norms


def test_first_filters_pass_channels_on_and_logits_are_divided_by_the_width() -> None:
    torch.manual_seed(0)
    net = AirbenchNet((32, 8, 8), 3, 10)  # more channels than the whitening layer's 24, and fewer than before
    x = torch.randn(2, 24, 6, 6)
    assert torch.allclose(net.groups[0].conv1(x)[:, :24], x)
    assert not torch.allclose(net.groups[0].conv1(x)[:, 24:], x[:, :8])
    assert torch.allclose(net.groups[1].conv1(torch.cat([x, x[:, :8]], 1)), x[:, :8])
    features: list[Tensor] = []
    net.head.register_forward_hook(lambda _, given, out: features.append(out))
    assert torch.equal(net.eval()(_images(2)), features[0] / 8)
    assert net.head.weight.std().item() == pytest.approx(1, abs=0.15)


def test_mirrors_count_in_evaluation_alone() -> None:
    images = _images(4)
    torch.manual_seed(0)
    net = AirbenchNet((4, 8, 8), 3, 10, mirrors=True)
    plain = AirbenchNet((4, 8, 8), 3, 10)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net.train()(images), plain.train()(images))
    expected = (plain.eval()(images) + plain(torch.from_numpy(np.flip(images.numpy(), 3).copy()))) / 2
    assert torch.allclose(net.eval()(images), expected)
    assert not torch.allclose(net(images), plain(images))


def test_widths_other_than_three_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.widths must be three numbers, got \[8, 8\]"):
        Airbench(widths=(8, 8))
