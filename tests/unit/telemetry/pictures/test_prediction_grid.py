"""The picture of predictions, looked at pixel by pixel where it matters."""

from __future__ import annotations

import numpy as np

from crossbow_py.telemetry.events import Predictions
from crossbow_py.telemetry.pictures.prediction_grid import prediction_grid

GREEN, RED = (46, 125, 50), (198, 40, 40)


def shown(images: np.ndarray, targets: tuple[int, ...], predicted: tuple[int, ...], **names: object) -> np.ndarray:
    return prediction_grid(Predictions(images, targets, predicted, (0.5,) * len(targets), **names))


def test_right_answers_are_framed_green_and_wrong_ones_red() -> None:
    grid = shown(np.full((2, 8, 8, 1), 200, np.uint8), (3, 4), (3, 5))
    assert [tuple(grid[13, 13]), tuple(grid[13, 13 + 116])] == [GREEN, RED]
    assert tuple(grid[12 + 4 + 48, 12 + 4 + 48]) == (200, 200, 200)


def test_names_of_classes_are_written_where_they_are_known() -> None:
    predictions = Predictions(np.zeros((1, 4, 4, 1), np.uint8), (1,), (2,), (0.5,), ("cat", "dog"))
    assert [predictions.name(label) for label in (0, 1, 2, -1)] == ["cat", "dog", "2", "-1"]
    images = np.zeros((1, 4, 4, 1), np.uint8)
    assert not np.array_equal(shown(images, (1,), (1,)), shown(images, (1,), (1,), class_names=("cat", "dog")))
