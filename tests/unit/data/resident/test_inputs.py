"""Clips on the device: bytes until they are taken, then what `Normalisation.apply` gives. Other inputs: test_feed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.data.normalisation import (
    IDENTITY,
    BatchFormat,
    Normalisation,
    digits_lost,
    not_finite,
    rounded_integer,
)
from crossbow_py.data.resident.inputs import ClipInputs

CPU = torch.device("cpu")
MOMENTS = Normalisation((0.1, 0.5), (0.3, 0.2))


def clips(count: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 2, 3, 4, 5), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normalisation", [MOMENTS, IDENTITY, Normalisation((0.25,), (0.5,))])
def test_clips_taken_are_normalised_to_the_bit(normalisation: Normalisation, dtype: torch.dtype) -> None:
    inputs = ClipInputs(clips(), BatchFormat(CPU, dtype, normalisation=normalisation))
    picks = torch.tensor([[7, 0, 7, 3]])
    taken = inputs.take(picks)
    assert (taken.dtype, taken.shape[1:]) == (dtype, inputs.shape) == (inputs.dtype, (2, 3, 4, 5))
    assert torch.equal(taken, normalisation.apply(clips()[picks[0]], dtype))


def test_clips_are_a_channel_s_own_mean_and_deviation_off_their_bytes() -> None:
    taken = ClipInputs(clips(), BatchFormat(CPU, torch.float64, normalisation=MOMENTS)).take(torch.tensor([[2]]))
    by_hand = torch.stack([(clips()[2, 0] / 255.0 - 0.1) / 0.3, (clips()[2, 1] / 255.0 - 0.5) / 0.2]).double()
    torch.testing.assert_close(taken[0], by_hand, rtol=1e-5, atol=1e-5)


def test_clips_filled_into_memory_that_stays_equal_those_taken() -> None:
    inputs, targets = ClipInputs(clips(), BatchFormat(CPU, normalisation=MOMENTS)), torch.arange(9)
    picks, batches = torch.tensor([[1, 8, 4, 4, 0, 2]]), inputs.new(2, 3, "stacked")
    found = torch.zeros(2, 3, dtype=torch.int64)
    inputs.fill(picks, batches, targets, found)
    assert torch.equal(batches.flatten(0, 1), inputs.take(picks))
    assert found.tolist() == [[1, 8, 4], [4, 0, 2]]


def test_clips_with_moments_of_other_channels_are_a_user_error() -> None:
    with pytest.raises(UserError, match="one value a channel, got 3 for 2 channels; give as many"):
        ClipInputs(clips(), BatchFormat(CPU, normalisation=Normalisation((0.0,) * 3, (1.0,) * 3)))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([256.0, 258.0, -260.0], torch.bfloat16, None),  # steps of two from 256 on
        ([0.0, 1999.0], torch.bfloat16, (1999.0, 2000.0)),
        ([-257.0], torch.bfloat16, (-257.0, -256.0)),
        ([1999.5, torch.nan, torch.inf], torch.bfloat16, None),
        ([2.0**24 + 1], torch.float32, None),  # was rounded before
        ([1999.0], torch.float32, None),
    ],
)
def test_rounded_integer_is_the_first_that_the_format_has_not(
    values: list[float], dtype: torch.dtype, expected: tuple[float, float] | None
) -> None:
    inputs = torch.tensor(values).unsqueeze(1)
    assert rounded_integer(inputs, dtype) == expected
    assert rounded_integer(inputs.double(), torch.float64) is None


def test_columns_that_lie_far_from_zero_are_said_to_be_blurred_and_others_are_not() -> None:
    torch.manual_seed(0)
    near = torch.randn(200, 3)
    far = near + torch.tensor([0.0, 100.0, 3.0])
    assert digits_lost(near, torch.zeros(200), torch.bfloat16) is None
    found = digits_lost({"x": near, "y": far}, torch.zeros(200), torch.bfloat16)
    assert found is not None
    error = (far.bfloat16().double() - far.double()).square().mean(0).sqrt() / far.double().std(0)
    assert found == ("inputs", 1, pytest.approx(100, abs=0.5), pytest.approx(float(error[1])))
    of_targets = digits_lost(near, far[:, 1], torch.bfloat16)
    assert of_targets is not None and of_targets[:2] == ("targets", 0)
    assert digits_lost(far.bfloat16(), far[:, 1].long(), torch.bfloat16) is None
    assert digits_lost(far, far[:, 1], torch.float32) is None
    constant = torch.full((200, 1), 100.3)  # of which nothing can be learned
    assert digits_lost(constant, torch.zeros(200), torch.bfloat16) is None
    images = torch.randn(20, 2, 4, 4) + torch.tensor([0.0, 50.0])[:, None, None]
    found = digits_lost(images, torch.zeros(20), torch.bfloat16)
    assert found is not None and found[:2] == ("inputs", 1)


def test_first_sample_that_is_not_finite_is_found() -> None:
    inputs = torch.randn(6, 2, 3)
    assert not_finite((inputs, torch.arange(6))) is None
    inputs[4, 1, 2], inputs[5, 0, 0] = torch.nan, -torch.inf
    assert not_finite((torch.zeros(6), inputs)) == 4
    assert not_finite(inputs[:, 1, 2]) == 4


def test_rounded_integer_of_float64_in_float32_is_found_beyond_24_bits() -> None:
    inputs = torch.tensor([[2.0**24], [2.0**24 + 1]], dtype=torch.float64)
    assert rounded_integer(inputs, torch.float32) == (2.0**24 + 1, 2.0**24)
    assert rounded_integer(inputs.long(), torch.float32) is None
