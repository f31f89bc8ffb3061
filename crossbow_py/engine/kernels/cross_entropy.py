"""Cross-entropy of all learners in one launch: losses, right predictions and the gradient of the outputs.

For a learner with outputs x [B, C], targets t [B] and V targets that are not `ignore_index`:

    loss       = 1/V · Σ_b (log Σ_c exp(x_bc) − x_b,t_b)
    gradient   = 1/V · (softmax(x_b)_c − [c = t_b]);  zero for ignored samples

Computed in float32 (float64 for float64) from the outputs, after subtracting a row's maximum. One program for each
learner goes through its batch: outputs are read once and the gradient is written once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of kernels become pointers and tiles when Triton compiles them, for which Python has no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossbow_py.core.triton_launch import KernelError, check_size, launch, repeated, require
from crossbow_py.engine.trust.compare import TOLERANCES

IGNORE_INDEX = -100  # torch's own default
MAXIMUM_CLASSES = 16384  # a sample's outputs are in the registers of one program
_TILE_BYTES = 16384  # outputs that a program works on at once, at least one sample's, in the dtype of arithmetic
_VALUES_A_WARP = 256
_TARGETS = 1024  # targets counted at once
_TYPES = {torch.bfloat16: tl.float32, torch.float16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}


def cross_entropy_of_learners(
    outputs: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean losses, right predictions, and the gradient of the sum of losses; one launch on the current stream.

    A loss is NaN where torch's is: for a NaN among the outputs that count, and for a batch that is ignored as a whole,
    whose gradient is zero. It is also NaN for a target that is no class.

    Args:
        outputs: [K, B, C], bfloat16, float16, float32 or float64, C <= 16384; contiguous along C.
        targets: int64 [K, B], or [B] for all learners.
        ignore_index: the target of samples to leave out of the mean.

    Returns:
        losses [K], float32 or float64; num_correct int64 [K], the samples whose largest output (the first of equals)
        is the target's and is finite; gradient [K, B, C], with the dtype and strides of `outputs`.

    Raises:
        KernelError: there are more classes, or the tensors are not as described.
    """
    _check_tensors(outputs, targets)
    num_learners, batch, classes = outputs.shape
    kind = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    losses = torch.empty(num_learners, dtype=kind, device=outputs.device)
    num_correct = torch.empty(num_learners, dtype=torch.int64, device=outputs.device)
    gradient = torch.empty_like(outputs)
    columns = triton.next_power_of_2(classes)
    samples = max(1, min(triton.next_power_of_2(batch), _TILE_BYTES // kind.itemsize // columns))
    launch(
        _cross_entropy, (num_learners,),
        outputs, *outputs.stride()[:2], targets, targets.stride(0) if targets.ndim == 2 else 0, targets.stride(-1),
        losses, num_correct, gradient, *gradient.stride()[:2], batch, ignore_index,
        CLASSES=classes, COLUMNS=columns, SAMPLES=samples, TARGETS=min(triton.next_power_of_2(batch), _TARGETS),
        KIND=_TYPES[outputs.dtype], num_warps=min(32, max(4, samples * columns // _VALUES_A_WARP)),
    )  # fmt: skip
    return losses, num_correct, gradient


def check(device: torch.device, dtype: torch.dtype, batch: int = 1030, classes: int = 17) -> None:
    """Raise KernelError unless the kernel gives what torch does for outputs of a dtype. Blocks the host.

    The batch of its own is more samples than are worked on, and counted, at once.
    """
    learners = check_size(67, 3)
    generator = torch.Generator().manual_seed(0)
    outputs = (torch.randn(learners, batch, classes, generator=generator) * 4).to(device, dtype)
    targets = torch.randint(0, classes, (learners, batch), generator=generator).to(device)
    targets[1, ::3] = IGNORE_INDEX
    losses, num_correct, gradient = repeated(
        "cross-entropy", lambda: list(cross_entropy_of_learners(outputs, targets))
    )
    exact = outputs.double().requires_grad_()
    expected = torch.stack([torch.nn.functional.cross_entropy(*pair) for pair in zip(exact, targets, strict=True)])
    (of_sum,) = torch.autograd.grad(expected.sum(), exact)
    # Host–device synchronisations.
    same = torch.equal(num_correct, (outputs.argmax(2) == targets).sum(1))
    tolerance = TOLERANCES[losses.dtype].each
    same &= torch.allclose(losses.double(), expected, rtol=tolerance, atol=tolerance)
    rounding = torch.finfo(dtype).eps
    same &= torch.allclose(gradient.double(), of_sum, rtol=max(tolerance, rounding), atol=tolerance)
    require(same, "the cross-entropy kernel's results differ from those of the torch operators")


def _check_tensors(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 3 or outputs.dtype not in _TYPES or outputs.stride(2) != 1:
        got = f"{outputs.dtype} {list(outputs.shape)} of strides {outputs.stride()}"
        raise KernelError(f"outputs must be floats [K, B, C], contiguous along C, not {got}")
    if outputs.shape[2] > MAXIMUM_CLASSES:
        raise KernelError(f"the cross-entropy kernel takes {MAXIMUM_CLASSES} classes, not {outputs.shape[2]}")
    if targets.shape not in (outputs.shape[:2], outputs.shape[1:2]) or targets.dtype != torch.int64:
        raise KernelError(f"targets must be int64 {list(outputs.shape[:2])}, not {targets.dtype} {list(targets.shape)}")


# Program j: learner j.
@triton.jit
def _cross_entropy(outputs, learner_stride, sample_stride, targets, target_learner, target_sample, losses, num_correct,
                   gradient, gradient_learner, gradient_sample, batch, ignore_index, CLASSES: tl.constexpr,
                   COLUMNS: tl.constexpr, SAMPLES: tl.constexpr, TARGETS: tl.constexpr, KIND: tl.constexpr):
    learner = tl.program_id(0).to(tl.int64)
    outputs += learner * learner_stride
    targets += learner * target_learner
    gradient += learner * gradient_learner
    counts = tl.zeros((TARGETS,), tl.int32)
    for begin in range(0, batch, TARGETS):
        place = begin + tl.arange(0, TARGETS)
        target = tl.load(targets + place * target_sample, mask=place < batch, other=ignore_index)
        counts += (target != ignore_index).to(tl.int32)
    counted = tl.sum(counts, axis=0).to(KIND)
    column = tl.arange(0, COLUMNS)[None, :]
    total, correct = tl.zeros((SAMPLES,), KIND), tl.zeros((SAMPLES,), tl.int32)
    for begin in range(0, batch, SAMPLES):
        sample = begin + tl.arange(0, SAMPLES)
        target = tl.load(targets + sample * target_sample, mask=sample < batch, other=ignore_index)
        inside = (sample < batch)[:, None] & (column < CLASSES)
        # Samples beyond the batch count as zeros, classes beyond the last as impossible ones.
        beyond = tl.where(column < CLASSES, 0.0, float("-inf")).to(outputs.dtype.element_ty)
        place = sample.to(tl.int64)[:, None]
        x = tl.load(outputs + place * sample_stride + column, mask=inside, other=beyond).to(KIND)
        is_nan = x != x
        largest = tl.max(tl.where(is_nan, float("-inf"), x), axis=1)
        answers = (tl.max(is_nan.to(tl.int32), axis=1) == 0) & (tl.abs(largest) < float("inf"))
        guess = tl.min(tl.where((x == largest[:, None]) & (column < CLASSES), column, COLUMNS), axis=1)
        shifted = x - largest[:, None]
        powers = tl.exp(shifted)
        sums = tl.sum(powers, axis=1)
        is_target = column == target[:, None]
        loss = tl.log(sums) - tl.sum(tl.where(is_target, shifted, 0.0), axis=1)
        loss = tl.where((target >= 0) & (target < CLASSES), loss, float("nan"))
        valid = target != ignore_index
        total += tl.where(valid, loss, 0.0)
        correct += ((guess == target) & answers).to(tl.int32)
        # Times zero for samples left out, as torch does it: a NaN among their outputs is not hidden.
        weight = tl.where(valid, 1.0 / counted, 0.0)
        slope = (powers / sums[:, None] - tl.where(is_target, 1.0, 0.0)) * weight[:, None]
        tl.store(gradient + place * gradient_sample + column, slope.to(gradient.dtype.element_ty), mask=inside)
    tl.store(losses + learner, tl.sum(total, axis=0) / counted)
    tl.store(num_correct + learner, tl.sum(correct, axis=0).to(tl.int64))
