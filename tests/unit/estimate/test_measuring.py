"""What rounds on a device are fed with; the rounds themselves need CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crossbow_py.data.datasets import as_pair
from crossbow_py.engine.sizing.job import Sample
from crossbow_py.estimate.measuring import _made_up
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_settings import RunSettings

SETTINGS = RunSettings(num_learners=3, batch_size=2)
COUNT = 4 * 2 * 3  # batches that are there, of 2 samples, for 3 learners


def pair(data: DataSets) -> tuple[Tensor, Tensor]:
    found = as_pair(data.train)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 8, 8), torch.uint8), ((3, 4, 8, 8), torch.uint8), ((7,), torch.float32), ((12,), torch.int64)],
)
def test_made_up_samples_are_stored_as_the_data_set_stores_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    data = _made_up(Sample(shape, dtype), 5, SETTINGS)
    inputs, targets = pair(data)
    assert (inputs.shape, inputs.dtype) == ((COUNT, *shape), dtype)
    assert targets.tolist() == [*range(5), *range(5), *range(5), *range(5), *range(4)]
    assert data.num_classes == 5


def test_made_up_targets_of_a_regression_are_zeros_of_their_shape_and_no_classes() -> None:
    data = _made_up(Sample((7,), torch.float32, (2,), torch.float32), 0, SETTINGS)
    assert torch.equal(pair(data)[1], torch.zeros(COUNT, 2))
    assert data.num_classes is None


def test_made_up_targets_of_many_values_a_sample_are_zeros() -> None:
    data = _made_up(Sample((12,), torch.int64, (12,), torch.int64), 100, SETTINGS)
    assert torch.equal(pair(data)[1], torch.zeros(COUNT, 12, dtype=torch.int64))
