"""Chooses a run's executor: checks the one asked for, or, for `auto`, measures the fastest once and remembers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.errors import UserError
from crossbow_py.core.measured import fingerprint, model_facts
from crossbow_py.core.trees import form_of
from crossbow_py.core.version import __version__
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory
from crossbow_py.engine.executors import EXECUTORS, Executor, candidates, has_one_row, on_all_cores
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.fusion.fused_agreement import Comparison, require_agreement
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.trust import RememberedAnswers, in_use
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.train.checks.losses import copied_loss
from crossbow_py.train.run_settings import Choices, RunSettings, accumulates
from crossbow_py.train.tuning.calibration import (
    Calibration,
    Candidate,
    Effort,
    calibrate,
    calibration_round,
)


def choose_executor(
    template: nn.Module,
    settings: RunSettings,
    choices: Choices,
    update: TorchUpdate,
    feed: Feed,
    loss: Loss,
    announce: Callable[[str], None],
    num_ranks: int = 1,
    cache: Path | None = None,
    shares_base: bool = True,
) -> tuple[Choices, list[str]]:
    """Check the executor that was asked for, or choose the fastest; see `calibration`. Raises UserError.

    With several ranks on CPUs `serial` is left out: it waits for the other ranks where `threads` and `fused` go on.

    `announce` gets a message before anything is measured, which takes some seconds. The choice is remembered in the
    file `cache`; None is the user's.
    """
    rule, loss = update.rule, copied_loss(loss)
    shared = not rule.has_central_model or settings.num_learners == 1
    like = choices.precision, settings.channels_last, shared, settings.accumulate, shares_base
    compared = partial(_comparison, Comparison(template, feed, loss, *like), update)
    one_shape, feed = feed.one_shape, feed.for_measuring()
    fuses = choices.executor != "auto" and EXECUTORS[choices.executor].FUSES
    if fuses and (reason := why_not_fused(compared(choices.executor))):
        raise UserError(f"executor={choices.executor} cannot run this model: {reason}; set executor=auto.")
    if choices.executor != "auto":
        return choices, []
    known = RememberedAnswers("executor", cache)
    remembered = known.recall(key := _fingerprint(template, settings, choices, update, feed, num_ranks))
    possible = _candidates(settings, choices, num_ranks, one_shape)
    if remembered in possible and still_runs(remembered, compared(remembered)):
        note = f"Executor {remembered} was the fastest when measured earlier (remembered in {known.path})."
        return dataclasses.replace(choices, executor=remembered), [note]
    announce("Measuring which executor is the fastest for a run like this, once; it takes some seconds.")
    for name in (own for own in possible if EXECUTORS[own].FUSES):
        why_not_fused(compared(name))  # on real data: candidates may be measured on one sample, repeated

    make_bank = partial(new_bank, template, gradient_mean=update.rule.gradient_mean, shares_base=shares_base)

    def candidate(name: str, num_learners: int) -> Candidate:
        def build() -> tuple[Executor, Callable[[int], Round]]:
            bank = make_bank(num_learners, name, settings, choices, update.optimizer)
            tasks = RoundTasks(
                bank, update=update, feed=feed, loss=loss, seed=settings.seed, collective=Collective(),
                compile_model=settings.compile_model, accumulate=settings.accumulate,
            )  # fmt: skip
            return EXECUTORS[name](tasks), lambda index: calibration_round(index, num_learners, feed.batch_size, rule)

        return Candidate(name, num_learners, build)

    found = calibrate(
        [candidate(name, k) for name in possible for k in _counts(name, settings)], settings.samples_per_step,
        choices.device, Effort(is_alone=num_ranks == 1, round_samples=settings.samples_per_step), announce=announce,
    )  # fmt: skip
    sentence = _kept(found, known, key) if found.is_lasting else found.sentence
    chosen = dataclasses.replace(choices, executor=found.executor, executor_choice_s=found.seconds)
    return chosen, [sentence, *found.notes]


def executor_for(num_learners: int, settings: RunSettings, choices: Choices, num_ranks: int) -> str:
    """Return the executor of so many learners: that of the run, or, as it was chosen for all that come, another."""
    grows = settings.num_learners == "seesaw" and settings.executor == "auto" and num_ranks == 1
    return on_all_cores(choices.executor, num_learners) if grows else choices.executor


def _comparison(like: Comparison, update: TorchUpdate, executor: str) -> Comparison:
    """Return the comparison of a model's graph as an executor has it."""
    one_row = has_one_row(executor, update.optimizer, update.rule.gradient_mean)
    return dataclasses.replace(like, one_row=one_row)


