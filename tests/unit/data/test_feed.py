"""Feeds: what a batch is, whoever asks and however large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from crossbow_py.core.errors import UserError
from crossbow_py.core.triton_launch import recorded
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.datasets import check_data, in_tensors
from crossbow_py.data.feed import Batch, EpochCache, Feed, MemoryOrder
from crossbow_py.data.resident.resident_feed import STREAM, ResidentFeed, Variant
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from tests.triton_version import has_interpreter

N, SEED = 23, 11
BOTH = Augmentation(crop_padding=2, flip=True)
ALL = Augmentation(crop_padding=2, flip="alternating", random_erasing=0.7)
ERASING = Augmentation(random_erasing=0.7)
WITH_KERNELS = [True, False] if has_interpreter() else [False]


def images(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n, 3, 6, 5), dtype=torch.uint8, generator=generator), torch.arange(n)


class Counted(Dataset[tuple[Tensor, int]]):
    """Items say their index; every fetch is recorded."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.fetched = inputs, Counter[int]()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.fetched[index] += 1
        return self.inputs[index], index


def ids_at(start: int, count: int, n: int = N) -> list[int]:
    return [int(epoch_order(SEED, place // n, n)[place % n]) for place in range(start, start + count)]


def test_batch_at_a_position_holds_the_streams_samples() -> None:
    feed = make_feed(images(), 5, SEED, augmentation=BOTH)
    for start in (0, 5, 20, 21, 2 * N - 1):
        assert feed.batch(start).targets.tolist() == ids_at(start, 5)


@pytest.mark.parametrize(("augmentation", "channels_last"), [(BOTH, True), (ALL, False), (ERASING, True)])
def test_batch_of_images_equals_the_augmentation_drawn_for_its_samples(
    augmentation: Augmentation, channels_last: bool
) -> None:
    inputs, targets = images()
    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "channels_last": channels_last}
    got = make_feed((inputs, targets), 7, SEED, augmentation=augmentation, **settings).batch(N - 3)
    draws = [augmentation.draw(SEED, epoch, N) for epoch in (0, 1)]
    erased = [augmentation.draw_erased(SEED, epoch, N, (6, 5)) for epoch in (0, 1)]
    padded = torch.nn.functional.pad(inputs, (augmentation.crop_padding,) * 4)
    for place, sample in enumerate(ids_at(N - 3, 7)):
        top, left, mirrored = (int(table[sample]) for table in draws[0 if place < 3 else 1])
        crop = padded[sample, :, top : top + 6, left : left + 5].double() / 255
        crop = crop.flip(2) if mirrored else crop
        expected = (crop - torch.tensor([[[0.1]], [[0.2]], [[0.3]]])) / torch.tensor([[[0.5]], [[0.6]], [[0.7]]])
        top, bottom, left, right = erased[0 if place < 3 else 1][:, sample]
        expected[:, top:bottom, left:right] = 0.0
        torch.testing.assert_close(got.inputs[place].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("streamed", [False, True])
def test_batch_asked_for_by_many_threads_equals_one_threads(streamed: bool) -> None:
    starts = [start % (4 * N) for start in range(0, (8 if streamed else 40) * N, 3)]
    data, augmentation = (Counted(images()[0]), Augmentation(flip=True)) if streamed else (images(), BOTH)
    alone, shared = (make_feed(data, 4, SEED, augmentation=augmentation) for _ in range(2))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(shared.batch, starts))
    for start, batch in zip(starts, together, strict=True):
        expected = alone.batch(start)
        assert torch.equal(batch.inputs, expected.inputs) and torch.equal(batch.targets, expected.targets)


@pytest.mark.parametrize("augmentation", [BOTH, ALL, ERASING, Augmentation(), None])
def test_evaluation_batches_give_every_sample_in_order_and_unaugmented(augmentation: Augmentation | None) -> None:
    inputs, targets = images()
    feed = make_feed((inputs, targets), 4, SEED, augmentation=augmentation)
    batches = list(feed.evaluation_batches(10))
    assert [len(batch.targets) for batch in batches] == [10, 10, 3]
    assert torch.equal(torch.cat([batch.targets for batch in batches]), targets)
    torch.testing.assert_close(torch.cat([batch.inputs for batch in batches]), inputs / 255, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [lambda pair: pair, lambda pair: Counted(pair[0])])
@pytest.mark.parametrize(("kind", "channels_last"), [("uint8", True), ("float", True), ("uint8", False)])
def test_batch_of_4d_inputs_has_the_wished_format_and_dtype(channels_last: bool, make: Any, kind: str) -> None:
    inputs, targets = images()
    data = make((inputs if kind == "uint8" else inputs / 255, targets))
    batch = make_feed(data, 4, SEED, channels_last=channels_last, dtype=torch.bfloat16).batch(0)
    assert batch.inputs.dtype == torch.bfloat16 and batch.inputs.shape == (4, 3, 6, 5)
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last) == channels_last
    expected = (inputs / 255)[ids_at(0, 4)]
    torch.testing.assert_close(batch.inputs.float(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("make", [lambda pair: pair, lambda pair: Counted(pair[0])])
def test_batch_of_float_inputs_with_moments_is_normalised(make: Any) -> None:
    inputs = torch.randn(N, 2, 4)
    feed = make_feed(make((inputs, torch.arange(N))), 3, SEED, mean=(1.0, 2.0), std=(2.0, 4.0))
    expected = (inputs[ids_at(0, 3)] - torch.tensor([[1.0], [2.0]])) / torch.tensor([[2.0], [4.0]])
    torch.testing.assert_close(feed.batch(0).inputs, expected)


@pytest.mark.parametrize("make", [lambda pair: pair, lambda pair: Counted(pair[0])])
def test_batch_of_tokens_is_unchanged(make: Any) -> None:
    tokens = torch.randint(0, 1000, (N, 8))
    batch = make_feed(make((tokens, torch.arange(N))), 3, SEED, dtype=torch.bfloat16, channels_last=True).batch(0)
    assert torch.equal(batch.inputs, tokens[ids_at(0, 3)]) and batch.inputs.dtype == torch.int64


def test_subsets_of_tensors_are_held_as_tensors_of_their_samples() -> None:
    inputs, targets = torch.randn(9, 2), torch.arange(9)
    nested = Subset(Subset(TensorDataset(inputs, targets), [8, 1, 5, 2]), [2, 0])
    held = in_tensors(nested)
    assert isinstance(held, tuple)
    assert torch.equal(held[0], inputs[[5, 8]]) and held[1].tolist() == [5, 8]
    by_name = in_tensors(Subset(({"a": inputs}, targets), [3]))  # type: ignore[arg-type]
    assert isinstance(by_name, tuple) and torch.equal(by_name[0]["a"], inputs[[3]])


@pytest.mark.parametrize("data", [
    Subset(Counted(torch.randn(N, 2)), [0, 1]), Subset(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), [2, -1]),
    Subset(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), []), Counted(torch.randn(N, 2)),
])  # fmt: skip
def test_other_data_are_left_as_they_are(data: Any) -> None:
    assert in_tensors(data) is data


def test_a_subset_of_booleans_which_are_places_0_and_1_to_torch_is_refused() -> None:
    mask = Subset(Counted(torch.randn(N, 2)), torch.arange(N) > 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a Subset takes places of samples, got booleans; give .*np\.flatnonzero"):
        in_tensors(Subset(mask, [0, 1]))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.zeros(N, 2).to_sparse(), torch.zeros(N), "got one that is sparse_coo; give x.to_dense"),
        (torch.zeros(N, 2, device="meta"), torch.zeros(N), "got one that is on meta"),
        (torch.zeros(N, 2), torch.zeros(N, dtype=torch.uint16), "a tensor of uint16, .* give x.long"),
        (torch.zeros(N, 2), torch.zeros(N, requires_grad=True), "targets of data require gradients, .* targets.detach"),
    ],
)
def test_tensors_that_no_batch_can_be_taken_of_are_refused(inputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_data((inputs, targets), "data")


def test_arrays_of_other_byte_orders_and_wide_unsigned_numbers_keep_their_values_and_masked_ones_are_refused() -> None:
    values = np.arange(1.0, 7.0).reshape(3, 2)
    found: Any = in_tensors((values.astype(">f4"), np.array([3, 1, 65_535], np.uint16)))
    assert found[0].tolist() == values.tolist() and found[1].tolist() == [3, 1, 65_535]
    with pytest.raises(UserError, match=r"a masked array has values that are none; fill them in, as array\.filled"):
        in_tensors((np.ma.masked_greater(values, 3), np.arange(3)))


def test_map_style_batch_fetches_its_items_in_order_and_forgets_them_two_batches_later() -> None:
    data = Counted(torch.randn(N, 2))
    feed = make_feed(data, 4, SEED)
    assert isinstance(feed, StreamingFeed)
    data.fetched.clear()
    assert feed.batch(N - 2).targets.tolist() == ids_at(N - 2, 4)
    feed.batch(0), feed.batch(4), feed.batch(N - 2)
    assert data.fetched == Counter([*ids_at(N - 2, 4) * 2, *ids_at(0, 8)])


def test_epoch_cache_of_returning_epochs_builds_each_once_and_forgets_the_stalest() -> None:
    built: list[int] = []

    def build(epoch: int) -> int:
        built.append(epoch)
        return 10 * epoch

    cache = EpochCache(build)
    assert [cache(epoch) for epoch in (0, 1, 0, 2, 0, 3, 0, 2)] == [0, 10, 0, 20, 0, 30, 0, 20]
    assert built == [0, 1, 2, 3]
    assert cache(1) == 10 and built == [0, 1, 2, 3, 1]


KINDS = {
    "images": lambda: images()[0],
    "images of one channel": lambda: images()[0][:, :1],
    "floats": lambda: images()[0] / 255,
    "rows": lambda: torch.randn(N, 4),
    "tokens": lambda: torch.randint(0, 1000, (N, 8)),
}
# Learners that follow one another, cross the end of an epoch, all take the same batch, stand epochs apart.
STARTS = [(0, 4, 8), (16, 20, 24), (5, 5, 5), (40, 3, 93), (88, 92, 96)]


def loaded_in_two_steps(feed: Feed, starts: tuple[int, ...], order: MemoryOrder = "stacked") -> Batch:
    picks, out = feed.new_picks(len(starts)), feed.new_batches(len(starts), order)
    places = picks.data_ptr(), out.inputs.data_ptr(), out.targets.data_ptr()
    feed.write_picks(starts, picks)
    feed.take(picks, out)
    assert places == (picks.data_ptr(), out.inputs.data_ptr(), out.targets.data_ptr())
    return out


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("kind", "augmentation"), [*((kind, None) for kind in KINDS), *(("images", each) for each in (BOTH, ALL, ERASING))]
)
def test_batches_loaded_in_two_steps_equal_those_of_one(
    kind: str, augmentation: Augmentation | None, channels_last: bool
) -> None:
    labels = torch.randn(N, 2) if kind == "rows" else torch.arange(N)
    settings = {"augmentation": augmentation, "channels_last": channels_last, "dtype": torch.bfloat16}
    feed = make_feed((KINDS[kind](), labels), 4, SEED, **settings)
    assert isinstance(feed, ResidentFeed)
    for starts in STARTS:
        expected, got = feed.batches(starts), loaded_in_two_steps(feed, starts)
        assert torch.equal(got.inputs, expected.inputs) and torch.equal(got.targets, expected.targets)
        assert got.inputs.dtype == expected.inputs.dtype
        last = channels_last and got.inputs.ndim == 5
        wished = torch.channels_last if last else torch.contiguous_format
        assert all(batch.is_contiguous(memory_format=wished) for batch in got.inputs)


