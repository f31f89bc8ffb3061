"""A picture of a model's predictions for some images: framed green if right, red if wrong."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from crossbow_py.telemetry.events import Images, Predictions

_IMAGE_PX, _FRAME_PX, _GAP_PX, _CAPTION_PX = 96, 4, 12, 34
_COLUMNS = 6
_MOST_LETTERS = 10  # of a name
_RIGHT, _WRONG = (46, 125, 50), (198, 40, 40)
_PAPER, _INK = (255, 255, 255), (33, 33, 33)


def prediction_grid(predictions: Predictions) -> Images:
    """Return the picture, uint8 [H, W, 3]: six images in a row, each with its predicted class and probability.

    A wrong one also shows its right class.
    """
    count = len(predictions.targets)
    columns = min(_COLUMNS, count)
    cell, row = _IMAGE_PX + 2 * _FRAME_PX + _GAP_PX, _IMAGE_PX + 2 * _FRAME_PX + _GAP_PX + _CAPTION_PX
    grid = Image.new("RGB", (columns * cell + _GAP_PX, -(-count // columns) * row + _GAP_PX), _PAPER)
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(13)
    answers = zip(predictions.targets, predictions.predicted, predictions.probabilities, strict=True)
    for index, (target, predicted, probability) in enumerate(answers):
        left, top = _GAP_PX + index % columns * cell, _GAP_PX + index // columns * row
        right = target == predicted
        colour = _RIGHT if right else _WRONG
        edge = _IMAGE_PX + 2 * _FRAME_PX
        draw.rectangle((left, top, left + edge - 1, top + edge - 1), fill=colour)
        grid.paste(_scaled(predictions.images[index]), (left + _FRAME_PX, top + _FRAME_PX))
        guess, true = (predictions.name(label)[:_MOST_LETTERS] for label in (predicted, target))
        draw.text((left, top + edge + 2), f"{guess} {probability:.2f}", _INK, font)
        if not right:
            draw.text((left, top + edge + 17), f"is {true}", _WRONG, font)
    return np.asarray(grid)


def _scaled(image: Images) -> Image.Image:
    """Scale an image onto a square; the pixels of small ones stay sharp."""
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")
    way = Image.Resampling.NEAREST if max(picture.size) <= _IMAGE_PX else Image.Resampling.LANCZOS
    share = _IMAGE_PX / max(picture.size)
    width, height = (max(1, round(side * share)) for side in picture.size)
    square = Image.new("RGB", (_IMAGE_PX, _IMAGE_PX), _INK)
    square.paste(picture.resize((width, height), way), ((_IMAGE_PX - width) // 2, (_IMAGE_PX - height) // 2))
    return square
