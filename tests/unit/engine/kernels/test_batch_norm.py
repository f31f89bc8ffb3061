"""BatchNorm kernels against torch in float64, over shapes that are no multiples of tiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from crossbow_py.engine.kernels import batch_norm
from crossbow_py.engine.kernels.statistics import Workspace, finish_statistics
from tests.thinned import pairs, thinned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOMENTUM, EPS = 0.3, 1e-3
# Sums and statistics are not rounded to bfloat16; the interpreter cuts what it stores off, where GPUs round.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
SUM_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
DTYPES = list(TOLERANCE)
SHAPES = [(2, 1), (2, 37), (300, 1), (67, 37), (129, 16), (71, 70)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Small matrices have many tiles, tiles of several blocks, and more tiles than the last program reads at once."""
    monkeypatch.setattr(batch_norm, "_SUMMED_VALUES", 128)
    monkeypatch.setattr(batch_norm, "_SUMMING_PROGRAMS", 14)


@dataclass
class Layer:
    """What goes into a layer, and what torch makes of it in float64; gradients are those of `gradients`' sum."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor
    gradients: list[Tensor]
    relu: bool

    def reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {"x": self.x, "weight": self.weight, "bias": self.bias}
        if self.residual is not None:
            leaves["residual"] = self.residual
        leaves = {name: leaf.detach().clone().double().requires_grad_() for name, leaf in leaves.items()}
        y = functional.batch_norm(leaves["x"], None, None, leaves["weight"], leaves["bias"], True, MOMENTUM, EPS)
        y = y + leaves["residual"] if "residual" in leaves else y
        y = y.relu() if self.relu else y
        gradients = torch.autograd.grad(y, list(leaves.values()), sum(each.double() for each in self.gradients))
        return y.detach(), dict(zip(leaves, gradients, strict=True))


def layer(shape, dtype, residual=True, relu=True, num_gradients=2) -> Layer:
    def matrix():
        return torch.randn(shape, device=DEVICE).to(dtype)

    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (torch.randn(shape[1], device=DEVICE).to(arithmetic) for _ in range(2))
    gradients = [matrix() for _ in range(num_gradients)]
    return Layer(matrix() * 2 + 1, matrix() if residual else None, weight, bias, gradients, relu)


def workspace_of(x):
    return batch_norm.workspace_for(*x.shape, x.dtype, x.device)


def run(given: Layer, workspace: Workspace | None = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The four kernels one after the other: y and the gradients."""
    x, weight = given.x, given.weight
    workspace = workspace or workspace_of(x)
    mean, rstd = batch_norm.statistics(x, None, None, MOMENTUM, EPS, workspace)
    y = batch_norm.normalise(x, mean, rstd, weight, given.bias, given.residual, given.relu)
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    batch_norm.backward_sums(given.gradients, x, y, mean, rstd, d_weight, d_bias, given.relu, workspace)
    dx, d_residual = batch_norm.backward_inputs(
        given.gradients, x, y, mean, rstd, weight, d_weight, d_bias, given.relu, given.residual is not None
    )
    return y, {"x": dx, "residual": d_residual, "weight": d_weight, "bias": d_bias}


def assert_near(actual, expected, tolerance, scale=1.0):
    """Within `tolerance` of each value and of `scale`, which says how large the terms were that made it."""
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(scale))


def assert_as_reference(given: Layer):
    dtype = given.x.dtype
    y, gradients = run(given)
    y_expected, expected = given.reference()
    assert y.dtype == gradients["x"].dtype == dtype
    assert_near(y, y_expected, TOLERANCE[dtype])
    largest = max(each.double().abs().max() for each in given.gradients) * given.x.shape[0]
    for name in ("weight", "bias"):
        assert_near(gradients[name], expected[name], SUM_TOLERANCE[dtype], largest)
    # dx is a small difference of large terms where there are few rows.
    spread = given.x.double().var(0, unbiased=False)
    assert_near(gradients["x"], expected["x"], TOLERANCE[dtype], (given.weight.abs() / (spread + EPS).sqrt()).max() * 3)
    if given.residual is None:
        assert gradients["residual"] is None
    else:
        assert_near(gradients["residual"], expected["residual"], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    thinned(
        itertools.product(SHAPES, DTYPES),
        quick=[len(DTYPES) * place + place % len(DTYPES) for place in range(len(SHAPES))],
        slow=[len(DTYPES) * place + (place + 1) % len(DTYPES) for place in range(len(SHAPES))],
    ),
)
def test_layer_with_residual_relu_and_two_gradients_equals_torch(shape, dtype):
    assert_as_reference(layer(shape, dtype))