@pytest.mark.parametrize(
    ("augmentation", "order", "dtype"),
    [
        (BOTH, "stacked", torch.bfloat16), (ALL, "channels", torch.float32), (ERASING, "stacked", torch.float64),
        (None, "channels", torch.bfloat16), (ALL, "stacked", torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.skipif(not has_interpreter(), reason="needs Triton's interpreter")
def test_batches_of_images_made_by_the_kernel_equal_torchs_to_the_bit(
    augmentation: Augmentation | None, order: MemoryOrder, dtype: torch.dtype
) -> None:
    settings = {"augmentation": augmentation, "channels_last": True, "dtype": dtype}
    moments = {"mean": (0.49, 0.48, 0.44), "std": (0.2, 0.19, 0.23)}
    feed = make_feed(images(), 4, SEED, **settings, **moments, kernels=True)
    for starts in STARTS[1:4]:
        with recorded() as launches:
            got = loaded_in_two_steps(feed, starts, order)
        expected = feed.batches(starts)
        assert len(launches) == 1
        assert torch.equal(got.inputs, expected.inputs) and torch.equal(got.targets, expected.targets)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kernels", WITH_KERNELS)
@pytest.mark.parametrize("kind", ["images", "images of one channel", "floats"])
def test_batches_in_order_of_channels_are_what_a_grouped_operator_takes(
    kind: str, kernels: bool, channels_last: bool
) -> None:
    feed = make_feed((KINDS[kind](), torch.arange(N)), 4, SEED, channels_last=channels_last, kernels=kernels)
    got, expected = loaded_in_two_steps(feed, (20, 0, 24), "channels"), feed.batches((20, 0, 24))
    assert torch.equal(got.inputs, expected.inputs) and torch.equal(got.targets, expected.targets)
    grouped = got.inputs.transpose(0, 1).flatten(1, 2)
    assert grouped.data_ptr() == got.inputs.data_ptr() and grouped.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(grouped, torch.cat(list(expected.inputs), dim=1))


@pytest.mark.parametrize("kernels", WITH_KERNELS)
@pytest.mark.parametrize("kind", ["images", "rows"])
def test_single_batch_is_taken_without_an_axis_of_learners_too(kind: str, kernels: bool) -> None:
    feed = make_feed((KINDS[kind](), torch.arange(N)), 4, SEED, channels_last=True, kernels=kernels)
    picks, out = feed.new_picks(1), feed.new_batches(1)
    feed.write_picks([N - 2], picks)
    feed.take(picks, Batch(out.inputs[0], out.targets[0]))
    expected = feed.batch(N - 2)
    assert torch.equal(out.inputs[0], expected.inputs) and torch.equal(out.targets[0], expected.targets)


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (ALL, Augmentation(), True),
        (ALL, BOTH, True),
        (ALL, ERASING, True),
        (BOTH, Augmentation(flip="alternating"), True),
        (BOTH, ERASING, False),
        (ERASING, Augmentation(flip=True), False),
        (BOTH, Augmentation(crop_padding=3), False),
    ],
)
def test_stream_of_its_own_augmentation_is_as_alone_or_refused_where_images_are_not_stored_for_it(
    stored: Augmentation, wanted: Augmentation, fits: bool
) -> None:
    feed = make_feed(images(), 4, SEED, augmentation=stored)
    assert isinstance(feed, ResidentFeed)
    if not fits:
        with pytest.raises(UserError, match=r"random_erasing=.* go beyond what the images were stored for.*; make"):
            feed.set_variant(1, Variant(9, wanted))
        return
    feed.set_variant(1, Variant(9, wanted))
    alone = make_feed(images(), 4, 9, augmentation=wanted, order_seed=SEED)
    for start in (0, N - 2, 3 * N):
        assert torch.equal(feed.batch(STREAM + start).inputs, alone.batch(start).inputs)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Indexed(IterableDataset[Any]):
    """A stream whose samples have numbers, as that of mosaicml-streaming: its length is one rank's share."""

    size = 8

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return self.size // self.num_ranks

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), index % 2

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("samples are taken by their numbers")


