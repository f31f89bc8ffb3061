"""Images a second a core that are decoded, cropped and resized, beside those of plain Pillow.

    python experiments/loader/run.py [--folder flowers_300 --size 224 --resize 256] [--json PATH]

README.md says what is compared and how. What counts is processor time, not time on a clock: a core that another
program had for a while is not laid to the side that waited. Nothing here waits for anything, as files are in the page
cache.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from PIL import Image

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.data.images.crops import random_resized_box
from crossbow_py.data.images.decoding import encoded_size
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.streaming.loader import Loader
from crossbow_py.data.streaming.streamed_data import Key
from experiments.bench.machine import on_cores
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import spread
from experiments.loader import decoders
from experiments.tables.markdown import columns_table, number_of, spread_text, texts_of_kind

BATCH = 32
SEED = 0
PILLOW, DECODED, SHRUNK, CACHED = "Pillow", "decoded", "decoded, shrunk", "cached"
Result = Mapping[str, Any]
# Sides that make images faster make more of them, so that every repetition takes a while.
_CACHED_EPOCHS, _WORKER_EPOCHS, _CACHED_WORKER_EPOCHS = 5, 5, 50


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--folder")
    add = parser.add_argument
    add("--size", type=count, default=224, help="height and width of crops (default %(default)s)")
    add("--resize", type=count, default=256, help="short side of cached images (default %(default)s)")
    add("--seconds", type=positive, default=60.0, help="of measuring (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as caches:
            return measure_loader(given.folder, given.size, given.resize, given.seconds, Path(caches))

    return measure_and_write(parser, argv, measure, result_text)


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
        **{name: spread([own / theirs for own, theirs in zip(side.rates, base.rates, strict=True)], 3)
           for name, base in (("to_pillow", pillow), ("to_decoded", decoded))},
        "n": len(side.rates),
        "images_per_s_repetitions": [round(rate, 1) for rate in side.rates],
    }  # fmt: skip


def headline(result: Result) -> str:
    share = result["method"]["foreign_share"]
    busy = "" if share is None else f" Other programs had {share:.0%} of the core meanwhile."
    return (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}, "
        f"cached with a short side of {result['resize']}.{busy}"
    )


def sides_table(result: Result) -> str:
    return columns_table(result["rows"], {
        "": "name", "images/s a core": number_of("images_per_s"), "÷ Pillow": lambda row: _ratio(row["to_pillow"]),
        "÷ decoded": lambda row: _ratio(row["to_decoded"]), "n": "n",
    })  # fmt: skip


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{sides_table(result)}"


def _ratio(ratio: Mapping[str, float]) -> str:
    if ratio["minimum"] == ratio["maximum"] == 1:
        return "1"
    return spread_text(ratio)


@dataclass
class Side:
    """A way, the images it makes in a repetition, and images a second of processor time of every repetition."""

    name: str
    run: Callable[[int], float]
    images: int
    rates: list[float] = field(default_factory=list)

    def repeat(self, epoch: int) -> None:
        self.rates.append(self.images / self.run(epoch))


def pillow_side(data: ImageFolderData, epochs: int) -> Side:
    """Plain Pillow: open, convert, resize a box. Boxes are drawn before the clock starts; nothing goes to a batch."""
    sizes = [encoded_size(data.name_of(sample)) or (1, 1) for sample in range(len(data))]

    def run(epoch: int) -> float:
        boxes = [
            (sample, random_resized_box(SEED, epoch * epochs + number, sample, *size, data.min_area))
            for number in range(epochs)
            for sample, size in enumerate(sizes)
        ]
        begun = time.thread_time()
        for sample, box in boxes:
            with Image.open(data.name_of(sample)) as opened:
                image = opened.convert("RGB")
            image.resize(
                (data.size, data.size),
                Image.Resampling.BILINEAR,
                box=(box.left, box.top, box.left + box.width, box.top + box.height),
            )
        return time.thread_time() - begun

    return Side(PILLOW, run, epochs * len(data))


def fetch_side(name: str, data: ImageFolderData, epochs: int) -> Side:
    """Batches of training crops by `fetch`, in this process."""

    def run(epoch: int) -> float:
        begun = time.thread_time()
        for keys in batches_of(epoch, epochs, len(data)):
            data.fetch(keys, seed=SEED, training=True, on_sample=_tell_nobody)
        return time.thread_time() - begun

    return Side(name, run, epochs * len(data))


def worker_side(name: str, data: ImageFolderData, epochs: int) -> Side:
    """The same by a worker process a core, as a streaming feed gets them: all that the processes take from their start.

    So what it takes to start them is in it, and to hand batches over, on both sides.
    """
    cores = usable_core_ids()

    def run(epoch: int) -> float:
        with on_cores(cores):
            begun = _own_and_ended_s()
            loader = Loader(
                data, batches_of(epoch, epochs, len(data)), batch_size=BATCH, seed=SEED, training=True,
                num_workers=len(cores), pins=False,
            )  # fmt: skip
            for _ in loader:
                pass
            loader.close()
            return _own_and_ended_s() - begun

    return Side(name, run, epochs * len(data))


def batches_of(epoch: int, epochs: int, count: int) -> Iterator[list[Key]]:
    """Keys of the `epochs` epochs of repetition `epoch`, in the order of samples."""
    for number, first in itertools.product(range(epoch * epochs, (epoch + 1) * epochs), range(0, count, BATCH)):
        yield [Key(number, sample) for sample in range(first, min(count, first + BATCH))]


def _own_and_ended_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _tell_nobody(_: int) -> None:
    """Nobody watches this process."""


TABLES = {"all": result_text}
TABLES_OF_KIND = {decoders.KIND: decoders.TABLES}
TABLES_OVER_ALL = {"decoders": texts_of_kind(decoders.KIND, decoders.headline)}


if __name__ == "__main__":
    raise SystemExit(main())
