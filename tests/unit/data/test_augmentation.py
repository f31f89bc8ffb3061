"""Crop and flip against a loop over pixels, normalisation against its formula. Erasing: test_erasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation, PaddedImages
from crossbow_py.data.normalisation import BatchFormat, Normalisation, PixelNormaliser

CPU = torch.device("cpu")


def naive_crop(image: np.ndarray, padding: int, top: int, left: int, mirrored: bool) -> np.ndarray:
    """[C, H, W] to [C, H, W], pixel by pixel."""
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                y, x = row + top - padding, (width - 1 - column if mirrored else column) + left - padding
                if 0 <= y < height and 0 <= x < width:
                    out[channel, row, column] = image[channel, y, x]
    return out


@pytest.mark.parametrize(("shape", "padding"), [((3, 5, 4), 2), ((1, 3, 6), 1), ((2, 4, 4), 0)])
def test_crops_of_drawn_corners_equal_a_loop_over_pixels(shape: tuple[int, int, int], padding: int) -> None:
    images = torch.randint(1, 256, (30, *shape), dtype=torch.uint8)
    top, left, mirrored = Augmentation(padding, True).draw(7, 2, 30)
    store = PaddedImages(images, padding, CPU)
    ids = np.arange(30)[::-1].copy()
    first = torch.from_numpy(store.first_pixel(ids, top[ids], left[ids]))
    got = store.crops(first, torch.from_numpy(mirrored[ids])).view(30, shape[1], shape[2], shape[0])
    for place, sample in enumerate(ids):
        expected = naive_crop(images[sample].numpy(), padding, top[sample], left[sample], bool(mirrored[sample]))
        np.testing.assert_array_equal(got[place].permute(2, 0, 1).numpy(), expected)


def test_draw_with_padding_two_gives_every_offset_and_both_sides() -> None:
    top, left, mirrored = Augmentation(2, True).draw(0, 0, 500)
    assert set(top) == set(left) == {0, 1, 2, 3, 4}
    assert 200 < mirrored.sum() < 300
    assert (top != left).any()
    assert not Augmentation(1, False).draw(0, 0, 100)[2].any()


def test_alternating_flip_begins_as_one_at_random_and_then_repeats_itself() -> None:
    alternating, random = Augmentation(flip="alternating"), Augmentation(flip=True)
    flips = [alternating.draw_flips(5, epoch, 400) for epoch in range(5)]
    assert np.array_equal(flips[0], random.draw_flips(5, 0, 400)) and 150 < flips[0].sum() < 250
    for epoch, flipped in enumerate(flips):
        assert np.array_equal(flipped, flips[0] ^ (epoch % 2 == 1))
        assert np.array_equal(alternating.draw(5, epoch, 400)[2], flipped)
    # Those at random have half of all images as they were in the epoch before.
    again = random.draw_flips(5, 0, 400) == random.draw_flips(5, 1, 400)
    assert 150 < again.sum() < 250


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_padding": -1}, r"data\.crop_padding must be at least 0, got -1"),
        ({"flip": "always"}, r"data\.flip must be true or false or alternating, got 'always'"),
        ({"random_erasing": 1.5}, r"data\.random_erasing must be at most 1, got 1\.5"),
    ],
)
def test_augmentation_of_bad_values_is_a_user_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augmentation(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [True, False])
def test_pixel_normaliser_equals_the_formula(dtype: torch.dtype, channels_last: bool) -> None:
    pixels = torch.randint(0, 256, (6, 4 * 5, 3), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    normalise = PixelNormaliser((3, 4, 5), BatchFormat(CPU, dtype, channels_last, Normalisation(mean, std)))
    got = normalise(pixels.view(6, -1))
    expected = (pixels.numpy() / 255 - np.array(mean)) / np.array(std)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    np.testing.assert_allclose(
        got.double().permute(0, 2, 3, 1).reshape(6, 20, 3).numpy(), expected, rtol=0, atol=tolerance
    )


def test_normalisation_of_float_and_uint8_inputs_differ_by_the_unit() -> None:
    images = torch.tensor([[[[0]], [[51]]]], dtype=torch.uint8)
    normalisation = Normalisation((0.1,), (0.5,))
    torch.testing.assert_close(normalisation.apply(images, torch.float64).flatten(), torch.tensor([-0.2, 0.2]).double())
    floats = torch.tensor([[0.0, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(normalisation.apply(floats, torch.float64).flatten(), torch.tensor([-0.2, 0.2]).double())


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), None, "given together"),
        ((0.5,), (0.5, 0.5), "of equal length.*; give one value a channel"),
        ((0.5,), (float("nan"),), "must be finite"),
        ((float("inf"),), (0.5,), "must be finite"),
        ((0.5,), (0.0,), "std positive"),
    ],
)
def test_normalisation_of_unfit_values_is_a_user_error(mean: tuple, std: tuple | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Normalisation.of(mean, std)
