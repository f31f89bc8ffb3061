"""cuDNN's settings, by whichever of torch's two names a user has set them: read right, and never an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.device.cudnn import cudnn_set, searching_libraries, uses_tf32
from crossbow_py.engine.fusion.units.convolution import key_of
from crossbow_py.engine.kernels.convolution import precision_of
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.train.evaluation.learning_measurement import _differentiable

BACKENDS, CUDNN = torch.backends, torch.backends.cudnn
KEY = Geometry(2, 3, 4, 5, 7, 6, (3, 3)), "forward", torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True)
def as_torch_begins():
    """Put all names back to what they say in a new process."""
    yield
    BACKENDS.fp32_precision = CUDNN.fp32_precision = "none"
    for own in (CUDNN.conv, CUDNN.rnn):
        own.fp32_precision = "tf32"
    CUDNN.allow_tf32 = True


def set_to(place, value):
    if place in ("cuDNN", "everything"):  # which an operator has that was given no value of its own
        CUDNN.conv.fp32_precision = "none"
    place, name = {
        "old": (CUDNN, "allow_tf32"),
        "convolutions": (CUDNN.conv, "fp32_precision"),
        "cuDNN": (CUDNN, "fp32_precision"),
        "everything": (BACKENDS, "fp32_precision"),
    }[place]
    setattr(place, name, value)


@pytest.mark.parametrize(
    ("place", "off", "on"),
    [("old", False, True), *((place, "ieee", "tf32") for place in ("convolutions", "cuDNN", "everything"))],
)
def test_tf32_is_read_by_the_name_that_was_set(place, off, on):
    keys, precisions = [], []
    for value in (off, on):
        set_to(place, value)
        with searching_libraries():
            keys.append(key_of(*KEY))
            precisions.append((uses_tf32(), precision_of(torch.float32)))
    assert precisions == [(False, "ieee"), (True, "tf32")]
    assert keys[0] != keys[1]


def test_new_name_that_was_set_over_the_old_one_counts():
    CUDNN.allow_tf32 = True
    CUDNN.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        bool(CUDNN.allow_tf32)  # why nothing of ours reads it
    assert not uses_tf32()


def test_recurrent_model_is_differentiated_twice_whichever_name_was_set():
    BACKENDS.fp32_precision = "ieee"
    with _differentiable(nn.LSTM(2, 2)):
        assert not CUDNN.enabled
    assert CUDNN.enabled


@pytest.mark.parametrize("name", ["benchmark", "enabled"])
def test_setting_of_a_block_ends_with_it_even_by_an_error(name):
    BACKENDS.fp32_precision = "ieee"
    before = getattr(CUDNN, name)
    with pytest.raises(ValueError, match="inside"), cudnn_set(name, not before):
        assert getattr(CUDNN, name) != before
        raise ValueError("inside")
    assert getattr(CUDNN, name) == before
