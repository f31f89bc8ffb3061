"""The decoders' speed: ratios worked out by hand, mosaics, and what decoders make of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.loader import decoders
from experiments.loader.decoders import DRAFT, FASTER, OURS


@pytest.fixture
def photograph(tmp_path: Path) -> str:
    """A JPEG file of 90 x 60 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photograph.jpg")
    return str(tmp_path / "photograph.jpg")


def measured(name: str, ratio: float) -> dict[str, Any]:
    alone, whole = {OURS: [100.0, 200.0], name: [150.0, 240.0]}, {OURS: [50.0, 100.0], name: [50 * ratio, 100 * ratio]}
    return decoders.row(name, alone, whole, 0.0)


def result(ratio: float) -> dict[str, Any]:
    rows = [measured(OURS, 1.0), measured("simplejpeg", ratio)]
    one = {"images": 9, "mean_kb": 60.5, "foreign_share": None, "rows": rows}
    return {"kind": "decoders", "sets": {"photographs": one}, "versions": {OURS: "13", "simplejpeg": "1.9"},
            "left_out": {"PyTurboJPEG": "no library."}}  # fmt: skip


def test_ratios_are_those_within_repetitions() -> None:
    row = measured("simplejpeg", 1.25)
    # 150 / 100 and 240 / 200
    assert row["decoded_to_ours"] == {"median": 1.35, "minimum": 1.2, "maximum": 1.5}
    assert (row["decoded_per_s"], row["crops_per_s"], row["n"]) == (195.0, 93.8, 2)
    assert row["crops_to_ours"]["median"] == 1.25


@pytest.mark.parametrize(("ratio", "said"), [(1.25, "no clear win"), (1.3, "a clear win")])
def test_decoder_wins_clearly_from_a_ratio_on(ratio: float, said: str) -> None:
    assert f"times the crops of Pillow, {said} (from 1.3 on)" in decoders.headline(result(ratio))
    own = result(ratio)
    own["sets"]["photographs"]["rows"].append(measured(FASTER, 1.2))
    assert decoders.headline(own).endswith(f" What users get, {FASTER}, makes 1.20 (1.20–1.20).")
    text = decoders.result_text(result(ratio))
    assert "photographs, 9 files of 60.5 kB in the mean:" in text
    assert text.endswith("PyTurboJPEG is left out: no library.")


def test_mosaics_have_the_size_asked_for_and_no_empty_part(photograph: str, tmp_path: Path) -> None:
    paths = decoders.mosaics([photograph] * 2, 200, 130, tmp_path)
    assert len(set(paths)) == 2
    for path in paths:
        with Image.open(path) as image:
            assert (image.size, image.format) == ((200, 130), "JPEG")
            # random pixels everywhere: no row or column of one colour
            grey = np.asarray(image.convert("L"), dtype=float)
        assert min(grey.std(axis=0).min(), grey.std(axis=1).min()) > 10


def test_only_files_of_other_formats_are_copied(photograph: str, tmp_path: Path) -> None:
    assert decoders.as_jpeg(photograph, tmp_path) == photograph
    Image.new("RGB", (8, 8)).save(tmp_path / "grey.png")
    with Image.open(decoders.as_jpeg(str(tmp_path / "grey.png"), tmp_path)) as copied:
        assert (copied.format, copied.size) == ("JPEG", (8, 8))


def test_decoders_that_are_here_make_pillows_pixels_and_a_draft_makes_fewer(photograph: str) -> None:
    found, left_out = decoders.known_decoders(20)
    assert found.keys() | left_out.keys() == decoders.PACKAGES.keys()
    with Image.open(photograph) as image:
        pixels = torch.from_numpy(np.array(image))
    for name, make in found.items():
        if name != DRAFT:
            assert make(photograph).shape == (60, 90, 3)
            assert (make(photograph).int() - pixels.int()).abs().float().mean() < 1
    assert found[DRAFT](photograph).shape == (30, 45, 3)  # a quarter of it, 15 x 23, would be too small
    assert decoders.difference([photograph], found[DRAFT]) is None
