"""Image files of any bytes: pixels, or an image that cannot be read; soon, and in bounded memory."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from crossbow_py.data.images.decoding import UnreadableImage, decode, encoded_size
from tests.unit.data.images.pictures import scene
from tests.unit.fuzz.examining import damaged, depths, examine, memory_of_at_most

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encoded(form: str, mode: str = "RGB", **options: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(scene(40, 24)).convert(mode).save(content, form, **options)
    return content.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


WHOLE = [
    encoded("JPEG"), encoded("JPEG", progressive=True, exif=turned()), encoded("JPEG", "CMYK"), encoded("PNG", "L"),
    encoded("PNG", exif=turned()), encoded("PNG", "P"), encoded("PNG", "I;16"), encoded("PNG", "RGBA"), encoded("WEBP"),
    encoded("WEBP", lossless=True, exif=turned()),
    encoded("WEBP", save_all=True, append_images=[Image.fromarray(scene(40, 24, seed=1))]),
]  # fmt: skip


def checked(content: bytes) -> bytes:
    """A PNG with right checksums, so that what was changed is looked at."""
    if not content.startswith(SIGNATURE):
        return content
    parts, place = [SIGNATURE], len(SIGNATURE)
    while place + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        if place + 12 + length > len(content):
            break
        chunk = content[place + 4 : place + 8 + length]
        parts += [content[place : place + 4], chunk, struct.pack(">I", zlib.crc32(chunk))]
        place += 12 + length
    return b"".join(parts) + content[place:]


def assert_decoded_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    size = encoded_size(path)
    assert size is None or len(size) == 2
    try:
        pixels = decode(path)
    except UnreadableImage:
        return
    assert pixels.dtype == torch.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


@depths(150, 1500)
def test_image_of_any_bytes_is_pixels_or_refused(tmp_path: Path, examples: int) -> None:
    contents = damaged(*WHOLE)
    # A header may claim as many pixels as Pillow allows, 179 million, before the data prove it wrong.
    examine(
        st.one_of(contents, contents.map(checked)),
        lambda content: assert_decoded_or_refused(tmp_path / "image", content),
        examples,
        most_mib=1500,
    )


def png_of_size(width: int, height: int, content: bytes = b"") -> bytes:
    """One that claims a size, and holds nothing but `content`."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", content), (b"IEND", b"")]
    return SIGNATURE + b"".join(struct.pack(">I", len(body)) + name + body + bytes(4) for name, body in chunks)


def jpeg_of_size(width: int, height: int) -> bytes:
    content = bytearray(encoded("JPEG"))
    place = content.index(b"\xff\xc0")  # start of frame: length, precision, height, width
    content[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def webp_of_size(width: int, height: int) -> bytes:
    """With an extended header, whose canvas has any size."""
    canvas = struct.pack("<I", 2) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + encoded("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "content",
    [
        checked(png_of_size(2**31 - 1, 2**31 - 1)),
        checked(png_of_size(2**32 - 1, 2**32 - 1)),
        checked(png_of_size(60_000, 60_000, zlib.compress(bytes(10_000_000)))),
        checked(png_of_size(0, 0)),
        jpeg_of_size(65_500, 65_500),
        jpeg_of_size(0, 65_500),
        webp_of_size(16_383, 16_383),
        webp_of_size(2**24, 2**24),
    ],
    ids=["png", "png of 32 bits", "png with data", "empty png", "jpeg", "jpeg without width", "webp", "huge webp"],
)
def test_image_that_claims_a_size_for_gigabytes_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "image").write_bytes(content)
    with memory_of_at_most(50), pytest.raises(UnreadableImage):
        decode(tmp_path / "image")


@pytest.mark.parametrize("size", [(65_500, 1), (1, 65_500), (4001, 40)])
def test_image_much_longer_than_wide_is_refused_as_enlarging_it_would_take_gigabytes(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    Image.new("RGB", size).save(tmp_path / "image", "JPEG")
    with pytest.raises(UnreadableImage, match=rf"{size[0]} x {size[1]} pixels, more than 100 times as long as wide"):
        decode(tmp_path / "image")
    Image.new("RGB", (4000, 40)).save(tmp_path / "image", "JPEG")
    assert decode(tmp_path / "image").shape == (40, 4000, 3)


def test_png_text_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    text = b"key\0\0" + zlib.compress(bytes(80_000_000), 1)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + bytes(4)
    whole = encoded("PNG")
    (tmp_path / "image").write_bytes(checked(whole[:33] + chunk + whole[33:]))
    with memory_of_at_most(50), pytest.raises(UnreadableImage):
        decode(tmp_path / "image")
