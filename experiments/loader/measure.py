"""Images a second a core of every way to make training crops: epochs in turns, and what they come to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.images.source import ImageFolder
from crossbow_py.errors import UserError
from experiments.common.machine import usable_core_ids
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
from experiments.throughput.load import LoadSnapshot, foreign_share

MAX_FOREIGN_SHARE = 0.15
_ATTEMPTS, _RETRY_AFTER_S = 3, 0.3
_CACHED_EPOCHS = 10  # of workers; one of a small data set is over too soon


def measure_loader(folder: str, size: int, resize: int, seconds: float, cache_dir: Path) -> dict[str, Any]:
    """Images/s a core by side, in turns for `seconds`, as plain values. Torch's threads are set to 1.

    Ratios are medians of those within repetitions. What has no clean window, since others took too much of the
    processor all the time, is None.

    Raises:
        UserError: the images or a cache of them cannot be had.
    """
    torch.set_num_threads(1)
    decoded, shrunk, cached = _data_sets(ImageFolder(folder=folder, size=size, resize=resize), cache_dir)
    sides = [
        pillow_side(decoded),
        fetch_side(DECODED, decoded),
        fetch_side(SHRUNK, shrunk),
        fetch_side(CACHED, cached),
        worker_side(f"{DECODED}, by workers", decoded, 1),
        worker_side(f"{CACHED}, by workers", cached, _CACHED_EPOCHS),
    ]
    with on_cores(sorted(usable_core_ids())[-1:]):
        known = _measure(sides, seconds)
    return {
        "folder": Path(folder).name,
        "images": len(decoded),
        "size": size,
        "resize": resize,
        "method": {
            "seconds": seconds,
            "batch": BATCH,
            "max_foreign_share": MAX_FOREIGN_SHARE,
            "foreign_load_known": known,
        },
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


def _measure(sides: Sequence[Side], seconds: float) -> bool:
    """Repetitions, an epoch a side, until the time is over. Returns whether others' load is known."""
    known = True
    for side in sides:
        side.run(0)  # files come into the page cache
    end_s, epoch = time.monotonic() + seconds, 0
    while not sides[0].windows or time.monotonic() < end_s:
        epoch += 1
        for side in sides:
            known = _repetition(side, epoch, end_s) and known
    return known


def _repetition(side: Side, epoch: int, end_s: float) -> bool:
    """Add a clean window, tried again while there is time; None when none was. Whether others' load is known."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            if time.monotonic() > end_s:
                break
            time.sleep(_RETRY_AFTER_S)
        before = LoadSnapshot.take()
        taken = side.run(epoch)
        share = foreign_share(before, LoadSnapshot.take()) if side.watches_load else None
        if share is None or share <= MAX_FOREIGN_SHARE:
            side.windows.append(side.images / taken / side.cores)
            return share is not None or not side.watches_load
        side.dropped += 1
    side.windows.append(None)
    return True


def summary(sides: Sequence[Side]) -> dict[str, Any]:
    """The figures of `measure_loader`, and a row for every side."""
    rows = [_row(side, sides[0], sides[1]) for side in sides]
    by_name = {row["name"]: row for row in rows}
    return {
        "decoded_to_pillow": by_name[DECODED]["to_pillow"],
        "cached_to_decoded": by_name[CACHED]["to_decoded"],
        "rows": rows,
    }


def _row(side: Side, pillow: Side, decoded: Side) -> dict[str, Any]:
    kept = side.kept()
    return {
        "name": side.name,
        "cores": side.cores,
        "images_per_s": round(median(kept), 1) if kept else None,
        "to_pillow": _ratio(side, pillow),
        "to_decoded": _ratio(side, decoded),
        "n": len(kept),
        "dropped": side.dropped,
        "images_per_s_windows": [None if window is None else round(window, 1) for window in side.windows],
    }


def _ratio(side: Side, other: Side) -> dict[str, float] | None:
    """Median, smallest and largest of the ratios within repetitions in which both have a clean window."""
    pairs = zip(side.windows, other.windows, strict=False)
    ratios = [own / theirs for own, theirs in pairs if own is not None and theirs is not None]
    if not ratios:
        return None
    return {"median": round(median(ratios), 3), "minimum": round(min(ratios), 3), "maximum": round(max(ratios), 3)}