def test_a_stream_whose_samples_have_numbers_is_a_data_set() -> None:
    feed = make_feed(Indexed(1), 8, SEED)
    assert sorted(feed.batch(0).inputs[:, 0].tolist()) == list(range(8))
    assert feed.batch(0).inputs[:, 0].tolist() == ids_at(0, 8, 8)


class Failing(Counted):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError("disk gone")


class Ragged(Counted):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index + 1), index


BAD_DATA = [
    ("pair of arrays", (np.zeros((4, 2)), np.zeros(4)), r"got \(0: ndarray, 1: ndarray\).*torch\.from_numpy"),
    ("unequal lengths", (torch.zeros(4, 2), torch.zeros(3)), "as many inputs as targets.*got 4 and 3; see that"),
    ("no samples", (torch.zeros(0, 2), torch.zeros(0)), "at least one, got 0 and 0; give it samples"),
    ("no batch axis", (torch.zeros(4), torch.zeros(4)), r"inputs \[N, \.\.\.\] and targets \[N\], got shapes \(4,\)"),
    ("one tensor", TensorDataset(torch.zeros(4, 2)), r"got \(0: Tensor\)"),
    ("iterable", Endless(), "map-style data set.*got Endless"),
    ("a share of a stream", Indexed(2), "got Indexed, whose length 4 is one rank's share of 8; wrap"),
    ("items not pairs", ["a", "b"], r"but item 0 is of type str; return inputs and a target"),
    ("items of one", [(1,)], "item 0 is of type tuple with 1 entries; return inputs and a target"),
    ("items mappings", [{"image": 1, "class": 2}], "keys image, class; call its target labels, or wrap the data set"),
    ("items empty mappings", [{}], r"wrap the data set in one that returns a pair"),
    ("loader", DataLoader(Counted(torch.zeros(4, 2))), r"got a DataLoader; give the data set in it, loader\.dataset"),
    ("items failing", Failing(torch.zeros(4, 2)), "raised OSError: disk gone at .*; have its __getitem__ return"),
    ("empty", [], "at least one sample"),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in BAD_DATA], ids=[str(row[0]) for row in BAD_DATA])
