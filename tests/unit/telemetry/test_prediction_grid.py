"""The picture of predictions, looked at pixel by pixel where it matters."""

from __future__ import annotations

import numpy as np

from crossbow_py.telemetry.events import Predictions
from crossbow_py.telemetry.prediction_grid import prediction_grid

GREEN, RED = (46, 125, 50), (198, 40, 40)


def shown(images: np.ndarray, targets: tuple[int, ...], predicted: tuple[int, ...], **names: object) -> np.ndarray:
    return prediction_grid(Predictions(images, targets, predicted, (0.5,) * len(targets), **names))


def test_right_answers_are_framed_green_and_wrong_ones_red() -> None:
    grid = shown(np.full((2, 8, 8, 1), 200, np.uint8), (3, 4), (3, 5))
    assert [tuple(grid[13, 13]), tuple(grid[13, 13 + 116])] == [GREEN, RED]
    assert tuple(grid[12 + 4 + 48, 12 + 4 + 48]) == (200, 200, 200)


def test_seven_images_take_two_rows_of_six() -> None:
    one, seven = (shown(np.zeros((n, 8, 8, 3), np.uint8), (0,) * n, (0,) * n) for n in (1, 7))
    assert seven.shape[0] - 12 == 2 * (one.shape[0] - 12)
    assert seven.shape[1] - 12 == 6 * (one.shape[1] - 12)


def test_images_that_are_not_square_keep_their_shape_on_a_dark_square() -> None:
    grid = shown(np.full((1, 4, 8, 3), 250, np.uint8), (0,), (0,))
    middle, top = grid[12 + 4 + 48, 12 + 4 + 48], grid[12 + 4 + 5, 12 + 4 + 48]
    assert middle.tolist() == [250, 250, 250]
    assert top.tolist() == [33, 33, 33]


def test_names_of_classes_are_written_where_they_are_known() -> None:
    predictions = Predictions(np.zeros((1, 4, 4, 1), np.uint8), (1,), (2,), (0.5,), ("cat", "dog"))
    assert [predictions.name(label) for label in (0, 1, 2, -1)] == ["cat", "dog", "2", "-1"]
    images = np.zeros((1, 4, 4, 1), np.uint8)
    assert not np.array_equal(shown(images, (1,), (1,)), shown(images, (1,), (1,), class_names=("cat", "dog")))
