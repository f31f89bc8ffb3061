"""Probes without a device: a learner's pass under fake tensors, which are counted, while nothing is computed.

Fake tensors have shapes and no memory, so a probe of 100 GiB takes as long as one of 100 MiB and needs no GPU. The
tensors that operators return are counted. Memory inside an operator, such as a convolution's workspace, and an
allocator's rounding are not seen.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.host_randomness import kept_torch_state
from crossbow_py.core.trees import call, detached, in_format
from crossbow_py.engine.bank.layout import Matrix, TrainedRow
from crossbow_py.engine.modules.dropout import replace_dropout
from crossbow_py.engine.modules.losses import compared, correct_predictions
from crossbow_py.engine.modules.precision import full_precision_parameters
from crossbow_py.engine.sizing.memory import (
    LARGEST_BATCH,
    Job,
    LearnerModel,
    ModelSizes,
    Sample,
    Trace,
    activations,
    model_sizes,
)
from crossbow_py.engine.update.row_update import Step, TorchUpdate

if TYPE_CHECKING:
    from crossbow_py.engine.sizing.tracker import Tracker

SMALL_BATCH = 2  # the fewest samples for which BatchNorm on single values trains

# A function that makes the model, or the model.
ModelSource = nn.Module | Callable[[], nn.Module]


def estimate_learner(
    source: ModelSource,
    sample: Sample,
    job: Job,
    *,
    staged_sample_bytes: int = 0,
    fixed_bytes: int = 0,
    most: int = LARGEST_BATCH,
) -> LearnerModel:
    """Return the memory model of a learner, from two probes under fake tensors: a few seconds and almost no memory.

    Args:
        source: a function that makes the model, called under fake tensors; or a model, whose values are not read.
        sample: a sample of the batches.
        job: what is done with them.
        staged_sample_bytes, fixed_bytes: see `LearnerModel`.
        most: the largest batch size for which the model is valid.

    Raises:
        UserError: the model cannot be made or run without real values, or this torch cannot count tensors.
    """
    _tracker()  # imported first, because tensors that torch makes on import must be real
    largest = max(most, SMALL_BATCH + 1)
    with _shapes_alone():
        model = job.optimizer.prepared(_made(source))
        sizes = model_sizes(model, job)
        learner = _as_learner(model, job)
        small, large = (probe(learner, sample, job, size) for size in (SMALL_BATCH, largest))
        # BatchNorm saves a batch's moments in master precision, but fake ones in its input's.
        unseen = sum(sizes.buffers) * (sizes.master_bytes - sizes.compute_bytes)
        found = activations(small, large, _update_bytes(sizes, job), unseen)
        found = found.in_batches_of(job.accumulate, sample.nbytes)
    return LearnerModel(sizes, found, staged_sample_bytes * job.accumulate, fixed_bytes, most)


def probe(learner: nn.Module, sample: Sample, job: Job, batch_size: int) -> Trace:
    """Return what a learning task holds besides the learner's rows after each operator; call it under fake tensors."""
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    tracker = _tracker(learner)
    with tracker:
        try:
            # As `RoundTasks.learn`, with the same tensors alive at the same time.
            inputs, targets = sample.batch(batch_size, job.channels_last)
            output = call(learner, inputs)
            output, targets = compared(job.loss, in_format(output, job.precision.master), targets)
            loss = job.loss(output, targets)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            del gradients
            correct_predictions(detached(output), targets)
        except UserError:
            raise
        except Exception as error:  # the user's model may raise anything
            raise _unsized("run", error) from error
    return Trace(batch_size, tuple(tracker.held))


def _tracker(*known: nn.Module | Tensor) -> Tracker:
    try:
        from crossbow_py.engine.sizing.tracker import Tracker  # noqa: PLC0415  uses a private module of torch

        return Tracker(*known)
    except Exception as error:
        raise UserError(
            f"memory cannot be counted with torch {torch.__version__} ({one_line(error)[:300]}); install another "
            "version of torch, such as 2.13."
        ) from error


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Have the block run under fake tensors, without garbage collection, and without changing torch's generators."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with kept_torch_state(), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        if collects:
            gc.enable()


def _made(source: ModelSource) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    try:
        model = source()
    except UserError:
        raise
    except Exception as error:
        raise _unsized("made", error) from error
    return model


def _as_learner(model: nn.Module, job: Job) -> nn.Module:
    """Return a copy on fake parameters and buffers, with the dtypes and the memory order of a row of `ReplicaBank`."""
    full, precision = full_precision_parameters(model), job.precision
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        like = _like(parameter, precision.master if name in full else precision.compute, job.channels_last)
        memo[id(parameter)] = nn.Parameter(like, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer, precision.master if buffer.is_floating_point() else buffer.dtype, False)
    learner = copy.deepcopy(model, memo).train()
    replace_dropout(learner, torch.Generator())
    return learner


def _like(tensor: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    last = channels_last and tensor.ndim == 4
    made = torch.empty(tensor.shape, dtype=dtype)
    return torch.empty_like(made, memory_format=torch.channels_last) if last else made


def _update_bytes(sizes: ModelSizes, job: Job) -> int:
    """Return what a gradient step, a correction and a step of z hold besides the rows, with operators.

    Muon's steps are made while gradients may still be where autograd left them, not in the bank.
    """
    places, begin = [], 0
    for shape in sizes.matrices:
        places.append(Matrix(0, begin, *shape))
        begin += math.prod(shape)
    lengths = [length for length in (begin, sizes.num_values - begin) if length]

    def rows() -> list[Tensor]:
        return [torch.empty(length, dtype=job.precision.master) for length in lengths]

    weights, gradients, corrections, z, z_prev = (rows() for _ in range(5))
    optimizer = job.optimizer.sized_as
    state = {name: rows() for name in optimizer.state_names}
    row = TrainedRow(
        weights, gradients, corrections, state, z, None, num_decayed=len(lengths), num_matrices=int(begin > 0),
        matrices=tuple(places),
    )  # fmt: skip
    update, averaging = TorchUpdate(optimizer, job.rule), job.rule.linear_round(num_learners=2)
    tracker = _tracker(*weights, *gradients, *corrections, *z, *z_prev, *(v for own in state.values() for v in own))
    with tracker:
        update.correct(0, row, averaging, Step(learning_rate=0.1, step_count=1))
        if averaging is not None:
            update.move(z, z_prev, corrections, averaging)
    kept = sum(map(torch.numel, gradients)) * job.precision.master.itemsize if begin else 0
    return max(tracker.held, default=0) + kept


def _unsized(what: str, error: Exception) -> UserError:
    return UserError(
        f"the model cannot be {what} by shapes alone, without values ({one_line(error)[:300]}); let it read no values "
        "of tensors, or measure on the device itself: leave memory away, with device=cuda."
    )