def test_make_feed_of_no_data_set_is_a_user_error(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_feed(data, 1)


@pytest.mark.parametrize("data", [images(), Counted(images()[0])])
def test_make_feed_with_a_batch_larger_than_the_data_is_a_user_error(data: Any) -> None:
    with pytest.raises(UserError, match=r"batch_size=24 must be .* has 23 samples; choose at most 23"):
        make_feed(data, 24)


@pytest.mark.parametrize(
    ("data", "augmentation", "remedy"),
    [
        ((torch.randn(4, 3, 6, 6), torch.zeros(4)), BOTH, r"set data\.crop_padding=0 data\.flip=false"),
        ((torch.randn(4, 3, 6, 6), torch.zeros(4)), ERASING, r"set .*data\.random_erasing=0\."),
        (Counted(torch.randn(4, 3, 6, 6)), BOTH, r"set .*data\.random_erasing=0 and augment inside the data set"),
        (Counted(torch.randn(4, 3, 6, 6)), ERASING, r"set .*data\.random_erasing=0 and augment inside the data set"),
    ],
)
def test_make_feed_augmenting_no_uint8_tensor_is_a_user_error(data, augmentation: Augmentation, remedy: str) -> None:
    with pytest.raises(UserError, match=rf"need uint8 image tensors \[N, C, H, W\]; {remedy}"):
        make_feed(data, 1, augmentation=augmentation)


def test_first_samples_of_ragged_items_are_a_user_error() -> None:
    said = r"\(input \[1\] of float32, target \[\] of int64 and input \[2\] of float32, .*\); return the same entries"
    with pytest.raises(UserError, match=said):
        make_feed(Ragged(torch.zeros(4, 2)), 3).first_samples(2)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((Image.new("L", (2, 2)), 1), r"Image'>\); return tensors and numbers: of an image, torch\.from_numpy"),
        ((torch.zeros(2), "cat"), "must be tensors, arrays and numbers, got str in item .; make a tensor of it"),
        (((torch.zeros(2), "tail"), 1), "must be tensors, arrays and numbers, got str"),
    ],
)
def test_map_style_items_that_are_no_tensors_are_a_user_error(item: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_feed([item] * 4, 3).batch(0)


@pytest.mark.gpu
@pytest.mark.parametrize("augmentation", [BOTH, ALL, Augmentation()])
def test_batch_on_cuda_equals_the_cpus(augmentation: Augmentation) -> None:
    settings = {"augmentation": augmentation, "mean": (0.5,), "std": (0.2,), "channels_last": True}
    here, there = (make_feed(images(), 7, SEED, device=device, **settings) for device in ("cpu", "cuda"))
    for start in (0, N - 3):
        torch.testing.assert_close(there.batch(start).inputs.cpu(), here.batch(start).inputs, rtol=0, atol=1e-6)
        assert torch.equal(there.batch(start).targets.cpu(), here.batch(start).targets)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("order", ["stacked", "channels"])
@pytest.mark.parametrize("augmentation", [BOTH, ALL])
def test_batches_taken_inside_a_cuda_graph_follow_the_picks(
    kernels: bool, order: MemoryOrder, augmentation: Augmentation
) -> None:
    settings = {"augmentation": augmentation, "channels_last": True, "dtype": torch.bfloat16}
    feed = make_feed(images(), 4, SEED, "cuda", **settings, kernels=kernels)
    picks, out, graph = feed.new_picks(3), feed.new_batches(3, order), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        feed.take(picks, out)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        feed.take(picks, out)
    for starts in STARTS:
        feed.write_picks(starts, picks)
        graph.replay()
        expected = feed.batches(starts)
        assert torch.equal(out.inputs, expected.inputs) and torch.equal(out.targets, expected.targets)
