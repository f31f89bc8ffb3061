"""Counting live bytes: cases worked out by hand, and the record of torch's own allocator."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.estimate.truth import Ledger, LiveBytes, OverLimitError
from experiments.memory.measure import peak_on_host

GIB = 2**30


def test_tensor_counts_from_the_operator_that_makes_it_until_it_is_gone() -> None:
    ledger = Ledger()
    with LiveBytes(ledger):
        first = torch.zeros(100)
        second = torch.zeros(10, dtype=torch.int64)
        assert ledger.live == 400 + 80
        del first
        assert ledger.live == 80
        third = second + 1
        assert ledger.live == 160
    del second, third
    assert (ledger.live, ledger.peak, len(ledger)) == (0, 480, 0)


def test_view_counts_nothing_and_keeps_what_it_shows_alive() -> None:
    ledger = Ledger()
    with LiveBytes(ledger):
        whole = torch.zeros(8, 8)
        row = whole[0]
        turned = whole.t()
        assert ledger.live == 256
        del whole, turned
        assert ledger.live == 256
        del row
    assert ledger.live == 0


def test_writing_in_place_takes_nothing() -> None:
    ledger = Ledger()
    with LiveBytes(ledger):
        values = torch.zeros(64)
        values.add_(1).mul_(2)
        torch.add(values, values, out=values)
    assert ledger.peak == 256


def test_storage_that_grows_counts_with_its_new_size() -> None:
    ledger = Ledger()
    with LiveBytes(ledger):
        out = torch.empty(0)
        torch.add(torch.ones(16), 1, out=out)
        assert ledger.live == 64


def test_what_was_there_before_does_not_count_nor_do_its_views() -> None:
    weights = torch.zeros(50, 50)
    ledger = Ledger()
    with LiveBytes(ledger):
        turned = weights.t()
        weights.add_(1)
    assert turned.shape == (50, 50)
    assert (ledger.live, ledger.peak) == (0, 0)


def test_passes_keep_what_autograd_saves_until_the_gradients_are_there() -> None:
    # tanh keeps its output; the chain needs [n] of x, y and z, then the gradients of z, y and x one after another.
    ledger = Ledger()
    size = 4 * 1000
    with LiveBytes(ledger):
        x = torch.zeros(1000, requires_grad=True)
        z = x.tanh().tanh()
        assert ledger.live == 3 * size  # y is held by the graph alone
        (gradient,) = torch.autograd.grad(z, x, torch.ones(1000))
        del z
        assert ledger.live == 2 * size
    assert ledger.peak == 6 * size  # x, y, z; the ones, and two gradients at the step from one to the next
    del gradient, x
    assert ledger.live == 0


def test_limit_is_enforced_by_tensors_without_memory() -> None:
    ledger = Ledger(16 * GIB)

    def take(gib: int) -> Tensor:
        return torch.empty(gib, GIB, dtype=torch.uint8)

    with LiveBytes(ledger), torch.device("meta"):
        kept = [take(10), take(6)]
        with pytest.raises(OverLimitError, match="17179869185"):
            torch.empty(1, dtype=torch.uint8)
        del kept[0]
        assert ledger.live == 6 * GIB


def test_fake_tensors_count_like_real_ones() -> None:
    ledger = Ledger()
    with FakeTensorMode(), LiveBytes(ledger):
        layer = nn.Linear(2**15, 2**15)  # 4 GiB
        x = torch.empty(2**15, 2**15)
        y = layer(x)
        assert ledger.live == 12 * GIB + 4 * 2**15
        del x, y
        assert ledger.live == 4 * GIB + 4 * 2**15  # what was saved for the backward pass went with it


def test_peak_of_passes_of_a_network_is_that_of_the_allocators_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "KINETO_LOG_LEVEL", "6")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    parameters, images = list(model.parameters()), torch.zeros(64, 3, 16, 16)
    targets = torch.zeros(64, dtype=torch.int64)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(images + 1), targets)
        torch.autograd.grad(loss, parameters)

    step()  # libraries allocate once what they keep
    ledger = Ledger()
    with LiveBytes(ledger):
        step()
    assert ledger.live == 0
    assert ledger.peak == pytest.approx(peak_on_host(step), rel=0.01)
    assert ledger.peak > 2_000_000