def _kept(found: Calibration, known: RememberedAnswers, key: str) -> str:
    """Remember the choice, and return a message about it."""
    is_kept = known.remember(key, found.executor)
    kept = "remembered for the next run" if is_kept else "not remembered, as the user's cache cannot be written"
    return f"{found.sentence.removesuffix('.')}; {kept}."


def _candidates(settings: RunSettings, choices: Choices, num_ranks: int, one_shape: bool) -> list[str]:
    """Return what `auto` chooses from. Fused executors do not run compiled models.

    They need batches of one shape, as do CUDA graphs.
    """
    on_cuda = choices.device.type == "cuda"
    if on_cuda and not one_shape:
        return [SerialExecutor.NAME]
    waits = num_ranks > 1 and not on_cuda
    return [
        name
        for name in candidates(choices.device)
        if not ((settings.compile_model or not one_shape) and EXECUTORS[name].FUSES)
        and not (waits and name == SerialExecutor.NAME)
        and accumulates(settings, name, choices.device)
    ]


def why_not_fused(compared: Comparison) -> str | None:
    """Return why no fused executor can run a model; None if they can, and give the model's own numbers."""
    try:
        require_agreement(compared)
    except FusionError as error:
        return str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(next(compared.template.parameters()).device)
        return "memory does not hold two learners, which are compared with the model first"
    return None


def still_runs(executor: str, compared: Comparison) -> bool:
    """Return whether an executor that is remembered as the fastest can run this model.

    It is remembered by what the model consists of, not by its forward, which may have changed since.
    """
    return not EXECUTORS[executor].FUSES or why_not_fused(compared) is None


def _counts(name: str, settings: RunSettings) -> list[int]:
    """Return the numbers of learners to measure an executor with: the most there may be, and about one per core."""
    if isinstance(settings.num_learners, int):
        return [settings.num_learners]
    limit, cores = settings.max_learners, torch.get_num_threads()
    return sorted({min(limit, 4), limit} if EXECUTORS[name].FUSES else {min(limit, max(2, cores))})


def _fingerprint(
    template: nn.Module, settings: RunSettings, choices: Choices, update: TorchUpdate, feed: Feed, num_ranks: int
) -> str:
    inputs = feed.batch(0).inputs
    return fingerprint(
        crossbow_py=__version__,
        **model_facts(template),
        inputs=(tuple(inputs.shape), str(inputs.dtype)) if isinstance(inputs, Tensor) else form_of(inputs),
        learners=(settings.num_learners, settings.max_learners),
        device=str(choices.device),
        **(_trusted(choices.device) if choices.device.type == "cuda" else {}),
        precision=choices.precision.name,
        update=(update.NAME, update.optimizer.NAME, update.rule.NAME),
        **({"gradients": update.rule.gradient_mean.group_size} if update.rule.gradient_mean else {}),
        **({"compiled": True} if settings.compile_model else {}),
        **({"ranks": num_ranks} if num_ranks > 1 else {}),
        **({"accumulate": settings.accumulate} if settings.accumulate > 1 else {}),
    )


def _trusted(device: torch.device) -> dict[str, list[str]]:
    return {"in_use": in_use(device), "candidates": candidates(device)}


def new_bank(
    template: nn.Module,
    num_learners: int,
    executor: str,
    settings: RunSettings,
    choices: Choices,
    optimizer: Optimizer,
    *,
    num_devices: int = 1,
    device_index: int = 0,
    has_velocity: bool = False,
    has_corrections: bool = True,
    gradient_mean: GradientMean | None = None,
    shares_base: bool = True,
) -> ReplicaBank:
    """Return a bank in the executor's order.

    Raises RuntimeError or MemoryError if it does not fit in memory.
    """
    return ReplicaBank(
        template, num_learners, device=choices.device, precision=choices.precision, state_names=optimizer.state_names,
        channels_last=settings.channels_last, order=EXECUTORS[executor].ORDER, num_devices=num_devices,
        device_index=device_index, has_velocity=has_velocity, has_corrections=has_corrections,
        gradient_mean=gradient_mean,
        matrices=optimizer.matrices(template), groups=optimizer.group_numbers(template),
        row_optimizer=optimizer.row_optimizer, shares_base=shares_base,
        one_row=has_one_row(executor, optimizer, gradient_mean),
    )  # fmt: skip
