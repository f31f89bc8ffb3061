"""Every format, mode and orientation against Pillow's own conversions; damaged files; resizing against Pillow's."""

from __future__ import annotations

import io
import pickle
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from crossbow_py.data.images.crops import Box
from crossbow_py.data.images.decoding import (
    FastJpegs,
    UnreadableImage,
    centre_cropped,
    crop_resized,
    decode,
    encoded_size,
    fast_jpegs,
    shrunk,
)
from tests.unit.data.images.pictures import save, scene, truncate

SCENE = scene(37, 23)
ORIENTATION = 0x0112


def largest_difference(pixels: torch.Tensor, expected: np.ndarray) -> int:
    ours = pixels.numpy()
    assert ours.shape == expected.shape
    assert ours.dtype == np.uint8
    return int(np.abs(ours.astype(int) - expected.astype(int)).max())


def slot(height: int, width: int) -> torch.Tensor:
    return torch.empty((1, 3, height, width), dtype=torch.uint8, memory_format=torch.channels_last)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def pixels_of(image: torch.Tensor) -> torch.Tensor:
    return image[0].permute(1, 2, 0)


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [("a.png", {}, 0), ("a.webp", {"lossless": True}, 0), ("a.jpg", {"quality": 95, "subsampling": 0}, 12)],
)
def test_decode_of_a_colour_image_gives_its_pixels(tmp_path: Path, name: str, options: dict, tolerance: int) -> None:
    path = save(tmp_path / name, SCENE, **options)
    assert largest_difference(decode(path), SCENE) <= tolerance
    assert encoded_size(path) == (37, 23)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_decode_of_grey_gives_three_equal_channels(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, Image.fromarray(SCENE[:, :, 0]))
    with Image.open(path) as image:
        assert image.mode == "L"
        assert largest_difference(decode(path), np.stack([np.asarray(image)] * 3, axis=-1)) == 0


BITS = SCENE[:, :, 0] > 127
PALETTE = Image.fromarray(SCENE).quantize(16)
WITH_ALPHA = Image.new("P", (2, 1))
WITH_ALPHA.putpalette([200, 0, 0, 0, 100, 0])
WITH_ALPHA.putpixel((1, 0), 1)
WIDE = np.array([[0, 127, 128, 129, 257, 32768, 65407, 65535]], dtype=np.uint16)
PICTURES = {
    "black and white": (Image.fromarray(BITS), np.stack([BITS * np.uint8(255)] * 3, axis=-1)),
    # round(v · 255 / 65535): 128 / 257 = 0.498, 129 / 257 = 0.502, 32768 / 257 = 127.5, 65407 / 257 = 254.502
    "16 bits": (Image.fromarray(WIDE), np.array([[[value] * 3 for value in (0, 0, 0, 1, 1, 128, 255, 255)]])),
    "palette": (PALETTE, np.asarray(PALETTE.convert("RGB"))),
    "palette with a transparent entry": (WITH_ALPHA, np.array([[[255, 255, 255], [0, 100, 0]]])),
    "grey with transparency": (np.array([[[10, 255], [10, 0]]], dtype=np.uint8), np.array([[[10] * 3, [255] * 3]])),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_decode_gives_the_colours_of_every_kind_of_png_over_white(tmp_path: Path, kind: str) -> None:
    picture, expected = PICTURES[kind]
    options = {"transparency": 0} if picture is WITH_ALPHA else {}
    assert largest_difference(decode(save(tmp_path / "a.png", picture, **options)), expected) == 0


@pytest.mark.parametrize("name", ["a.png", "a.webp"])
def test_decode_of_transparent_pixels_lays_them_over_white(tmp_path: Path, name: str) -> None:
    colours = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 51]]], dtype=np.uint8)
    path = save(tmp_path / name, np.repeat(colours, 4, axis=0), **({} if name == "a.png" else {"lossless": True}))
    # 51 / 255 = 0.2 of the colour and 0.8 of 255
    assert largest_difference(decode(path)[0], np.array([[200, 100, 0], [255] * 3, [244, 224, 204]])) <= 1


