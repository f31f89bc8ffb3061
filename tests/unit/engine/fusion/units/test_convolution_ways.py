"""Ways to convolve for all learners: all give the same, and the fastest that does is taken and remembered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.core.measured import Remembered
from crossbow_py.engine.fusion.units.convolution import (
    GROUPED,
    GROUPED_NCHW,
    IMPLICIT,
    ConvolutionChoices,
    Operators,
    key_of,
    ways,
)
from crossbow_py.engine.kernels.geometry import Geometry

CPU = torch.device("cpu")
GEOMETRY = Geometry(2, 3, 4, 5, 7, 6, (3, 3), stride=(2, 1), padding=(1, 0))
OPERATORS = (GROUPED, GROUPED_NCHW)


@pytest.fixture
def case():
    g = GEOMETRY
    inputs = torch.randn(g.batch, g.groups * g.in_channels, g.height, g.width, dtype=torch.float64)
    filters = torch.randn(g.groups * g.out_channels, g.in_channels, *g.kernel, dtype=torch.float64)
    bias = torch.randn(g.groups * g.out_channels, dtype=torch.float64)
    outputs = torch.randn(g.batch, g.groups * g.out_channels, *g.out_size, dtype=torch.float64)
    images = [each.contiguous(memory_format=torch.channels_last) for each in (inputs, filters, outputs)]
    return *images[:2], bias, images[2]


@pytest.mark.parametrize("way", OPERATORS)
def test_every_way_gives_what_each_learner_would_get_alone(case, way):
    inputs, filters, bias, given = case
    g, operators = GEOMETRY, Operators(GEOMETRY)
    alone = [
        nn.functional.conv2d(part.requires_grad_(), own.requires_grad_(), shift, g.stride, g.padding, g.dilation)
        for part, own, shift in zip(
            inputs.split(g.in_channels, 1), filters.split(g.out_channels), bias.split(g.out_channels), strict=True
        )
    ]
    expected = torch.cat(alone, 1)
    found = operators.forward(way, inputs, filters, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    leaves = [inputs.detach().requires_grad_(), filters.detach().requires_grad_()]
    out = nn.functional.conv2d(*leaves, bias, g.stride, g.padding, g.dilation, g.groups)
    gradients = torch.autograd.grad(out, leaves, given)
    for of_inputs, gradient in ((True, gradients[0]), (False, gradients[1])):
        mine = operators.gradient(way, given, inputs, filters, of_inputs)
        torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)


def test_kernel_is_a_way_for_its_formats_alone():
    assert ways(torch.float32, CPU) == ways(torch.bfloat16, CPU) == [*OPERATORS, IMPLICIT]
    assert ways(torch.float64, CPU) == [*OPERATORS]


def candidates(*values):
    return {name: lambda value=value: torch.tensor(value) for name, value in zip("abcd", values, strict=False)}


def by_first_value(times):
    """Milliseconds by what a way returns first."""
    return lambda run: times[round(run()[0].item(), 3)]


def test_fastest_way_is_taken_and_remembered_by_what_it_depends_on(tmp_path):
    remembered = Remembered("x", tmp_path / "ways.json")
    given = candidates([0.0, 5.0], [0.001, 5.0], [0.002, 5.0])
    times = by_first_value({0.0: 3.0, 0.001: 1.0, 0.002: 2.0})
    assert ConvolutionChoices(times, remembered).choose("key", given) == "b"
    assert ConvolutionChoices(by_first_value({}), remembered).choose("key", given) == "b"  # times nothing
    choices = ConvolutionChoices(lambda _: 1.0, remembered)
    assert choices.choose("key", candidates([0.0])) == "a"  # what is gone is not taken


def test_remembered_way_that_gives_other_numbers_now_is_not_taken(tmp_path):
    remembered = Remembered("x", tmp_path / "ways.json")
    remembered.remember("key", "b")
    choices = ConvolutionChoices(lambda _: 1.0, remembered)
    assert choices.choose("key", candidates([1.0], [1.5], [1.0])) == "a"
    assert choices.notes == ["Convolutions never run as b, which gave other numbers than the others."]
    assert remembered.recall("key") == "a"


def test_way_that_gives_other_numbers_or_fails_is_never_taken_and_said_once(tmp_path):
    def fails():
        raise ValueError("CompilationError: at 12:4\n no such type")

    given = {**candidates([1.0], [1.5], [float("nan")]), "d": fails}
    choices = ConvolutionChoices(lambda run: 1.0 if run()[0] == 1.0 else 0.1, Remembered("x", tmp_path / "ways.json"))
    assert [choices.choose(key, given) for key in ("one", "two")] == ["a", "a"]
    assert choices.notes == [
        "Convolutions never run as b, which gave other numbers than the others.",
        "Convolutions never run as c, which gave other numbers than the others.",
        "Convolutions never run as d, which failed: CompilationError: at 12:4 no such type.",
    ]


def test_way_that_cannot_be_timed_is_not_taken(tmp_path):
    def milliseconds(run):
        if run()[0] != 1.0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 1.0

    choices = ConvolutionChoices(milliseconds, Remembered("x", tmp_path / "ways.json"))
    assert choices.choose("key", candidates([1.0], [1.001])) == "a"
    assert "operation not permitted" in choices.notes[0]


def test_first_way_that_fails_is_an_error_as_nothing_else_is_known_to_be_right(tmp_path):
    def fails():
        raise RuntimeError("cuDNN")

    choices = ConvolutionChoices(lambda _: 1.0, Remembered("x", tmp_path / "ways.json"))
    with pytest.raises(RuntimeError, match="cuDNN"):
        choices.choose("key", {"first": fails, **candidates([1.0], [1.0])})


def test_key_depends_on_sizes_direction_and_format():
    facts = [
        (GEOMETRY, "forward", torch.float32),
        (GEOMETRY, "inputs", torch.float32),
        (GEOMETRY, "forward", torch.bfloat16),
        (Geometry(4, 3, 4, 5, 7, 6, (3, 3), stride=(2, 1), padding=(1, 0)), "forward", torch.float32),
    ]
    assert len({key_of(*each, CPU) for each in facts}) == 4