@pytest.mark.parametrize(
    ("num_gradients", "residual", "relu", "dtype"), pairs([1, 2], [True, False], [True, False], DTYPES, quick=4)
)
def test_layer_of_every_kind_equals_torch(num_gradients, residual, relu, dtype):
    assert_as_reference(layer((21, 19), dtype, residual, relu, num_gradients))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_of_many_tiles_and_blocks_equals_torch(small_blocks, dtype):
    given = layer((59, 20), dtype)
    split = batch_norm._split(59, 20, dtype)
    assert split.num_tiles > split.block_rows and split.rows_per_tile > split.block_rows
    assert_as_reference(given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1), (33, 37)])
def test_statistics_update_running_ones_as_torch_does(small_blocks, shape, dtype):
    given = layer(shape, dtype)
    running = [torch.rand(shape[1], device=DEVICE, dtype=given.weight.dtype) for _ in range(2)]
    expected = [each.double() for each in running]
    functional.batch_norm(given.x.double(), *expected, None, None, True, MOMENTUM, EPS)
    mean, rstd = batch_norm.statistics(given.x, *running, MOMENTUM, EPS, workspace_of(given.x))
    variance, average = torch.var_mean(given.x.double(), 0, correction=0)
    for actual, wanted in zip([mean, rstd, *running], [average, (variance + EPS).rsqrt(), *expected], strict=True):
        assert actual.dtype == given.weight.dtype
        assert_near(actual, wanted, SUM_TOLERANCE[dtype])


def test_variance_beside_a_large_mean_is_kept(small_blocks):
    x = 1000 + 1e-2 * torch.randn(150, 5, device=DEVICE)
    mean, rstd = batch_norm.statistics(x, None, None, MOMENTUM, 1e-12, workspace_of(x))
    variance, average = torch.var_mean(x.double(), 0, correction=0)
    # Float32 is 6e-5 apart at 1000.
    torch.testing.assert_close(mean.double(), average, rtol=0, atol=1.3e-4)
    torch.testing.assert_close(rstd.double(), variance.rsqrt(), rtol=1e-3, atol=0)
    of_squares = x.square().mean(0) - x.mean(0).square()
    assert (of_squares.double() / variance - 1).abs().min() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_call_gives_the_same_bits_and_leaves_counters_at_zero(small_blocks, dtype):
    given = layer((22, 37), dtype)
    workspace = workspace_of(given.x)
    y, gradients = run(given, workspace)
    assert not workspace.counters.any()
    workspace.partials.fill_(torch.nan)
    y_again, again = run(given, workspace)
    assert torch.equal(y, y_again)
    assert all(torch.equal(gradients[name], again[name]) for name in again)
    assert not workspace.counters.any()


def test_programs_that_sum_are_few_for_any_number_of_rows():
    for M, N in [(2, 1), (16384, 128), (1024, 512), (3_000_000, 64), (50_000, 2048), (784, 16_384)]:
        split = batch_norm._split(M, N, torch.bfloat16)
        assert split.num_tiles * split.column_blocks <= 512
        assert split.num_tiles * split.rows_per_tile >= M > (split.num_tiles - 1) * split.rows_per_tile
        assert split.column_blocks * split.block_columns >= N