def test_decode_of_cmyk_gives_the_colours_it_was_made_from(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.fromarray(SCENE).convert("CMYK"), quality=95, subsampling=0)
    with Image.open(path) as image:
        assert image.mode == "CMYK"
    assert largest_difference(decode(path), SCENE) <= 12


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, SCENE),
        (2, SCENE[:, ::-1]),
        (3, SCENE[::-1, ::-1]),
        (4, SCENE[::-1]),
        (5, SCENE.transpose(1, 0, 2)),
        (6, SCENE.transpose(1, 0, 2)[:, ::-1]),
        (7, SCENE.transpose(1, 0, 2)[::-1, ::-1]),
        (8, SCENE.transpose(1, 0, 2)[::-1]),
    ],
)
def test_decode_turns_as_exif_says(tmp_path: Path, orientation: int, turned: np.ndarray) -> None:
    # EXIF 2.3, tag 0x0112: where the 0th row and column of the stored image are to be shown.
    files = {"a.jpg": {"quality": 95, "subsampling": 0}, "a.png": {}, "a.webp": {"lossless": True}}
    name, options = list(files.items())[orientation % 3]
    path = save(tmp_path / name, SCENE, exif=exif_of(orientation), **options)
    assert largest_difference(decode(path), turned) <= (12 if name == "a.jpg" else 0)


def test_decode_turns_grey_of_16_bits_too(tmp_path: Path) -> None:
    values = np.array([[0, 257 * 50, 257 * 100]], dtype=np.uint16)
    path = save(tmp_path / "a.png", Image.fromarray(values), exif=exif_of(8))
    assert decode(path)[:, 0, 0].tolist() == [100, 50, 0]


def test_decode_with_damaged_exif_gives_the_image_as_it_is(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", SCENE, exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert largest_difference(decode(path), SCENE) == 0


def test_decode_takes_the_first_frame_of_several(tmp_path: Path) -> None:
    frames = [Image.fromarray(SCENE), Image.fromarray(255 - SCENE)]
    path = save(tmp_path / "a.webp", frames[0], save_all=True, append_images=frames[1:], lossless=True)
    assert largest_difference(decode(path), SCENE) == 0


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_decode_of_a_truncated_file_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, scene(200, 150))
    truncate(path)
    with pytest.raises(UnreadableImage) as caught:
        decode(path)
    assert caught.value.path == str(path)
    assert caught.value.reason


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8 "])
def test_decode_of_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    with pytest.raises(UnreadableImage, match="a.jpg"):
        decode(path)
    assert encoded_size(path) is None


def test_decode_of_another_format_is_refused_whatever_its_name(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(SCENE).save(buffer, "GIF")
    path = tmp_path / "a.png"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(UnreadableImage, match="no JPEG, PNG or WebP image"):
        decode(path)


def test_decode_of_a_file_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage) as caught:
        decode(tmp_path / "gone.png")
    assert caught.value.reason == "No such file or directory"


def test_decode_of_an_image_far_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", SCENE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)  # refused above twice as many
    with pytest.raises(UnreadableImage, match="DecompressionBombError"):
        decode(path)


def test_decode_of_a_large_image_gives_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", SCENE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)  # Pillow warns above
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_difference(decode(path), SCENE) == 0
        assert encoded_size(path) == (37, 23)


def test_unreadable_image_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(UnreadableImage("a.png", "torn")))
    assert (again.path, again.reason, str(again)) == ("a.png", "torn", "a.png (torn)")


@pytest.mark.parametrize(
    "box", [Box(0, 0, 300, 200), Box(13, 7, 200, 150), Box(5, 5, 64, 64), Box(100, 50, 20, 31), Box(299, 199, 1, 1)]
)
@pytest.mark.parametrize("noisy", [False, True])
def test_crop_resized_is_pillows_bilinear_filter(noisy: bool, box: Box) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    picture, out = noise if noisy else scene(300, 200), slot(64, 64)
    crop_resized(torch.from_numpy(picture), box, out)
    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    expected = Image.fromarray(picture).crop(corners).resize((64, 64), Image.Resampling.BILINEAR)
    assert largest_difference(pixels_of(out), np.asarray(expected)) <= 2


