"""A picture of a confusion matrix: right predictions blue, wrong ones red, and the most frequent mistakes by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.events import Images

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_MATRIX_PX = 800  # at most, unless there are more classes
_CELL_PX = 44
_NUMBER_PX = 26  # cells of that size have their number in them
_LABEL_PX = 15  # from one label to the next at least
_GAP_PX, _LIST_PX = 14, 330
_FIRST_PX, _LINE_PX = 66, 19  # the list's first line, and from each to the next
_MOST_MISTAKES = 15
_MOST_LETTERS = 16  # of a name
_RIGHT, _WRONG = np.array([21, 101, 192]), np.array([198, 40, 40])
_PAPER, _INK, _SOFT = (255, 255, 255), (33, 33, 33), (110, 110, 110)


def confusion_picture(counts: ClassCounts) -> Images:
    """Return the picture, uint8 [H, W, 3]. A row is a class, a column what it was predicted as.

    The colour is the square root of the share of the row, so that rare mistakes are seen.
    """
    font, small = ImageFont.load_default(13), ImageFont.load_default(11)
    num_classes = counts.num_classes
    cell = max(1, min(_CELL_PX, _MATRIX_PX // num_classes))
    step = max(1, -(-_LABEL_PX // cell))
    labelled = [(label, counts.names[label][:_MOST_LETTERS]) for label in range(0, num_classes, step)]
    margin = round(max(font.getlength(name) for _, name in labelled)) + _GAP_PX
    left, top = margin + 22, margin + 30
    side = cell * num_classes
    mistakes = counts.confusions(_MOST_MISTAKES)
    height = top + max(side, _FIRST_PX + _LINE_PX * len(mistakes)) + _GAP_PX
    size = (left + side + 2 * _GAP_PX + _LIST_PX, height)
    picture = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(picture)
    picture.paste(Image.fromarray(_cells(counts, cell)), (left, top))
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=_SOFT)
    draw.text((left, 6), "predicted as", _SOFT, small)
    _write_upright(picture, (4, top), "class", small)
    for label, name in labelled:
        middle = label * cell + cell // 2
        draw.text((left - 6, top + middle), name, _INK, font, anchor="rm")
        _write_upright(picture, (left + middle - 9, top - 6), name, font, ends=True)
    if cell >= _NUMBER_PX:
        _write_numbers(draw, counts, (left, top), cell)
    _write_mistakes(draw, counts, mistakes, (left + side + 2 * _GAP_PX, top))
    return np.asarray(picture)


def _cells(counts: ClassCounts, cell: int) -> Images:
    support = counts.counts.sum(1, keepdims=True)
    strength = np.sqrt(counts.counts[:, :-1] / np.maximum(support, 1))[..., None]
    full = np.where(np.eye(counts.num_classes, dtype=bool)[..., None], _RIGHT, _WRONG)
    colours = np.round(255 + (full - 255) * strength).astype(np.uint8)
    found: Images = colours.repeat(cell, 0).repeat(cell, 1)
    if cell >= _NUMBER_PX:
        found[cell - 1 :: cell] = found[:, cell - 1 :: cell] = 225  # lines between cells
    return found


def _write_numbers(draw: ImageDraw.ImageDraw, counts: ClassCounts, corner: tuple[int, int], cell: int) -> None:
    font = ImageFont.load_default(12 if cell > 34 else 10)
    for row, values in enumerate(counts.counts[:, :-1].tolist()):
        support = max(1, int(counts.counts[row].sum()))
        for column, value in enumerate(values):
            place = (corner[0] + column * cell + cell // 2, corner[1] + row * cell + cell // 2)
            colour = _PAPER if value / support > 0.25 else _INK
            draw.text(place, _short(value) if value else "", colour, font, anchor="mm")


def _short(value: int) -> str:
    """Return a number in at most four letters: 9999, 10k, 1.2M."""
    for unit, size in (("", 1), ("k", 1000), ("M", 1_000_000)):
        if value < 10_000 * size:
            return f"{value / size:.0f}{unit}"
    return f"{value / 1e9:.0f}G"


def _write_mistakes(
    draw: ImageDraw.ImageDraw, counts: ClassCounts, mistakes: Sequence[tuple[int, int, int]], corner: tuple[int, int]
) -> None:
    font, (left, top) = ImageFont.load_default(13), corner
    right, total = int(counts.counts.diagonal().sum()), int(counts.counts.sum())
    draw.text((left, top), f"{right:,} of {total:,} right", _INK, font)
    if counts.num_non_finite:
        draw.text((left, top + 20), f"{counts.num_non_finite:,} with outputs that are not finite", _INK, font)
    draw.text((left, top + 46), "most frequent mistakes" if mistakes else "no mistakes", _SOFT, font)
    for line, (count, actual, predicted) in enumerate(mistakes):
        at = top + _FIRST_PX + _LINE_PX * line
        names = (counts.names[label][:_MOST_LETTERS] for label in (actual, predicted))
        draw.text((left + 52, at), f"{count:,}", _INK, font, anchor="ra")
        draw.text((left + 62, at), " taken for ".join(names), _INK, font)


def _write_upright(picture: Image.Image, place: tuple[int, int], text: str, font: _Font, ends: bool = False) -> None:
    """Write text from below upwards, beginning or ending at `place`: its top left corner, or its bottom left one."""
    width, height = round(font.getlength(text)) + 2, 17
    written = Image.new("RGB", (width, height), _PAPER)
    ImageDraw.Draw(written).text((0, 1), text, _INK if ends else _SOFT, font)
    upright = written.rotate(90, expand=True)
    picture.paste(upright, (place[0], place[1] - upright.height if ends else place[1]))
