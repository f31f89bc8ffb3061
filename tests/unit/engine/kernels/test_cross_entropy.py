"""The cross-entropy kernel against torch's in float64, learner by learner."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.triton_launch import KernelError, recorded
from crossbow_py.engine.kernels import cross_entropy as module
from crossbow_py.engine.kernels.cross_entropy import check, cross_entropy_of_learners
from tests.thinned import thinned

# The interpreter computes in numpy, which warns of inf - inf, 0 / 0 and log 0.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def reference(outputs: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, num_correct, gradient) in float64, from the outputs as they are."""
    exact = outputs.detach().double().requires_grad_()
    rows = targets.expand(outputs.shape[:2])
    losses = torch.stack(
        [nn.functional.cross_entropy(*pair, ignore_index=ignore_index) for pair in zip(exact, rows, strict=True)]
    )
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    right = (outputs.argmax(2) == rows) & outputs.amax(2).isfinite()
    return losses.detach(), right.sum(1), gradient


def assert_as_reference(outputs: Tensor, targets: Tensor, ignore_index: int = -100) -> None:
    losses, num_correct, gradient = cross_entropy_of_learners(outputs, targets, ignore_index)
    expected = reference(outputs, targets, ignore_index)
    assert losses.dtype == (torch.float64 if outputs.dtype == torch.float64 else torch.float32)
    assert num_correct.dtype == torch.int64 and gradient.dtype == outputs.dtype
    tolerance = TOLERANCES[outputs.dtype]
    torch.testing.assert_close(losses.double(), expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(num_correct, expected[1])
    # A gradient is computed in the dtype of the losses and rounded once.
    rounding = max(torch.finfo(outputs.dtype).eps, tolerance)
    torch.testing.assert_close(gradient.double(), expected[2], rtol=rounding, atol=tolerance, equal_nan=True)


def drawn(k: int, batch: int, classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (torch.randn(k, batch, classes) * 3).to(dtype), torch.randint(0, classes, (k, batch))


# Batches of one tile, of several, and beyond what is counted at once; a class, a few, and more than a tile of them.
SHAPES = [(1, 1, 1), (3, 5, 10), (2, 16, 10), (2, 301, 17), (1, 1030, 3), (2, 3, 1000), (1, 2, 4099)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    thinned(
        itertools.product(SHAPES, TOLERANCES),
        quick=[4 * place + place % 4 for place in range(len(SHAPES))],
        slow=[4 * place + (place + 2) % 4 for place in range(len(SHAPES))],
    ),
)
def test_losses_and_gradient_of_drawn_outputs_equal_torchs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    outputs, targets = drawn(*shape, dtype)
    with recorded() as launches:
        cross_entropy_of_learners(outputs, targets)
    assert [made.grid for made in launches] == [(shape[0],)]
    assert_as_reference(outputs, targets)


def test_most_classes_are_taken_and_one_more_is_refused() -> None:
    outputs, targets = drawn(1, 2, 16384)
    assert_as_reference(outputs, targets)
    with pytest.raises(KernelError, match="takes 16384 classes, not 16385"):
        cross_entropy_of_learners(torch.zeros(1, 1, 16385), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("ignore_index", [-100, 255, 4])
def test_ignored_targets_are_left_out_of_mean_and_gradient(ignore_index: int) -> None:
    outputs, targets = drawn(3, 13, 7)
    targets[0, ::3] = ignore_index
    targets[2, 1:] = ignore_index
    assert_as_reference(outputs, targets, ignore_index)
    assert not cross_entropy_of_learners(outputs, targets, ignore_index)[2][0, 3].any()


def test_nan_of_an_ignored_sample_shows_in_its_gradient_alone_as_in_torch() -> None:
    outputs, targets = drawn(2, 4, 5)
    targets[0, 3], outputs[0, 3, 1] = -100, torch.nan
    assert_as_reference(outputs, targets)
    losses, _, gradient = cross_entropy_of_learners(outputs, targets)
    assert losses.isfinite().all() and gradient.isnan().nonzero()[:, 1].unique().tolist() == [3]


def test_batch_all_ignored_has_no_loss_and_a_zero_gradient() -> None:
    outputs, targets = drawn(2, 5, 4)
    targets[1] = -100
    losses, num_correct, gradient = cross_entropy_of_learners(outputs, targets)
    assert losses.isnan().tolist() == [False, True] and num_correct[1] == 0
    assert not gradient[1].any() and gradient[0].all()


@pytest.mark.parametrize("expand", [False, True])
def test_targets_shared_by_all_learners_count_for_each(expand: bool) -> None:
    outputs, targets = drawn(4, 9, 6)[0], torch.randint(0, 6, (9,))
    assert_as_reference(outputs, targets.expand(4, 9) if expand else targets)


def test_outputs_interleaved_by_learner_are_read_where_they_lie() -> None:
    outputs = torch.randn(9, 4, 6).transpose(0, 1)  # [K, B, C] of memory [B, K, C]
    targets = torch.randint(0, 6, (9, 4)).t()
    assert_as_reference(outputs, targets)
    assert cross_entropy_of_learners(outputs, targets)[2].stride() == outputs.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_huge_outputs_give_finite_losses(dtype: torch.dtype) -> None:
    outputs, targets = drawn(2, 6, 5, dtype)
    outputs *= 1e4
    assert cross_entropy_of_learners(outputs, targets)[0].isfinite().all()
    assert_as_reference(outputs, targets)


@pytest.mark.parametrize(
    "row", [torch.nan, torch.inf, -torch.inf, [-torch.inf] * 5, [torch.nan] * 5, [torch.inf, torch.inf, 0.0, 0.0, 0.0]]
)
def test_sample_that_is_not_finite_spoils_its_own_learner_alone(row: float | list[float]) -> None:
    """By its target's output, or by all of them."""
    outputs, targets = drawn(3, 6, 5)
    outputs[1, 2, slice(None) if isinstance(row, list) else targets[1, 2]] = torch.tensor(row)
    losses, num_correct, _ = cross_entropy_of_learners(outputs, targets)
    assert losses.isfinite().tolist() == [True, False, True]
    assert isinstance(row, float) or losses[1].isnan()
    expected = reference(outputs, targets)
    torch.testing.assert_close(losses.double(), expected[0], rtol=2e-6, atol=2e-6, equal_nan=True)
    assert torch.equal(num_correct, expected[1])


def test_class_ruled_out_by_minus_infinity_is_harmless_where_it_is_no_target() -> None:
    outputs, targets = drawn(2, 6, 5)
    outputs[0, 1, (targets[0, 1] + 1) % 5] = -torch.inf
    assert cross_entropy_of_learners(outputs, targets)[0].isfinite().all()
    assert_as_reference(outputs, targets)


@pytest.mark.parametrize("target", [-1, 5, 7, 8, 10**12])
def test_target_that_is_no_class_makes_the_loss_nan(target: int) -> None:
    outputs, targets = drawn(2, 4, 5)
    targets[1, 2] = target
    losses, _, _ = cross_entropy_of_learners(outputs, targets)
    assert losses.isnan().tolist() == [False, True]


def test_num_correct_of_equal_outputs_counts_the_first() -> None:
    outputs = torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [torch.nan, 9.0, torch.nan], [-1.0, -1.0, -5.0]])
    for targets, right in (([1, 0, 0, 0], 3), ([2, 1, 2, 1], 0), ([1, 2, 1, 0], 2)):
        num_correct = cross_entropy_of_learners(outputs.unsqueeze(0), torch.tensor([targets]))[1]
        assert num_correct.tolist() == [right]


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), r"outputs must be floats \[K, B, C\]"),
        (torch.zeros(2, 3, 4).long(), torch.zeros(2, 3).long(), "contiguous along C, not torch.int64"),
        (torch.zeros(2, 4, 3).mT, torch.zeros(2, 3).long(), r"not torch.float32 \[2, 3, 4\] of strides \(12, 1, 3\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), r"int64 \[2, 3\], not torch.float32"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4).long(), r"not torch.int64 \[2, 4\]"),
    ],
)
def test_tensors_not_as_described_are_refused(outputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        cross_entropy_of_learners(outputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_check_passes_and_notices_a_kernel_that_is_wrong(dtype: torch.dtype, monkeypatch) -> None:
    check(torch.device("cpu"), dtype)
    launch_as_given = module.launch

    def wrong(kernel, grid, *arguments, **constants) -> None:
        launch_as_given(kernel, grid, *arguments, **constants)
        arguments[8][0, 0, 0] += 0.1  # the gradient

    monkeypatch.setattr(module, "launch", wrong)
    with pytest.raises(KernelError, match="cross-entropy kernel's results differ"):
        check(torch.device("cpu"), dtype)
