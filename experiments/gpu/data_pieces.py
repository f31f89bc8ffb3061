"""Packs CIFAR-10 into pieces that fit into single calls, and unpacks it to the byte.

    python experiments/gpu/data_pieces.py pack DATA_DIR PIECE ... --room-mib MIB ...
    python experiments/gpu/data_pieces.py unpack DATA_DIR PIECE ...

A batch of CIFAR-10 is a pickle with 30,720,000 bytes of pixels in one run. These become lossless WebP, 1,000 images a
picture, and what is around them xz. Unpacking takes what pieces there are, and may be called again; batches that are
whole are joined and compared with the md5 that was published. Needs NumPy and Pillow alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_PIXELS, _IMAGES, _PICTURE, _COLUMNS = 30_720_000, 10_000, 1_000, 10
_FOLDER = "cifar-10-batches-py"
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f", "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751", "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb", "test_batch": "40351d587109b95175f43aff81a1287e",
}  # fmt: skip
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("data", type=Path)
    parser.add_argument("pieces", type=Path, nargs="+")
    parser.add_argument("--room-mib", type=float, nargs="+", default=[])
    given = parser.parse_args(argv)
    if given.what == "pack":
        return pack(given.data, given.pieces, [int(room * 2**20) for room in given.room_mib])
    return unpack(given.data, given.pieces)


def pack(data: Path, pieces: Sequence[Path], room: Sequence[int]) -> int:
    """Write the pieces, each into its room in bytes; returns 1 where they do not fit."""
    if missing := [name for name in _MD5 if not (data / _FOLDER / name).exists()]:
        print(f"error: {data / _FOLDER} lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    blobs, jobs = [], []
    for name in _MD5:
        content = (data / _FOLDER / name).read_bytes()
        begin = _start_of_pixels(content)
        blobs.append((f"{name}.head.xz", lzma.compress(content[:begin])))
        blobs.append((f"{name}.tail.xz", lzma.compress(content[begin + _PIXELS :])))
        jobs += [(data / _FOLDER / name, number) for number in range(_IMAGES // _PICTURE)]
    with multiprocessing.Pool() as pool:
        blobs += pool.starmap(_packed, jobs)
    used = [0] * len(pieces)
    for name, content in sorted(blobs, key=lambda blob: -len(blob[1])):
        place = max(range(len(pieces)), key=lambda n: room[n] - used[n])
        used[place] += len(content)
        pieces[place].mkdir(parents=True, exist_ok=True)
        (pieces[place] / name).write_bytes(content)
    print("data: " + ", ".join(f"{u / 2**20:.1f} of {r / 2**20:.1f} MiB" for u, r in zip(used, room, strict=True)))
    return int(any(u > r for u, r in zip(used, room, strict=True)))


def _start_of_pixels(content: bytes) -> int:
    """Where the pixels begin: after the opcode of a byte string of that length."""
    found = content.find(b"T" + _PIXELS.to_bytes(4, "little"))
    assert found > 0, "it is a batch of CIFAR-10"
    return found + 5


def to_picture(pixels: Pixels) -> Pixels:
    rows = len(pixels) // _COLUMNS
    own = pixels.reshape(rows, _COLUMNS, 3, 32, 32).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(own.reshape(rows * 32, _COLUMNS * 32, 3))


def from_picture(picture: Pixels) -> Pixels:
    rows = picture.shape[0] // 32
    own = picture.reshape(rows, 32, _COLUMNS, 32, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(own.reshape(rows * _COLUMNS, 3072))


def _packed(path: Path, number: int) -> tuple[str, bytes]:
    content = path.read_bytes()
    pixels = np.frombuffer(content, np.uint8, _PIXELS, _start_of_pixels(content)).reshape(_IMAGES, 3072)
    file = io.BytesIO()
    picture = Image.fromarray(to_picture(pixels[number * _PICTURE : (number + 1) * _PICTURE]))
    picture.save(file, "WEBP", lossless=True, quality=50, method=6, exact=True)
    return f"{path.name}.{number}.webp", file.getvalue()


def _unpacked(path: Path, to: Path) -> str:
    """Unpack a part; returns its name if it cannot be read."""
    partial = to.with_name(f"{to.name}.partial")
    try:
        if path.suffix == ".xz":
            partial.write_bytes(lzma.decompress(path.read_bytes()))
        else:
            partial.write_bytes(from_picture(np.asarray(Image.open(path).convert("RGB"))).tobytes())
    except (OSError, lzma.LZMAError):
        return path.name
    partial.replace(to)
    return ""


def unpack(data: Path, pieces: Sequence[Path]) -> int:
    """Take what there is, say how much of CIFAR-10 is whole, and leave the file `whole` if all is; else return 1."""
    parts = data / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    found = {path.stem: path for piece in pieces if piece.is_dir() for path in piece.iterdir()}
    new = {name: path for name, path in found.items() if not (parts / name).exists()}
    with multiprocessing.Pool(min(12, os.cpu_count() or 1)) as pool:
        broken = list(filter(None, pool.starmap(_unpacked, [(path, parts / name) for name, path in new.items()])))
    if broken:
        print(f"data: {', '.join(sorted(broken))} cannot be read: carry {'it' if len(broken) == 1 else 'them'} again")
    whole = sum(_joined(name, data, parts) for name in _MD5)
    if not broken:
        print(f"data: {whole} of {len(_MD5)} batches of CIFAR-10 are whole")
    if whole == len(_MD5):
        (data / "whole").touch()
    return int(whole < len(_MD5))


def _joined(name: str, data: Path, parts: Path) -> bool:
    """Join a batch if all of its parts are there, and return whether it is whole."""
    to = data / _FOLDER / name
    own = [parts / f"{name}.{part}" for part in ("head", *range(_IMAGES // _PICTURE), "tail")]
    if to.exists() or not all(part.exists() for part in own):
        return to.exists()
    content = b"".join(part.read_bytes() for part in own)
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != _MD5[name]:
        print(f"data: {name} is not what was published")
        return False
    to.parent.mkdir(exist_ok=True)
    to.write_bytes(content)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
