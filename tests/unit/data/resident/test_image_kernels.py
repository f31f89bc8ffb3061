"""Batches of images from the kernel against a loop over pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crossbow_py.core.triton_launch import KernelError, recorded
from crossbow_py.data.resident import image_kernels as module
from crossbow_py.data.resident.image_kernels import PixelTable, check, gather_images
from tests.thinned import pairs

N, STORED_HEIGHT, STORED_WIDTH = 6, 11, 9


def table(channels: int, dtype: torch.dtype = torch.float32) -> PixelTable:
    pixels = torch.randint(0, 256, (N * STORED_HEIGHT * STORED_WIDTH, channels), dtype=torch.uint8)
    return PixelTable(pixels, STORED_WIDTH, torch.randn(256, channels).to(dtype))


def drawn_picks(count: int, height: int, width: int, erased: bool = False) -> Tensor:
    """Crops anywhere in the stored images, and rectangles of which some are empty."""
    ids, mirrored = torch.randint(0, N, (count,)), torch.randint(0, 2, (count,))
    top = torch.randint(0, STORED_HEIGHT - height + 1, (count,))
    left = torch.randint(0, STORED_WIDTH - width + 1, (count,))
    picks = torch.stack([ids, (ids * STORED_HEIGHT + top) * STORED_WIDTH + left, mirrored])
    edges = [torch.randint(0, side + 1, (2, count)).sort(0).values for side in (height, width)]
    return torch.cat([picks, *edges]) if erased else picks


def expected_images(table: PixelTable, picks: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[n, C, H, W], pixel by pixel."""
    channels, height, width = shape
    out = torch.empty(picks.shape[1], *shape, dtype=torch.float64)
    for place, (_, first, mirrored, *edges) in enumerate(picks.t().tolist()):
        for y in range(height):
            for x in range(width):
                pixel = table.pixels[first + y * table.row + (width - 1 - x if mirrored else x)]
                for channel in range(channels):
                    out[place, channel, y, x] = table.values[int(pixel[channel]), channel]
        if edges:
            top, bottom, left, right = edges
            out[place, :, top:bottom, left:right] = 0.0
    return out


def new_images(num_learners: int, batch: int, shape: tuple[int, int, int], order: str, dtype: torch.dtype) -> Tensor:
    channels, height, width = shape
    if order == "channels":
        return torch.zeros(batch, height, width, num_learners, channels, dtype=dtype).permute(3, 0, 4, 1, 2)
    return torch.zeros(num_learners, batch, height, width, channels, dtype=dtype).permute(0, 1, 4, 2, 3)


# Images of less than a block, of exactly one, and of several.
SHAPES = [(3, 7, 5), (1, 4, 9), (2, 11, 9), (4, 2, 3)]


@pytest.mark.parametrize(
    ("order", "dtype", "shape", "erased"),
    pairs(["stacked", "channels"], [torch.float32, torch.bfloat16, torch.float64], SHAPES, [False, True], quick=12),
)
def test_batches_in_either_memory_order_equal_a_loop_over_pixels(
    shape: tuple[int, int, int], dtype: torch.dtype, order: str, erased: bool
) -> None:
    num_learners, batch = 3, 2
    pixels, picks, labels = table(shape[0], dtype), drawn_picks(6, *shape[1:], erased), torch.randperm(N)
    inputs, targets = new_images(num_learners, batch, shape, order, dtype), torch.zeros(3, 2, dtype=torch.int64)
    with recorded() as launches:
        gather_images(pixels, picks, inputs, labels, targets)
    assert len(launches) == 1
    assert torch.equal(inputs.double().flatten(0, 1), expected_images(pixels, picks, shape))
    assert torch.equal(targets.flatten(), labels[picks[0]])


