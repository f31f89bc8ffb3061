"""MixUp and CutMix: what is drawn, what becomes of a batch, and that feeds mix alike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from crossbow_py.core.errors import UserError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.mixing import Mix, Mixing, check_mixable, symmetric_beta
from crossbow_py.data.randomness import sample_words
from tests.unit.data.streams import closed

SEED, N = 7, 20


class Fixed(Mixing):
    """Mixes every batch by one draw."""

    def draw(self, start: int, extent: tuple[int, int]) -> Mix:
        return Mix(0.75, (1, 3, 0, 1) if self.cutmix else None)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_beta_has_the_moments_of_the_distribution(alpha: float) -> None:
    middles = [(place + 0.5) / 300 for place in range(300)]
    drawn = torch.tensor([symmetric_beta(alpha, u, v) for u, v in itertools.product(middles, middles)]).double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert float(drawn.mean()) == pytest.approx(0.5, abs=1e-6)
    assert float(drawn.var()) == pytest.approx(variance, rel=0.01)
    kurtosis = 3 - 6 / (2 * alpha + 3)
    assert float((drawn - 0.5).pow(4).mean()) == pytest.approx(kurtosis * variance**2, rel=0.01)


def test_beta_of_one_is_uniform_and_of_nearly_nothing_is_all_or_none() -> None:
    middles = [(place + 0.5) / 200 for place in range(200)]
    drawn = torch.tensor([symmetric_beta(1.0, u, v) for u, v in itertools.product(middles, middles)])
    for edge in (0.1, 0.25, 0.7):
        assert float((drawn < edge).float().mean()) == pytest.approx(edge, abs=0.005)
    extremes = [symmetric_beta(1e-4, u, v) for u, v in itertools.product((0.1, 0.5, 0.999999), (0.01, 0.4, 0.6, 0.99))]
    assert {round(value, 6) for value in extremes} == {0.0, 1.0}
    assert symmetric_beta(0.2, 0.0, 0.3) == 0.5  # no radius
    assert 0 <= symmetric_beta(0.2, 1 - 2**-53, 0.0) <= 1


def test_mixup_of_three_samples_by_hand() -> None:
    batch = Batch(torch.tensor([[4.0, 0.0], [0.0, 8.0], [12.0, 4.0]]), torch.tensor([0, 2, 1]))
    inputs, targets = Fixed(0.2, 0.0, SEED, 3)(batch, 0)
    # Three quarters of a sample and a quarter of the one before it; the first has the last one.
    assert inputs.tolist() == [[6.0, 1.0], [1.0, 6.0], [9.0, 5.0]]
    assert targets.tolist() == [[0.75, 0.25, 0.0], [0.25, 0.0, 0.75], [0.0, 0.75, 0.25]]


def test_cutmix_of_two_images_by_hand() -> None:
    images = torch.stack([torch.zeros(1, 4, 2), torch.ones(1, 4, 2)])
    inputs, targets = Fixed(0.0, 1.0, SEED, 2)(Batch(images, torch.tensor([1, 0])), 0)
    pasted = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert torch.equal(inputs, torch.stack([pasted, 1 - pasted]).unsqueeze(1))
    assert targets.tolist() == [[0.25, 0.75], [0.75, 0.25]]
    assert images.sum() == 8  # as they were


def box_of_torchvision(share: float, x: int, y: int, height: int, width: int) -> tuple[float, tuple[int, ...]]:
    """torchvision.transforms.v2.CutMix, from λ and the centre on, in its own words."""
    r = 0.5 * math.sqrt(1.0 - share)
    r_w_half, r_h_half = int(r * width), int(r * height)
    x1, y1 = (int(torch.clamp(torch.tensor(value), min=0)) for value in (x - r_w_half, y - r_h_half))
    x2 = int(torch.clamp(torch.tensor(x + r_w_half), max=width))
    y2 = int(torch.clamp(torch.tensor(y + r_h_half), max=height))
    return 1.0 - (x2 - x1) * (y2 - y1) / (width * height), (y1, y2, x1, x2)


def test_draws_are_those_of_the_position_and_cut_as_torchvision_does() -> None:
    mixing, kinds = Mixing(0.3, 1.0, SEED, 10), list[bool]()
    for start in range(0, 3200, 16):
        words = [int(word) for word in sample_words(SEED, "mix", 0, start, 4)]
        chosen, u, v = (word / 2**64 for word in words[:3])
        found = mixing.draw(start, (12, 9))
        assert found == Mixing(0.3, 1.0, SEED, 10).draw(start, (12, 9))
        kinds.append(found.box is not None)
        assert (found.box is not None) == (chosen < 0.5)
        if found.box is None:
            assert found.share == pytest.approx(symmetric_beta(0.3, u, v), abs=1e-9)
            continue
        y, x = int((words[3] >> 32) / 2**32 * 12), int(words[3] % 2**32 / 2**32 * 9)
        share, box = box_of_torchvision(symmetric_beta(1.0, u, v), x, y, 12, 9)
        assert found.box == box and found.share == pytest.approx(share)
    assert 70 < sum(kinds) < 130
    assert all(Mixing(0.3, 0.0, SEED, 10).draw(start, (1, 1)).box is None for start in range(50))
    assert all(Mixing(0.0, 0.3, SEED, 10).draw(start, (8, 8)).box is not None for start in range(50))


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=generator), torch.arange(N) % 4


class Items:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = images()
        return inputs[index], int(targets[index])


@pytest.fixture
def made() -> Any:
    feeds: list[Feed] = []

    def make(data: Any, mixing: Mixing | None = None, **settings: Any) -> Feed:
        feeds.append(make_feed(data, 4, SEED, augmentation=Augmentation(flip=True), **settings))
        feeds[-1].mixing = mixing
        return feeds[-1]

    yield make
    closed(feeds)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mixing", [Mixing(0.4, 0, SEED, 4), Mixing(0, 1, SEED, 4), Mixing(0.4, 1, SEED, 4)])
def test_feeds_of_every_kind_mix_the_same_batches_in_the_same_way(
    made: Any, mixing: Mixing, channels_last: bool
) -> None:
    settings = {"channels_last": channels_last, "mean": [0.5], "std": [0.25]}
    resident, plain = made(images(), mixing, **settings), made(images(), **settings)
    streamed = [made(Items(), mixing, num_workers=workers, **settings) for workers in (0, 1)]
    for start in (0, 4, 2 * N - 2, 1000):
        unmixed, expected = plain.batch(start), resident.batch(start)
        share, box = mixing.draw(start, (6, 5))
        other = unmixed.inputs.roll(1, 0)
        by_hand = share * unmixed.inputs + (1 - share) * other
        if box is not None:
            by_hand = unmixed.inputs.clone()
            by_hand[..., box[0] : box[1], box[2] : box[3]] = other[..., box[0] : box[1], box[2] : box[3]]
        torch.testing.assert_close(expected.inputs, by_hand)
        assert expected.inputs.stride() == unmixed.inputs.stride()
        hot = F.one_hot(unmixed.targets, 4).float()
        torch.testing.assert_close(expected.targets, share * hot + (1 - share) * hot.roll(1, 0))
        for feed in streamed:
            (found,) = feed.aside([start])
            assert torch.equal(found.inputs, expected.inputs) and torch.equal(found.targets, expected.targets)
            assert torch.equal(feed.batch(start).inputs, expected.inputs)
        together = [feed.batches([start, start + 4]) for feed in (resident, *streamed)]
        for each in together:
            assert torch.equal(each.inputs[0], expected.inputs) and torch.equal(each.targets[0], expected.targets)
            assert torch.equal(each.inputs[1], resident.batch(start + 4).inputs)
    (whole,) = list(resident.evaluation_batches(N))
    assert torch.equal(whole.targets, images()[1]) and resident.first_samples(3).targets.tolist() == [0, 1, 2]


def test_feeds_to_measure_with_mix_too(made: Any) -> None:
    mixing = Mixing(0.4, 0, SEED, 4)
    for data in (images(), Items()):
        targets = made(data, mixing, num_workers=0).for_measuring().batch(0).targets
        assert tuple(targets.shape) == (4, 4) and targets.is_floating_point()


ONE = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("augmentation", "inputs", "targets", "size", "said"),
    [
        (Augmentation(mixup=0.2), torch.zeros(2, 5, dtype=torch.int64), ONE, 4, r"mixup=0\.2 is for one .*int64; set"),
        (Augmentation(cutmix=1), {"a": torch.zeros(2, 5)}, ONE, 4, r"data\.cutmix=1 is for one input .*{a: \[5\]"),
        (Augmentation(mixup=0.2), torch.zeros(2, 5), torch.zeros(2), 4, "for one class a sample, .*float32"),
        (Augmentation(mixup=0.2), torch.zeros(2, 5), ONE.expand(2, 2), 4, "for one class a sample"),
        (Augmentation(cutmix=1), torch.zeros(2, 5), ONE, 4, r"data\.cutmix=1 is for images \[C, H, W\]"),
        (Augmentation(mixup=0.2, cutmix=1), torch.zeros(2, 3, 4, 4), ONE, 1, r"mixup=0\.2 data\.cutmix=1 .*batch_size"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(
    augmentation: Augmentation, inputs: Any, targets: Tensor, size: int, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_mixable(augmentation, Batch(inputs, targets), size)
