"""The picture of a confusion matrix: which colour a cell has, and what fits for few and for many classes."""

from __future__ import annotations

import numpy as np
import pytest

from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.pictures.confusion_picture import confusion_picture


def matrix(size: int, wrong: int = 0) -> ClassCounts:
    counts = np.zeros((size, size + 1), dtype=np.int64)
    np.fill_diagonal(counts, 100 - wrong)
    counts[0, 1] = wrong
    counts[0, 0] = 100 - wrong
    return ClassCounts(counts)


def colours(counts: ClassCounts) -> set[tuple[int, ...]]:
    return {tuple(map(int, each)) for each in confusion_picture(counts).reshape(-1, 3)}


def test_right_predictions_are_blue_and_wrong_ones_red_by_the_root_of_their_share() -> None:
    found = colours(matrix(2, wrong=25))
    right = tuple(round(255 + (full - 255) * 0.75**0.5) for full in (21, 101, 192))
    wrong = tuple(round(255 + (full - 255) * 0.5) for full in (198, 40, 40))
    assert {right, wrong} <= found
    assert wrong not in colours(matrix(2))


@pytest.mark.parametrize(("size", "side"), [(2, 88), (10, 440), (100, 800), (1000, 1000)])
def test_picture_has_room_for_every_class_and_is_no_larger_than_a_screen_where_it_can(size: int, side: int) -> None:
    picture = confusion_picture(matrix(size, wrong=3))
    assert picture.dtype == np.uint8
    height, width, channels = picture.shape
    assert channels == 3
    assert side < height < side + 150 and side < width < side + 550


def test_mistakes_are_listed() -> None:
    few, many = matrix(60, wrong=1), matrix(60, wrong=1)
    many.counts[5:15, 20] = 7
    side = confusion_picture(few).shape[1] - 330  # from there on is the list
    ink = [int((confusion_picture(each)[:, side:] < 100).sum()) for each in (few, many)]
    assert ink[1] > 2 * ink[0]
