"""What K learners really take of a CUDA device: the very parts of a run, trained for some rounds on made-up samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import CrossbowError
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.sizing.job import Sample
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.train.build import build_run
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_settings import RunSettings, choose
from crossbow_py.train.tuning.calibration import still_round

_ROUNDS = WARM_UP_ROUNDS + 3  # eager rounds, the one that is captured, and replays
_BATCHES_THERE = 4  # a learner: what a streaming feed keeps on the device


def reserved_bytes(
    make_model: Callable[[], nn.Module],
    sample: Sample,
    num_classes: int,
    settings: RunSettings,
    optimizer: Optimizer,
    rule: AveragingRule,
) -> int | None:
    """The most that torch's allocator reserved of the device in some rounds of a run; None where memory ran out.

    Bank, shadow rows, graphs and their pools, workspaces and fragmentation count; the context of CUDA does not, and of
    the data a few batches a learner. `sample` is one as the data set stores it, such as an image in bytes.

    Raises:
        CrossbowError: the rounds fail for another reason, such as an executor that cannot run the model.
    """
    device = choose(settings, None).device
    assert device.type == "cuda", "on other devices there is no allocator that counts what it reserves"
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _train(make_model, _made_up(sample, num_classes, settings), settings, optimizer, rule)
    except (CrossbowError, RuntimeError, MemoryError) as error:
        if any(is_out_of_memory(cause) for cause in _causes(error)):
            return None
        raise
    finally:
        taken = torch.cuda.max_memory_reserved(device)
        free_memory(device)
    return taken


@contextlib.contextmanager
def within(limit_bytes: int, device: torch.device) -> Iterator[None]:
    """Let torch's allocator take no more than that of a CUDA device, so that rounds beyond run out of memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _made_up(sample: Sample, num_classes: int, settings: RunSettings) -> DataSets:
    """Zeros; but targets that are classes, which go round. No classes (0) are a regression."""
    count = _BATCHES_THERE * settings.batch_size * settings.first_learners
    inputs = torch.zeros(count, *sample.input_shape, dtype=sample.input_dtype)
    targets = torch.zeros(count, *sample.target_shape, dtype=sample.target_dtype)
    if num_classes and targets.ndim == 1:
        targets = (torch.arange(count) % num_classes).to(targets.dtype)
    return DataSets((inputs, targets), num_classes=num_classes or None)


def _train(
    make_model: Callable[[], nn.Module],
    data: DataSets,
    settings: RunSettings,
    optimizer: Optimizer,
    rule: AveragingRule,
) -> None:
    run = build_run(make_model, data, settings, choose(settings, None), optimizer=optimizer, rule=rule)
    executor = run.new_executor()
    try:
        for index in range(_ROUNDS):
            executor.submit(still_round(index, run.bank.num_learners, settings.batch_size, rule))
        executor.drain()
    finally:
        executor.close()
        run.close_feeds()


def with_learners(settings: RunSettings, num_learners: int, batch_size: int, executor: str) -> RunSettings:
    """The settings of a run with these."""
    return replace(settings, num_learners=num_learners, batch_size=batch_size, executor=executor)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
