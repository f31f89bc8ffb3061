"""Which decoder makes training crops of JPEG files the fastest, on one core?

    python experiments/loader/decoders.py [--folder flowers_300 --size 224] [--json PATH]

README.md says what is compared and how. A decoder that is not installed, or does not load, is left out by name.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np
import torch
from PIL import Image, features
from torch import Tensor

from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from crossbow_py.data.images.crops import Box, random_resized_box
from crossbow_py.data.images.decoding import crop_resized, decode
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.image_folder import ImageFolder
from experiments.bench.machine import on_cores
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import spread
from experiments.tables.markdown import markdown_table, number, spread_text

Result = Mapping[str, Any]
Decode = Callable[[str], Tensor]
KIND, WINS, SEED = "decoders", 1.3, 0
OURS, FASTER, DRAFT = "Pillow, as here", "simplejpeg, as here", "Pillow, draft"
PACKAGES = {OURS: "pillow", FASTER: "simplejpeg", DRAFT: "pillow", "torchvision": "torchvision",
            "torchcodec": "torchcodec", "simplejpeg": "simplejpeg", "PyTurboJPEG": "PyTurboJPEG",
            "imagecodecs": "imagecodecs", "OpenCV": "opencv-python-headless"}  # fmt: skip
PHOTOGRAPHS = "photographs"
MOSAICS = ((500, 375), (1600, 1200))  # the usual size of ImageNet's, and one that a telephone would call small
_QUALITY, _COMPARED = 92, 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--folder")
    add = parser.add_argument
    add("--size", type=count, default=224, help="height and width of crops (default %(default)s)")
    add("--images", type=count, default=100, help="different images of each size (default %(default)s)")
    add("--seconds", type=positive, default=120.0, help="of measuring, for each size (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return measure_decoders(given.folder, given.size, given.images, given.seconds, Path(folder))

    return measure_and_write(parser, argv, measure, result_text)


def measure_decoders(folder: str, size: int, most: int, seconds: float, scratch: Path) -> dict[str, Any]:
    """Images a second of processor time by decoder and size of images, in turns for `seconds` each. One thread.

    Raises UserError if there are no images.
    """
    torch.set_num_threads(1)
    data = ImageFolder(folder=folder, size=size, resize=size).read(progress=False)[0]
    assert isinstance(data, ImageFolderData), "an ImageFolder reads nothing else"
    paths = [as_jpeg(data.name_of(sample), scratch) for sample in range(min(most, len(data)))]
    sets = {PHOTOGRAPHS: paths, **{f"{w} x {h}": mosaics(paths, w, h, scratch) for w, h in MOSAICS}}
    decoders, left_out = known_decoders(size)
    with on_cores(sorted(usable_core_ids())[-1:]):
        measured = {name: measure_set(own, size, decoders, seconds) for name, own in sets.items()}
    return {
        "kind": KIND, "folder": Path(folder).name, "size": size, "seconds": seconds, "left_out": left_out,
        "versions": {name: version(PACKAGES[name]) for name in decoders},
        "libjpeg_turbo": features.version_feature("libjpeg_turbo"), "sets": measured,
    }  # fmt: skip


def known_decoders(size: int) -> tuple[dict[str, Decode], dict[str, str]]:
    """The decoders that load, and why the others do not. Each makes uint8 [H, W, 3] of a path."""
    found: dict[str, Decode] = {OURS: lambda path: decode(path, False), DRAFT: lambda path: drafted(path, size)}
    left_out: dict[str, str] = {}
    example = np.zeros((8, 8, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "example.jpg")
        Image.fromarray(example).save(path)
        for name, make in _MAKERS.items():
            try:
                found[name] = make()
                found[name](path)
            except (ImportError, OSError, RuntimeError) as error:
                found.pop(name, None)
                left_out[name] = str(error).splitlines()[0]
    return found, left_out


def drafted(path: str, size: int) -> Tensor:
    """Decode with half, a quarter or an eighth of the pixels, where a crop of the whole image still has enough."""
    with Image.open(path) as image:
        image.draft("RGB", (size, size))  # at least as large
        return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB")))


def _faster_here() -> Decode:
    import_module("simplejpeg")
    return decode


def _torchvision() -> Decode:
    module = import_module("torchvision.io")
    read, decode_jpeg, mode = module.read_file, module.decode_jpeg, module.ImageReadMode.RGB
    return lambda path: decode_jpeg(read(path), mode=mode).permute(1, 2, 0)


def _torchcodec() -> Decode:
    decode_jpeg = import_module("torchcodec.decoders").decode_jpeg
    return lambda path: decode_jpeg(path).permute(1, 2, 0)


def _simplejpeg() -> Decode:
    decode_jpeg = import_module("simplejpeg").decode_jpeg
    return lambda path: torch.from_numpy(decode_jpeg(Path(path).read_bytes()))


def _turbojpeg() -> Decode:
    module = import_module("turbojpeg")
    codec, rgb = module.TurboJPEG(), module.TJPF_RGB
    return lambda path: torch.from_numpy(codec.decode(Path(path).read_bytes(), pixel_format=rgb))


def _imagecodecs() -> Decode:
    decode_jpeg = import_module("imagecodecs").jpeg8_decode
    return lambda path: torch.from_numpy(decode_jpeg(Path(path).read_bytes()))


def _opencv() -> Decode:
    module = import_module("cv2")
    module.setNumThreads(1)
    flag = module.IMREAD_COLOR_RGB
    return lambda path: torch.from_numpy(module.imread(path, flag))


_MAKERS: Mapping[str, Callable[[], Decode]] = {
    FASTER: _faster_here, "torchvision": _torchvision, "torchcodec": _torchcodec, "simplejpeg": _simplejpeg,
    "PyTurboJPEG": _turbojpeg, "imagecodecs": _imagecodecs, "OpenCV": _opencv,
}  # fmt: skip


def as_jpeg(path: str, folder: Path) -> str:
    """The path of a JPEG file, or of a copy as one of a file in another format."""
    with Image.open(path) as image:
        if image.format == "JPEG":
            return path
        copy = str(folder / f"{Path(path).name}.jpg")
        image.convert("RGB").save(copy, quality=_QUALITY)
    return copy


def mosaics(paths: Sequence[str], width: int, height: int, folder: Path) -> list[str]:
    """As many JPEG files of that size, each laid out with photographs as they are, so that it has as much detail."""
    made, draw = [], random.Random(SEED)
    for index in range(len(paths)):
        mosaic = Image.new("RGB", (width, height))
        top = 0
        while top < height:
            left, row = 0, []
            while left < width:
                with Image.open(draw.choice(paths)) as photograph:
                    mosaic.paste(photograph.convert("RGB"), (left, top))
                    left += photograph.width
                    row.append(photograph.height)
            top += min(row)
        made.append(str(folder / f"{width}_{height}_{index}.jpg"))
        mosaic.save(made[-1], quality=_QUALITY)
    return made


def measure_set(paths: Sequence[str], size: int, decoders: Mapping[str, Decode], seconds: float) -> dict[str, Any]:
    """Images/s of every decoder, alone and with crop and resize, as plain values."""
    alone: dict[str, list[float]] = {name: [] for name in decoders}
    whole: dict[str, list[float]] = {name: [] for name in decoders}
    for make in decoders.values():
        crops_per_s(paths, make, size, 0)  # files come into the page cache
    end_s, before = time.monotonic() + seconds, LoadSnapshot.take()
    for epoch in itertools.count(1):
        for name, make in decoders.items():
            alone[name].append(decoded_per_s(paths, make))
            whole[name].append(crops_per_s(paths, make, size, epoch))
        if time.monotonic() > end_s:
            break
    share = foreign_share(before, LoadSnapshot.take())
    differ = {name: difference(paths[:_COMPARED], make) for name, make in decoders.items()}
    return {
        "images": len(paths),
        "mean_kb": round(sum(Path(path).stat().st_size for path in paths) / len(paths) / 1000, 1),
        "foreign_share": None if share is None else round(share, 2),
        "rows": [row(name, alone, whole, differ[name]) for name in decoders],
    }


def row(
    name: str, alone: Mapping[str, Sequence[float]], whole: Mapping[str, Sequence[float]], differ: float | None
) -> dict[str, Any]:
    """A decoder's figures; ratios are those within repetitions, to decoding as here."""
    return {
        "name": name,
        "decoded_per_s": round(median(alone[name]), 1),
        "crops_per_s": round(median(whole[name]), 1),
        "decoded_to_ours": spread([own / ours for own, ours in zip(alone[name], alone[OURS], strict=True)], 3),
        "crops_to_ours": spread([own / ours for own, ours in zip(whole[name], whole[OURS], strict=True)], 3),
        "differs_by": differ,
        "n": len(whole[name]),
    }


