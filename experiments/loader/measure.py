"""Images a second of every way to make training crops: repetitions in turns, and what they come to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.image_folder import ImageFolder
from experiments.loader.sides import (
    BATCH,
    CACHED,
    DECODED,
    SHRUNK,
    Side,
    fetch_side,
    on_cores,
    pillow_side,
    worker_side,
)

# Sides that make images faster make more of them, so that every repetition takes a while.
_CACHED_EPOCHS, _WORKER_EPOCHS, _CACHED_WORKER_EPOCHS = 5, 5, 50


def measure_loader(folder: str, size: int, resize: int, seconds: float, cache_dir: Path) -> dict[str, Any]:
    """Images a second of processor time by side, in turns for `seconds`, as plain values. Torch gets one thread.

    Ratios are medians of those within repetitions.

    Raises:
        UserError: the images or a cache of them cannot be had.
    """
    torch.set_num_threads(1)
    decoded, shrunk, cached = _data_sets(ImageFolder(folder=folder, size=size, resize=resize), cache_dir)
    sides = [
        pillow_side(decoded, 1),
        fetch_side(DECODED, decoded, 1),
        fetch_side(SHRUNK, shrunk, 1),
        fetch_side(CACHED, cached, _CACHED_EPOCHS),
        worker_side(f"{DECODED}, by workers", decoded, _WORKER_EPOCHS),
        worker_side(f"{CACHED}, by workers", cached, _CACHED_WORKER_EPOCHS),
    ]
    with on_cores(sorted(usable_core_ids())[-1:]):
        shares = _measure(sides, seconds)
    return {
        "folder": Path(folder).name,
        "images": len(decoded),
        "size": size,
        "resize": resize,
        "method": {"seconds": seconds, "batch": BATCH, "foreign_share": round(median(shares), 2) if shares else None},
        **summary(sides),
    }


def _data_sets(settings: ImageFolder, cache_dir: Path) -> tuple[ImageFolderData, ImageFolderData, ImageFolderData]:
    """Training images that are decoded, decoded and made smaller, and read from a cache."""
    nowhere = Path(__file__)  # no folder can be made in a file, so that there is no cache
    caching = [replace(settings, cache=True, cache_dir=str(place)) for place in (nowhere, cache_dir)]
    found = []
    for source in (settings, *caching):
        train = source.read(progress=False)[0]
        assert isinstance(train, ImageFolderData), "an ImageFolder reads nothing else"
        found.append(train)
    if not found[2].has_cache:
        raise UserError(found[2].notes[0])
    return found[0], found[1], found[2]


def _measure(sides: Sequence[Side], seconds: float) -> list[float]:
    """Repetitions of all sides until the time is over; the share of the core that others had while the first ran."""
    for side in sides:
        side.run(0)  # files come into the page cache
    end_s, shares = time.monotonic() + seconds, list[float | None]()
    for epoch in itertools.count(1):
        before = LoadSnapshot.take()
        sides[0].repeat(epoch)
        shares.append(foreign_share(before, LoadSnapshot.take()))
        for side in sides[1:]:
            side.repeat(epoch)
        if time.monotonic() > end_s:
            break
    return [share for share in shares if share is not None]


def summary(sides: Sequence[Side]) -> dict[str, Any]:
    """The figures of `measure_loader`, and a row for every side; the first is Pillow's, the second decodes."""
    rows = [_row(side, sides[0], sides[1]) for side in sides]
    by_name = {row["name"]: row for row in rows}
    return {
        "decoded_to_pillow": by_name[DECODED]["to_pillow"],
        "cached_to_decoded": by_name[CACHED]["to_decoded"],
        "rows": rows,
    }


def _row(side: Side, pillow: Side, decoded: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "images_per_s": round(median(side.rates), 1),
        "to_pillow": _ratio(side, pillow),
        "to_decoded": _ratio(side, decoded),
        "n": len(side.rates),
        "images_per_s_repetitions": [round(rate, 1) for rate in side.rates],
    }


def _ratio(side: Side, other: Side) -> dict[str, float]:
    """Median, smallest and largest of the ratios within repetitions."""
    ratios = [own / theirs for own, theirs in zip(side.rates, other.rates, strict=True)]
    return {"median": round(median(ratios), 3), "minimum": round(min(ratios), 3), "maximum": round(max(ratios), 3)}