@pytest.mark.parametrize("order", ["stacked", "channels"])
@pytest.mark.parametrize("erased", [False, True])
def test_images_of_several_blocks_equal_indexing(order: str, erased: bool) -> None:
    pixels = PixelTable(torch.randint(0, 256, (2 * 40 * 30, 3), dtype=torch.uint8), 30, torch.randn(256, 3))
    picks = torch.tensor([[1, 0, 1, 1], [1200 + 61, 95, 1200, 1200 + 7], [0, 1, 1, 0]])
    if erased:
        picks = torch.cat([picks, torch.tensor([[0, 9, 0, 32], [0, 30, 33, 33], [0, 2, 0, 0], [0, 20, 21, 1]])])
    inputs, targets = new_images(2, 2, (3, 33, 21), order, torch.float32), torch.zeros(2, 2, dtype=torch.int64)
    gather_images(pixels, picks, inputs, torch.tensor([4, 9]), targets)
    assert torch.equal(inputs.double().flatten(0, 1), expected_images(pixels, picks, (3, 33, 21)))
    assert targets.tolist() == [[9, 4], [9, 9]]


@pytest.mark.parametrize("order", ["stacked", "channels"])
@pytest.mark.parametrize(
    "labels",
    [torch.randn(N, 5), torch.randint(0, 9, (N,), dtype=torch.int32), torch.rand(N, 150) < 0.5, torch.rand(N, 2, 3)],
    ids=["rows", "int32", "bool", "two axes"],
)
def test_targets_of_any_shape_are_gathered_in_the_same_launch(labels: Tensor, order: str) -> None:
    picks = drawn_picks(6, 3, 4)
    targets = torch.zeros(2, 3, *labels.shape[1:], dtype=labels.dtype)
    with recorded() as launches:
        gather_images(table(3), picks, new_images(2, 3, (3, 3, 4), order, torch.float32), labels, targets)
    assert len(launches) == 1
    assert torch.equal(targets.flatten(0, 1), labels[picks[0]])


def test_picks_of_a_wider_table_are_read_by_their_stride() -> None:
    pixels, wide = table(2), drawn_picks(9, 4, 4)
    inputs, targets = new_images(1, 4, (2, 4, 4), "stacked", torch.float32), torch.zeros(1, 4, dtype=torch.int64)
    gather_images(pixels, wide[:, 3:7], inputs, torch.arange(N), targets)
    assert torch.equal(inputs[0].double(), expected_images(pixels, wide[:, 3:7], (2, 4, 4)))
    assert torch.equal(targets[0], wide[0, 3:7])


def test_images_in_another_memory_order_are_refused() -> None:
    with pytest.raises(KernelError, match=r"images go to memory \[K, B, H, W, C\]"):
        gather_images(
            table(3), drawn_picks(2, 4, 4), torch.zeros(1, 2, 3, 4, 4), torch.arange(N), torch.zeros(1, 2).long()
        )


BAD_TENSORS = [
    ("picks", lambda given: given | {"picks": given["picks"].int()}, r"int64 \[3, 4\] or \[7, 4\], not torch\.int32"),
    ("too few picks", lambda given: given | {"picks": given["picks"][:, :3]}, r"not torch\.int64 \[3, 3\]"),
    ("channels", lambda given: given | {"table": table(2)}, r"pixels must be uint8 \[M, 3\]"),
    ("dtype", lambda given: given | {"table": table(3, torch.float64)}, "does not cast"),
    ("targets", lambda given: given | {"all_targets": torch.zeros(N, 2).long()}, r"targets must be \[2, 2, 2\]"),
    ("order", lambda given: given | {"targets": torch.zeros(2, 2).long().t()}, "must be contiguous"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in BAD_TENSORS], ids=[row[0] for row in BAD_TENSORS])
def test_tensors_not_as_described_are_refused(change, message) -> None:
    given = {
        "table": table(3),
        "picks": drawn_picks(4, 4, 4),
        "inputs": new_images(2, 2, (3, 4, 4), "stacked", torch.float32),
        "all_targets": torch.arange(N),
        "targets": torch.zeros(2, 2, dtype=torch.int64),
    }
    with pytest.raises(KernelError, match=message):
        gather_images(**change(given))


def test_check_passes_and_notices_a_kernel_that_is_wrong(monkeypatch) -> None:
    check(torch.device("cpu"), torch.bfloat16)

    def wrong(kernel, grid, *arguments, **constants) -> None:
        launch_as_given(kernel, grid, *arguments, **constants)
        arguments[6][-1, -1, -1, -1, -1] += 1  # the images

    launch_as_given = module.launch
    monkeypatch.setattr(module, "launch", wrong)
    with pytest.raises(KernelError, match="image kernel's batches differ"):
        check(torch.device("cpu"), torch.float32)
