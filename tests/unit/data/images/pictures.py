"""Tiny image files made on the fly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crossbow_py.data.images.folder import ImageFiles, scan_part

CLASSES = ("ant", "bee", "cat")


def scene(width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 [H, W, 3]: smooth, so that filters and lossy formats differ by little, and without symmetry."""
    y, x = np.mgrid[:height, :width]
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = [np.sin(x / (7 + channel) + y / (11 - channel) + phase[channel]) for channel in range(3)]
    return (127 + 100 * np.stack(waves, axis=-1) + 20 * x[..., None] / width).clip(0, 255).astype(np.uint8)


def save(path: Path, image: Image.Image | np.ndarray, **options: Any) -> Path:
    """A file in the format its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)
    return path


def write_part(folder: Path, per_class: int = 3, classes: tuple[str, ...] = CLASSES, size: int = 40) -> ImageFiles:
    """A part with PNG images of several sizes: `size` wide, from `size` - 8 high."""
    for label, name in enumerate(classes):
        for number in range(per_class):
            picture = scene(size, size - 8 + 8 * number, seed=10 * label + number)
            save(folder / name / f"{name}_{number}.png", picture)
    return scan_part(folder)


def truncate(path: Path) -> None:
    """Leave the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
