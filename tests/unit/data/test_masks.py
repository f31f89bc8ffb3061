"""Targets with places in them go with their images: a mask that is a copy of its image stays one, whatever is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Batch
from crossbow_py.data.resident.resident_feed import STREAM, ResidentFeed, Variant
from tests.triton_version import has_interpreter

N, SEED = 23, 11
FLIP = Augmentation(flip=True)
IMAGES = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
MASKS = {
    "[N, H, W]": IMAGES[:, 0].long(),
    "[N, 1, H, W]": IMAGES[:, :1].clone(),
    "[N, 2, 3, H, W]": torch.stack([IMAGES, IMAGES], 1).float(),
}
STARTS = [(0, 4), (20, 24), (92, 3)]


def as_items(masks: Tensor) -> Any:
    return list(zip(IMAGES, masks, strict=True))


def assert_alike(batch: Batch, masks: Tensor) -> None:
    """The masks of a batch are the images that it has in its first channel, or all."""
    shown = (batch.inputs * 255).round().long()
    targets = batch.targets.long()
    if masks.ndim == 5:
        assert torch.equal(targets[:, 1], shown)
    else:
        assert torch.equal(targets.view(len(shown), 6, 5), shown[:, 0])


@pytest.mark.parametrize("flip", [True, "alternating"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", list(MASKS))
def test_masks_are_flipped_with_their_images(kind: str, streamed: bool, flip: Any) -> None:
    masks = MASKS[kind]
    data = as_items(masks) if streamed else (IMAGES, masks)
    feed = make_feed(data, 4, SEED, augmentation=Augmentation(flip=flip))
    for starts in STARTS:
        together = feed.batches(starts)
        for place, start in enumerate(starts):
            assert_alike(feed.batch(start), masks)
            assert_alike(Batch(together.inputs[place], together.targets[place]), masks)
    for batch in feed.aside([0, 40]):
        assert_alike(batch, masks)
    given = torch.cat([batch.targets for batch in feed.evaluation_batches(6)])
    assert torch.equal(given, masks)
    feed.close()


@pytest.mark.parametrize("kernels", [True, False] if has_interpreter() else [False])
def test_masks_of_batches_loaded_in_two_steps_are_flipped(kernels: bool) -> None:
    masks = MASKS["[N, H, W]"]
    feed = make_feed((IMAGES, masks), 4, SEED, augmentation=FLIP, channels_last=True, kernels=kernels)
    assert isinstance(feed, ResidentFeed)
    picks, out = feed.new_picks(2), feed.new_batches(2)
    feed.write_picks((20, 24), picks)
    feed.take(picks, out)
    expected = feed.batches((20, 24))
    assert torch.equal(out.targets, expected.targets)
    assert_alike(Batch(out.inputs[0], out.targets[0]), masks)


@pytest.mark.parametrize("streamed", [False, True])
def test_erasing_leaves_masks_as_they_are(streamed: bool) -> None:
    masks = MASKS["[N, H, W]"]
    data = as_items(masks) if streamed else (IMAGES, masks)
    erased, whole = (
        make_feed(data, 4, SEED, augmentation=Augmentation(flip=True, random_erasing=share)) for share in (1, 0)
    )
    assert torch.equal(erased.batch(8).targets, whole.batch(8).targets)
    assert not torch.equal(erased.batch(8).inputs, whole.batch(8).inputs)
    for feed in (erased, whole):
        feed.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shape", [(7, 4), (3, 2), (6, 5, 1), (2, 3, 4)])
def test_make_feed_moving_images_beside_targets_of_another_extent_is_refused(
    shape: tuple[int, ...], streamed: bool
) -> None:
    targets = torch.zeros(N, *shape)
    with pytest.raises(UserError, match=rf"targets \[{', '.join(map(str, shape))}\] may have places in them"):
        make_feed(as_items(targets) if streamed else (IMAGES, targets), 4, SEED, augmentation=FLIP)


def test_stream_of_its_own_augmentation_flips_its_masks_alone() -> None:
    masks = MASKS["[N, H, W]"]
    feed = make_feed((IMAGES, masks), 4, SEED, augmentation=FLIP)
    assert isinstance(feed, ResidentFeed)
    feed.set_variant(1, Variant(9, FLIP))
    feed.set_variant(2, Variant(9, Augmentation()))
    assert_alike(feed.batch(STREAM + 40), masks)
    assert_alike(feed.batch(2 * STREAM + 40), masks)
    with pytest.raises(UserError, match=r"go beyond what the images were stored for"):
        feed.set_variant(3, Variant(9, Augmentation(crop_padding=1)))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("augmentation", [FLIP, Augmentation(random_erasing=0.5)])
def test_make_feed_augmenting_images_with_channels_last_is_refused(augmentation: Augmentation, streamed: bool) -> None:
    images, targets = IMAGES.permute(0, 2, 3, 1), torch.arange(N)
    data = list(zip(images, targets, strict=True)) if streamed else (images, targets)
    with pytest.raises(UserError, match=r"\[6, 5, 3\] looks like \[H, W, C\]; give images.permute\(0, 3, 1, 2\)"):
        make_feed(data, 4, SEED, augmentation=augmentation)