def test_sums_are_written_into_views_and_nothing_beside_them():
    given = layer((40, 37), torch.float32)
    mean, rstd = batch_norm.statistics(given.x, None, None, MOMENTUM, EPS, workspace_of(given.x))
    storage = torch.full((100,), 7.0, device=DEVICE)
    d_weight, d_bias = storage[3:40], storage[51:88]
    batch_norm.backward_sums(given.gradients, given.x, None, mean, rstd, d_weight, d_bias, False, workspace_of(given.x))
    normalised = (given.x - mean) * rstd
    total = given.gradients[0] + given.gradients[1]
    assert_near(d_bias, total.double().sum(0), 1e-5, 10)
    assert_near(d_weight, (total * normalised).double().sum(0), 1e-5, 10)
    assert (torch.cat([storage[:3], storage[40:51], storage[88:]]) == 7).all()


def test_nan_passes_relu_forward_and_backward_in_its_own_column_alone():
    given = layer((40, 3), torch.float32)
    given.x[5, 1] = torch.nan
    y, gradients = run(given)
    for result in (y.sum(0), gradients["x"].sum(0), gradients["weight"]):
        assert result.isnan().tolist() == [False, True, False]
    assert_near(gradients["bias"], given.reference()[1]["bias"], 1e-5, 10)


def test_workspace_for_another_shape_is_refused():
    x = torch.randn(40, 3, device=DEVICE)
    with pytest.raises(AssertionError, match="a workspace for"):
        batch_norm.statistics(x, None, None, MOMENTUM, EPS, batch_norm.workspace_for(40, 4, x.dtype, DEVICE))


# As a convolution would: a program holds a tile. BACKWARDS gives tiles out in the other order.
@triton.jit
def _tiles(x, partials, counters, mean, rstd, running_mean, running_var, M, N, num_tiles,
           MOMENTUM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
           BACKWARDS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = num_tiles - 1 - tile
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    # Rows that do not exist may hold anything.
    values = tl.load(x + rows[:, None] * N + columns[None, :], mask=mask, other=float("nan"))
    finish_statistics(
        values, rows < M, columns, columns < N, tile, num_tiles, ROWS, M, N, partials, counters + tl.program_id(1),
        mean, rstd, running_mean, running_var, MOMENTUM, EPS, LANES,
    )  # fmt: skip


def of_tiles(x, running, backwards=False):
    M, N = x.shape
    num_tiles, column_blocks = triton.cdiv(M, 8), triton.cdiv(N, 16)
    workspace = Workspace.of_tiles(num_tiles, column_blocks, N, x.device)
    mean, rstd = torch.empty(N, device=x.device), torch.empty(N, device=x.device)
    _tiles[num_tiles, column_blocks](
        x, workspace.partials, workspace.counters, mean, rstd, *running, M, N, num_tiles,
        MOMENTUM=MOMENTUM, EPS=EPS, ROWS=8, COLUMNS=16, LANES=4, BACKWARDS=backwards,
    )  # fmt: skip
    assert not workspace.counters.any()
    return mean, rstd


@pytest.mark.parametrize("shape", [(2, 1), (8, 16), (67, 37)])
def test_statistics_of_tiles_in_another_kernel_equal_torch(shape):
    x = torch.randn(shape, device=DEVICE) * 3 + 5
    running = [torch.zeros(shape[1], device=DEVICE), torch.ones(shape[1], device=DEVICE)]
    expected = [each.double() for each in running]
    functional.batch_norm(x.double(), *expected, None, None, True, MOMENTUM, EPS)
    mean, rstd = of_tiles(x, running)
    variance, average = torch.var_mean(x.double(), 0, correction=0)
    for actual, wanted in zip([mean, rstd, *running], [average, (variance + EPS).rsqrt(), *expected], strict=True):
        assert_near(actual, wanted, 1e-6, 5)


def test_statistics_of_tiles_do_not_depend_on_which_program_is_last():
    x = torch.randn(67, 37, device=DEVICE)
    forwards, backwards = of_tiles(x, (None, None)), of_tiles(x, (None, None), backwards=True)
    assert torch.equal(forwards[0], backwards[0])
    assert torch.equal(forwards[1], backwards[1])
