"""A map of ranks over training: how long a round takes each of them, compared with the median rank."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from crossbow_py.telemetry.events import Images

_MOST_COLUMNS = 120
_FIRST_COLUMNS = 8  # from which on the map is shown
_SHOWN_GROWTH = 2  # and again after twice the samples, as a picture takes tens of milliseconds
_WIDTH_PX, _HEIGHT_PX = 960, 640  # of the cells, about
_MOST_HIGH_PX = 24  # of a cell
_LABEL_PX = 15  # from one label to the next at least
_LEFT_PX, _TOP_PX, _BELOW_PX = 56, 34, 24
_FULL = 0.25  # slower or faster than the median by that share is the full colour
_SLOW, _FAST = np.array([198, 40, 40]), np.array([21, 101, 192])
_PAPER, _INK, _SOFT = (255, 255, 255), (33, 33, 33), (110, 110, 110)


class RankMap:
    """Collects ranks' milliseconds of a round. When there are too many columns, two become one, their mean."""

    def __init__(self) -> None:
        self._columns: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        self._waiting: list[list[float]] = []  # to become a column
        self._per_column = 1
        self._first_samples = self._last_samples = 0
        self._next_samples = 0.0

    def add(self, samples_seen: int, step_ms: list[float]) -> None:
        """Add the ranks' times after so many samples."""
        if not self._columns and not self._waiting:
            self._first_samples = samples_seen
        self._last_samples = samples_seen
        self._waiting.append(step_ms)
        if len(self._waiting) < self._per_column:
            return
        self._columns.append(np.mean(self._waiting, axis=0))
        self._waiting = []
        if len(self._columns) == _MOST_COLUMNS:
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns, self._per_column = [(one + other) / 2 for one, other in pairs], 2 * self._per_column

    def due(self) -> Images | None:
        """Return the picture if it is to be shown again: ever more rarely."""
        if len(self._columns) < _FIRST_COLUMNS or self._last_samples < self._next_samples:
            return None
        self._next_samples = self._last_samples * _SHOWN_GROWTH
        return self.last()

    def last(self) -> Images | None:
        """Return the picture, uint8 [H, W, 3]: a row for each rank, from left to right over training. None without any.

        Red is slower than the median rank at that time, blue is faster.
        """
        if not self._columns:
            return None
        steps = np.stack(self._columns, axis=1)
        ratio = steps / np.median(steps, axis=0) - 1
        strength = np.clip(np.abs(ratio) / _FULL, 0, 1)[..., None]
        full = np.where(ratio[..., None] > 0, _SLOW, _FAST)
        colours = np.round(255 + (full - 255) * strength).astype(np.uint8)
        num_ranks, num_columns = ratio.shape
        high, wide = min(_MOST_HIGH_PX, max(3, _HEIGHT_PX // num_ranks)), max(4, _WIDTH_PX // num_columns)
        return self._framed(colours.repeat(high, 0).repeat(wide, 1), num_ranks, high)

    def _framed(self, cells: Images, num_ranks: int, high: int) -> Images:
        height, width = cells.shape[:2]
        font = ImageFont.load_default(13)
        title = f"a round of each rank: red is slower than the median rank (full at {_FULL:+.0%}), blue is faster"
        least = round(font.getlength(title))
        size = (_LEFT_PX + max(width, least) + 14, _TOP_PX + height + _BELOW_PX)
        picture = Image.new("RGB", size, _PAPER)
        draw = ImageDraw.Draw(picture)
        picture.paste(Image.fromarray(cells), (_LEFT_PX, _TOP_PX))
        draw.rectangle((_LEFT_PX - 1, _TOP_PX - 1, _LEFT_PX + width, _TOP_PX + height), outline=_SOFT)
        draw.text((_LEFT_PX, 8), title, _INK, font)
        for rank in range(0, num_ranks, max(1, -(-_LABEL_PX // high))):
            draw.text((_LEFT_PX - 6, _TOP_PX + rank * high + high // 2), str(rank), _INK, font, anchor="rm")
        below = _TOP_PX + height + 5
        draw.text((_LEFT_PX, below), f"{self._first_samples:,} samples", _SOFT, font)
        draw.text((_LEFT_PX + width, below), f"{self._last_samples:,}", _SOFT, font, anchor="ra")
        return np.asarray(picture)