def decoded_per_s(paths: Sequence[str], make: Decode) -> float:
    begun_s = time.process_time()
    for path in paths:
        make(path)
    return len(paths) / (time.process_time() - begun_s)


def crops_per_s(paths: Sequence[str], make: Decode, size: int, epoch: int) -> float:
    """The same with a random crop of each, resized into a slot of a batch, as in training."""
    slot = torch.empty((1, 3, size, size), dtype=torch.uint8, memory_format=torch.channels_last)
    begun_s = time.process_time()
    for sample, path in enumerate(paths):
        pixels = make(path)
        height, width, _ = pixels.shape
        box: Box = random_resized_box(SEED, epoch, sample, width, height, 0.08)
        crop_resized(pixels, box, slot)
    return len(paths) / (time.process_time() - begun_s)


def difference(paths: Sequence[str], make: Decode) -> float | None:
    """The mean difference of its pixels from ours, of 255; None if it decodes to fewer pixels."""
    pairs = [(make(path), decode(path, False)) for path in paths]
    if any(own.shape != ours.shape for own, ours in pairs):
        return None
    return round(sum(float((own.int() - ours.int()).abs().float().mean()) for own, ours in pairs) / len(pairs), 4)


def headline(result: Result) -> str:
    """Say which decoders that make the same pixels win clearly, by the size of images."""
    said = []
    for name, own in result["sets"].items():
        rivals = [each for each in own["rows"] if each["name"] not in (OURS, DRAFT)]
        if not rivals:
            continue
        best = max(rivals, key=lambda each: each["crops_to_ours"]["median"])
        verdict = "a clear win" if best["crops_to_ours"]["median"] >= WINS else "no clear win"
        ratio = spread_text(best["crops_to_ours"])
        said.append(f"{name}: {best['name']} makes {ratio} times the crops of Pillow, {verdict} (from {WINS} on).")
        said += [
            f"What users get, {FASTER}, makes {spread_text(each['crops_to_ours'])}."
            for each in rivals
            if each["name"] == FASTER and each is not best
        ]
    return " ".join(said)


def result_text(result: Result) -> str:
    header = ["", "decoded/s a core", "÷ as here", "crops/s a core", "÷ as here", "pixels differ by", "n"]
    parts = [headline(result)]
    for name, own in result["sets"].items():
        rows = [
            [
                f"{each['name']} {result['versions'][each['name']]}",
                f"{each['decoded_per_s']:,.0f}",
                spread_text(each["decoded_to_ours"]),
                f"{each['crops_per_s']:,.0f}",
                spread_text(each["crops_to_ours"]),
                number(each["differs_by"], ".4f"),
                str(each["n"]),
            ]
            for each in own["rows"]
        ]
        busy = "" if own["foreign_share"] is None else f"; other programs had {own['foreign_share']:.0%} of the core"
        parts.append(f"{name}, {own['images']} files of {own['mean_kb']:g} kB in the mean{busy}:")
        parts.append(markdown_table(header, rows))
    parts += [f"{name} is left out: {reason.rstrip('.')}." for name, reason in result["left_out"].items()]
    return "\n\n".join(parts)


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