def test_crop_resized_of_its_own_size_copies_pixels() -> None:
    out = slot(23, 23)
    crop_resized(torch.from_numpy(SCENE), Box(3, 0, 23, 23), out)
    assert np.array_equal(pixels_of(out), SCENE[:, 3:26])


def test_crop_resized_of_a_view_into_many_images_reads_only_its_own() -> None:
    stored = torch.cat([torch.zeros(17, dtype=torch.uint8), torch.from_numpy(SCENE).flatten(), torch.zeros(999).byte()])
    view = stored.as_strided((23, 37, 3), (111, 3, 1), 17)
    outs = slot(30, 30), slot(30, 30)
    for pixels, out in zip((view, torch.from_numpy(SCENE)), outs, strict=True):
        crop_resized(pixels, Box(20, 8, 17, 15), out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (40, 90)])
def test_centre_cropped_is_resize_and_centre_crop(shape: tuple[int, int]) -> None:
    picture, out = scene(*shape), slot(56, 56)
    centre_cropped(torch.from_numpy(picture), 64, out)
    width, height = shape
    size = (64, 64 * height // width) if width < height else (64 * width // height, 64)
    left, top = round((size[0] - 56) / 2), round((size[1] - 56) / 2)
    whole = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
    expected = whole.crop((left, top, left + 56, top + 56))
    assert largest_difference(pixels_of(out), np.asarray(expected)) <= 2


def test_shrunk_makes_large_images_smaller_and_leaves_small_ones() -> None:
    picture = torch.from_numpy(scene(300, 200))
    small = shrunk(picture, 64)
    expected = Image.fromarray(picture.numpy()).resize((96, 64), Image.Resampling.BILINEAR)
    assert largest_difference(small, np.asarray(expected)) <= 2
    assert shrunk(picture, 200) is picture
    assert shrunk(picture, 1000) is picture


KINDS = {
    "444": {"subsampling": 0}, "422": {"subsampling": 1}, "420": {"subsampling": 2}, "grey": {}, "cmyk": {},
    "progressive": {"progressive": True}, "stored as RGB": {"keep_rgb": True}, "turned": {"exif": exif_of(6)},
}  # fmt: skip
MODES = {"grey": "L", "cmyk": "CMYK"}


@pytest.mark.parametrize("kind", KINDS)
def test_fast_jpegs_are_those_of_pillow_to_the_bit(tmp_path: Path, kind: str) -> None:
    fast = FastJpegs(pytest.importorskip("simplejpeg"))
    picture = Image.fromarray(scene(61, 47)).convert(MODES.get(kind, "RGB"))
    path = save(tmp_path / "a.jpg", picture, quality=70, **KINDS[kind])
    assert torch.equal(decode(path), decode(path, fast=False))
    with Image.open(path) as image:
        pixels = fast.pixels(path.read_bytes(), image)
    assert (pixels is None) == (kind in ("cmyk", "turned"))


@pytest.mark.parametrize("smooths", [True, False])
def test_only_kinds_in_which_the_fast_decoder_agrees_are_left_to_it(tmp_path: Path, smooths: bool) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    other = SimpleNamespace(
        decode_jpeg_header=simplejpeg.decode_jpeg_header,
        decode_jpeg=lambda data, colours: simplejpeg.decode_jpeg(data, colours, fastupsample=not smooths),
    )
    fast = FastJpegs(other)
    for subsampling in (0, 2):
        path = save(tmp_path / "a.jpg", SCENE, subsampling=subsampling)
        with Image.open(path) as image:
            pixels = fast.pixels(path.read_bytes(), image)
        assert (pixels is None) == (subsampling == 2 and not smooths)


def test_fast_jpegs_are_unreadable_as_by_pillow(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    truncate(path := save(tmp_path / "part.jpg", SCENE))
    with pytest.raises(UnreadableImage) as expected:
        decode(path, fast=False)
    with pytest.raises(UnreadableImage, match=re.escape(str(expected.value))):
        decode(path)


def test_simplejpeg_that_was_compiled_for_another_numpy_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simplejpeg.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "simplejpeg", raising=False)
    assert fast_jpegs.__wrapped__() is None
