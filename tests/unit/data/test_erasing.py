"""Random erasing: rectangles by hand and by their statistics, erased values against a loop over pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossbow_py.data import erasing
from crossbow_py.data.erasing import Eraser, draw_rectangles

CPU = torch.device("cpu")
EXTENTS = [(32, 32), (28, 28), (6, 5), (1, 28), (4, 100), (1, 1)]


def of_area(share: float) -> float:
    """The number in [0, 1) that draws this share of the area: shares are uniform between 0.02 and 0.4."""
    return (share - 0.02) / 0.38


@pytest.mark.parametrize(
    ("extent", "drawn", "rectangle"),
    [
        # A quarter of 64 pixels is 16. Aspects from 0.3 to 1 / 0.3 fit, 1 is in the middle: 4 x 4, of 5 places a side.
        ((8, 8), {"area": of_area(0.25), "aspect": 0.5, "top": 0.5, "left": 0.99}, (2, 6, 4, 8)),
        # Aspect 0.3: √(16 · 0.3) = 2.19 rows are 2, and 16 pixels then 8 columns.
        ((8, 8), {"area": of_area(0.25), "aspect": 0.0, "top": 0.0, "left": 0.9}, (0, 2, 0, 8)),
        # 40 pixels of 4 x 25: 4² / 40 = 0.4 is the largest aspect that fits: 4 rows, 10 columns, of 16 places.
        ((4, 25), {"area": of_area(0.4), "aspect": 0.999, "top": 0.9, "left": 0.5}, (0, 4, 8, 18)),
        # 0.3 pixels of 3 x 5 are one.
        ((3, 5), {"area": 0.0, "aspect": 0.5, "top": 0.4, "left": 0.7}, (1, 2, 3, 4)),
        # Where the number is not below the probability nothing is erased.
        ((8, 8), {"": 0.5, "area": 0.5, "aspect": 0.5, "top": 0.5, "left": 0.5}, (0, 0, 0, 0)),
    ],
)
def test_rectangle_of_given_numbers_is_the_one_worked_out_by_hand(monkeypatch, extent, drawn, rectangle) -> None:
    def uniform(seed: int, purpose: str, epoch: int, count: int) -> np.ndarray:
        return np.array([{"": 0.49, **drawn}[purpose.removeprefix("erased").strip()]])

    monkeypatch.setattr(erasing, "uniform", uniform)
    assert tuple(draw_rectangles(0.5, 0, 0, 1, extent)[:, 0]) == rectangle


@pytest.mark.parametrize("extent", EXTENTS)
def test_rectangles_lie_anywhere_within_images_of_any_shape(extent: tuple[int, int]) -> None:
    top, bottom, left, right = draw_rectangles(1.0, 3, 0, 4000, extent)
    assert (bottom > top).all() and (right > left).all()
    assert (top.min(), left.min()) == (0, 0) and (bottom.max(), right.max()) == extent


def test_erased_areas_and_aspects_are_spread_over_their_ranges() -> None:
    top, bottom, left, right = draw_rectangles(0.3, 11, 5, 20_000, (224, 224))
    erased = bottom > top
    assert abs(erased.mean() - 0.3) < 0.01  # three standard deviations of √(0.3 · 0.7 / 20,000) = 0.0032
    height, width = (bottom - top)[erased], (right - left)[erased]
    area, aspect = height * width / 224**2, np.log(height / width)
    assert abs(area.mean() - 0.21) < 0.004 and abs(area.std() - 0.38 / 12**0.5) < 0.004
    assert 0.019 < area.min() < 0.021 and 0.399 < area.max() < 0.402
    quarters = np.histogram(area, bins=4, range=(0.02, 0.4))[0] / erased.sum()
    assert (abs(quarters - 0.25) < 0.02).all()
    # Tall ones are as frequent as wide ones; few are cut off, as 1 / 0.4 is all that fits of the largest.
    assert abs(aspect.mean()) < 0.03 and abs(aspect).max() < np.log(1 / 0.3) + 0.1
    assert abs(aspect.std() - 2 * np.log(1 / 0.3) / 12**0.5) < 0.03


def test_rectangles_follow_from_seed_epoch_and_sample_alone() -> None:
    drawn = draw_rectangles(0.5, 1, 2, 50, (9, 9))
    assert np.array_equal(draw_rectangles(0.5, 1, 2, 80, (9, 9))[:, :50], drawn)
    assert not np.array_equal(draw_rectangles(0.5, 1, 3, 50, (9, 9)), drawn)
    assert not np.array_equal(draw_rectangles(0.5, 2, 2, 50, (9, 9)), drawn)
    assert not draw_rectangles(0.0, 1, 2, 50, (9, 9)).any()


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [((3, 6, 5), torch.int32, torch.float32), ((1, 4, 7), torch.int64, torch.bfloat16),
     ((2, 1, 3), torch.int32, torch.float64)],
)  # fmt: skip
def test_erased_values_are_zero_and_the_others_as_they_were(
    shape: tuple[int, int, int], kind: torch.dtype, dtype: torch.dtype
) -> None:
    channels, height, width = shape
    rectangles = draw_rectangles(0.7, 0, 0, 20, (height, width))
    values = torch.randn(20, height * width * channels).to(dtype)
    got = values.clone()
    Eraser(shape, CPU)(got, torch.from_numpy(rectangles).to(kind))
    expected = values.view(20, height, width, channels).clone()
    for image, (top, bottom, left, right) in zip(expected, rectangles.T.tolist(), strict=True):
        image[top:bottom, left:right] = 0.0
    assert 0 < (rectangles[1] > 0).sum() < 20
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(got.view(bits), expected.view(20, -1).view(bits))  # no zero is a negative one
