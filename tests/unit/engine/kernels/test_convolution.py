"""The implicit-GEMM convolution against torch's in float64, over shapes that are no multiples of the tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.kernels import convolution as kernels
from crossbow_py.engine.kernels.geometry import Geometry, blocking, split_blocking
from crossbow_py.engine.kernels.statistics import Statistics
from tests.thinned import thinned

CPU = torch.device("cpu")
GEOMETRIES = {
    "three by three": Geometry(2, 3, 5, 7, 6, 5, (3, 3), padding=(1, 1)),
    "stride": Geometry(2, 2, 4, 18, 7, 8, (3, 3), stride=(2, 2), padding=(1, 1)),
    "uneven": Geometry(1, 2, 3, 4, 9, 8, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(1, 2)),
    "one by one": Geometry(3, 2, 33, 20, 3, 3, (1, 1)),
    "stride of one by one": Geometry(2, 2, 6, 5, 5, 5, (1, 1), stride=(2, 2)),
    "one channel": Geometry(4, 3, 1, 6, 8, 8, (5, 5)),
    "much depth": Geometry(5, 1, 3, 2, 12, 12, (3, 3), padding=(1, 1)),
}
# float32 sums of a few hundred products; bfloat16 is cut off by the interpreter, where GPUs round.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def images(*shape, dtype):
    return torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)


def case(geometry, dtype, bias=False):
    """Inputs, filters, bias, the gradient of outputs; and what torch makes of them in float64."""
    g = geometry
    inputs = images(g.batch, g.groups * g.in_channels, g.height, g.width, dtype=dtype)
    filters = images(g.groups * g.out_channels, g.in_channels, *g.kernel, dtype=dtype) * g.in_channels**-0.5
    shift = torch.randn(g.groups * g.out_channels, dtype=dtype) if bias else None
    given = images(g.batch, g.groups * g.out_channels, *g.out_size, dtype=dtype)
    leaves = [inputs.double().requires_grad_(), filters.double().requires_grad_()]
    out = nn.functional.conv2d(
        *leaves, None if shift is None else shift.double(), g.stride, g.padding, g.dilation, g.groups
    )
    return inputs, filters, shift, given, out.detach(), torch.autograd.grad(out, leaves, given.double())


def assert_close(found, expected, dtype):
    scale = expected.abs().max()
    assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * scale


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_convolution_and_its_gradients_equal_float64(geometry, dtype):
    inputs, filters, shift, given, out, gradients = case(geometry, dtype, bias=True)
    found, _ = kernels.forward(inputs, filters, shift, geometry)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_close(found, out, dtype)
    d_filters = torch.full_like(filters, torch.nan, dtype=torch.float32)
    d_inputs = kernels.backward(
        given, inputs, filters, geometry, input_gradient=True, filter_gradient=d_filters,
        workspace=kernels.backward_workspace(geometry, CPU),
    )  # fmt: skip
    assert_close(d_inputs, gradients[0], dtype)
    assert_close(d_filters, gradients[1], torch.float32 if dtype == torch.float32 else dtype)


@pytest.mark.parametrize("wanted", thinned(["inputs", "filters"], quick=[1], slow=[0]))
def test_either_gradient_alone_is_what_it_is_beside_the_other(wanted):
    geometry = GEOMETRIES["stride"]
    inputs, filters, _, given, _, gradients = case(geometry, torch.float32)
    d_filters = torch.empty_like(filters) if wanted == "filters" else None
    d_inputs = kernels.backward(
        given, inputs, filters, geometry, input_gradient=wanted == "inputs", filter_gradient=d_filters,
        workspace=kernels.backward_workspace(geometry, CPU),
    )  # fmt: skip
    found = [gradient for gradient in (d_inputs, d_filters) if gradient is not None]
    assert len(found) == 1
    assert_close(found[0], gradients[wanted == "filters"], torch.float32)


def test_split_depth_adds_up_in_order_and_leaves_its_counters_at_zero():
    geometry = GEOMETRIES["much depth"]
    assert split_blocking(2, 27, geometry.out_rows, 1).splits == 2
    inputs, filters, _, given, _, gradients = case(geometry, torch.float32)
    workspace, results = kernels.backward_workspace(geometry, CPU), []
    for _ in range(2):
        results.append(torch.empty_like(filters))
        kernels.backward(
            given, inputs, filters, geometry, input_gradient=False, filter_gradient=results[-1], workspace=workspace
        )
    assert_close(results[0], gradients[1], torch.float32)
    assert torch.equal(*results)
    assert not workspace.counters.any()


@pytest.mark.parametrize("name", ["three by three", "stride"])
def test_statistics_of_the_outputs_come_with_them(name):
    geometry = GEOMETRIES[name]
    inputs, filters, _, _, out, _ = case(geometry, torch.float32)
    columns = geometry.groups * geometry.out_channels
    running = [torch.rand(columns), torch.rand(columns) + 1]
    expected, workspace = [each.double() for each in running], kernels.statistics_workspace(geometry, CPU)
    nn.functional.batch_norm(out, *expected, training=True, momentum=0.1)
    _, moments = kernels.forward(inputs, filters, None, geometry, Statistics(*running, 0.1, 1e-5), workspace)
    expected = [out.mean((0, 2, 3)), (out.var((0, 2, 3), correction=0) + 1e-5).rsqrt(), *expected]
    for found, wanted in zip([*moments, *running], expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not workspace.counters.any()


@pytest.mark.slow
def test_forward_is_one_launch_and_so_are_both_gradients():
    geometry = GEOMETRIES["three by three"]
    inputs, filters, _, given, _, _ = case(geometry, torch.float32)
    with recorded() as launches:
        kernels.forward(inputs, filters, None, geometry)
        kernels.backward(
            given, inputs, filters, geometry, input_gradient=True, filter_gradient=torch.empty_like(filters),
            workspace=kernels.backward_workspace(geometry, CPU),
        )  # fmt: skip
    assert [launch.kernel for launch in launches] == ["_forward", "_backward"]


def test_three_steps_of_a_float32_tile_fit_the_smallest_shared_memory():
    sizes = (1, 16, 100, 512, 5000, 200_000)
    for rows, columns, depth, groups in itertools.product(sizes, sizes, sizes, (1, 8, 64)):
        for tile in (blocking(rows, columns, depth, groups), split_blocking(rows, columns, depth, groups)):
            assert 3 * 4 * tile.depth * (tile.rows + tile.columns) <= 96 * 1024


def test_tiles_are_smaller_where_there_are_few_of_them():
    assert blocking(16 * 32 * 32, 16, 144, 8).rows == 128  # ResNet-32's first stage, 8 learners: 1,024 programs
    assert blocking(16 * 8 * 8, 64, 576, 1).rows == 32  # its last, one learner
    assert split_blocking(16, 144, 16 * 32 * 32, 1).splits == 32
    assert split_blocking(512, 4608, 16 * 2 * 2, 4).splits == 1  # VGG's last: depth 64
