"""Boxes: bounds, distribution, the centre fallback, and numbers that hang on nothing but (seed, epoch, sample)."""

from __future__ import annotations

import numpy as np
import pytest

from crossbow_py.data.images.crops import Box, centre_box, random_resized_box, resized_extent
from crossbow_py.data.randomness import sample_words


def boxes(count: int, width: int, height: int, min_area: float = 0.08) -> np.ndarray:
    return np.array([random_resized_box(1, 2, sample, width, height, min_area) for sample in range(count)])


def test_random_boxes_have_the_areas_ratios_and_places_of_the_rule() -> None:
    left, top, width, height = boxes(6000, 1000, 1000).T
    area, log_ratio = width * height / 1e6, np.log(width / height)
    small = area < 0.5
    assert area.min() == pytest.approx(0.08, abs=0.002)
    # A square holds every ratio of an area up to 3/4, and a share log(1/a) / log(4/3) of those of a larger area a. An
    # attempt fits with probability (0.67 + 0.119) / 0.92 = 0.858, and a box has less than a half of the area with
    # (0.42 / 0.92) / 0.858 = 0.532; 3.5 standard deviations of 6,000 are 0.023.
    assert small.mean() == pytest.approx(0.532, abs=0.023)
    assert area[small].mean() == pytest.approx(0.29, abs=0.01)
    assert np.abs(log_ratio).max() <= np.log(4 / 3) + 0.01
    counts = np.histogram(log_ratio[small], 8, (-np.log(4 / 3), np.log(4 / 3)))[0]
    assert counts.min() > 0.8 * small.sum() / 8
    places = (left / (1001 - width))[small], (top / (1001 - height))[small]
    assert [place.mean() for place in places] == pytest.approx([0.5, 0.5], abs=0.02)
    assert abs(np.corrcoef(*places)[0, 1]) < 0.06


def test_random_box_is_redrawn_until_it_fits_and_later_attempts_use_later_words() -> None:
    # 1000 x 450: ratios up to 4/3 of large areas are too high for it, so that some samples need a second attempt.
    def by_hand(sample: int) -> tuple[int, Box | None]:
        uniform = (sample_words(0, "resized crop", 0, sample, 40) >> np.uint64(11)) * 2.0**-53
        for attempt, (area, ratio, top, left) in enumerate(uniform.reshape(10, 4)):
            pixels, aspect = 450_000 * (0.08 + 0.92 * area), np.exp(np.log(3 / 4) + ratio * 2 * np.log(4 / 3))
            width, height = round(np.sqrt(pixels * aspect)), round(np.sqrt(pixels / aspect))
            if width <= 1000 and height <= 450:
                return attempt, Box(int(left * (1001 - width)), int(top * (451 - height)), width, height)
        return 10, None

    expected = [by_hand(sample) for sample in range(60)]
    assert {attempt for attempt, _ in expected} >= {0, 1, 2}
    for sample, (attempt, box) in enumerate(expected):
        if attempt < 10:
            assert random_resized_box(0, 0, sample, 1000, 450, 0.08) == box


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(1000, 30, Box(480, 0, 40, 30)), (30, 1000, Box(0, 480, 30, 40))],
)
def test_box_that_never_fits_is_the_largest_in_the_centre(width: int, height: int, expected: Box) -> None:
    assert random_resized_box(0, 0, 0, width, height, 0.9) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [((500, 375), (341, 256)), ((375, 500), (256, 341)), ((256, 256), (256, 256)), ((10, 5000), (256, 128_000))],
)
def test_resized_extent_keeps_the_ratio_of_the_sides(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized_extent(*size, 256) == expected  # int(256 · 500 / 375) = 341


def test_centre_box_rounds_halves_to_the_even_pixel() -> None:
    assert centre_box(341, 256, 224) == Box(58, 16, 224, 224)  # 58.5
    assert centre_box(343, 256, 224) == Box(60, 16, 224, 224)  # 59.5
