"""Measuring which width of packs is the fastest, once for a model, batch size and machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from crossbow_py.averaging import Independent
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors import EXECUTORS, Executor, candidates
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.search.packs.compatible_trials import TrialsAlike
from crossbow_py.search.packs.width import ASKED_FOR, Width, choose_width, has_packs
from crossbow_py.search.packs.width_memory import Found, WidthMemory
from crossbow_py.search.packs.width_sizes import LARGEST_ALWAYS, asked, steady
from crossbow_py.train.tuning.calibration import Calibration, Candidate, Effort, calibrate
from crossbow_py.train.tuning.executor_choice import new_bank, still_runs, why_not_fused
from crossbow_py.train.tuning.learner_bound import learner_bound

BUDGET_S = 20.0
_LITTLE = "which is not measured, as there is little to train"


def measured_width(
    trials: TrialsAlike,
    limit: int,
    announce: Callable[[str], None],
    beside_packs: bool,
    make_room: Callable[[], bool],
    effort: Effort,
) -> tuple[Width, list[str]]:
    """The width for such trials, with at most `limit` side by side, and no more than memory holds.

    Measured for a model, batch size and machine, which takes some seconds, and remembered; guessed when `effort` leaves
    no time for that. Where memory is short for measuring, `make_room` gives back what it can, and says whether there
    was any; `beside_packs` says whether packs hold some, which what is remembered need not fit beside. Also returns
    sentences for the user.
    """
    choices, what = trials.choices, f"{trials}"

    def memory_bound() -> tuple[int, list[str]]:
        bound, notes = _memory_bound(trials, limit)
        return (bound if bound >= limit else steady(bound)), notes

    def recalled() -> Width | None:
        found = memory.recall(effort, bound, beside_packs=beside_packs)
        if found is None:
            return None
        width = choose_width(found.rates, what, found.most, found.why_no_packs or why_alone)
        executor = width.executor(width.size)
        return width if still_runs(executor, trials.compared) else None

    bound, notes = memory_bound()
    why_alone = ASKED_FOR if limit == 1 else "memory holds no more"
    names = candidates(choices.device) if choices.executor == "auto" else [choices.executor]
    memory = WidthMemory(trials, names, limit, effort.is_alone)
    width = recalled()
    if width is None and bound < limit and make_room():
        beside_packs = False
        bound, notes = memory_bound()
        width = recalled()
    if width is not None:
        return width, [] if beside_packs else notes
    every = asked(names, bound)
    fuses = any(EXECUTORS[name].FUSES for name, _ in every)
    is_exportable = fuses and why_not_fused(trials.compared) is None
    if len(every) == 1 or effort.budget_s <= 0:
        why = f"as {why_alone}" if len(every) == 1 else _LITTLE
        return _unmeasured(every, what, is_exportable, why), notes
    announce(f"Measuring how many trials of {what} pay side by side; it takes some seconds.")
    attempts = [_candidate(*each, trials) for each in every]
    result, is_whole = _calibrated(attempts, trials.feed.batch_size, choices.device, effort, make_room)
    able = [each for each in every if each[0] not in {name for name, _ in result.refused}]
    if result.is_short and not has_packs(result.images_per_s) and any(each in able for each in _late_packs(result)):
        return _unmeasured(able, what, is_exportable, _LITTLE), notes
    found = Found(dict(result.images_per_s), _why_no_packs(result), bound, _most(result, bound))
    width = choose_width(found.rates, what, found.most, found.why_no_packs or why_alone)
    if is_whole and _is_lasting(result, width, effort):
        memory.keep(found, is_short=result.is_short)
    return width, [*notes, *_notes(result, what)]


def _candidate(name: str, count: int, trials: TrialsAlike) -> Candidate:
    def build() -> tuple[Executor, Callable[[int], Round]]:
        choices, optimizer, feed = trials.choices, trials.like.optimizer, trials.feed
        bank = new_bank(trials.template, count, name, trials.settings, choices, optimizer)
        update, _ = choose_update(optimizer, Independent(), choices.device, choices.precision.master)
        tasks = RoundTasks(
            bank, update=update, feed=feed.for_measuring(), loss=trials.loss, seed=0, collective=Collective()
        )
        return EXECUTORS[name](tasks), lambda index: _still_round(index, count, feed.batch_size)

    return Candidate(name, count, build, needs_gain=count > LARGEST_ALWAYS)


def _calibrated(
    candidates: Sequence[Candidate],
    batch_size: int,
    device: torch.device,
    effort: Effort,
    make_room: Callable[[], bool],
) -> tuple[Calibration, bool]:
    """Once more, for what memory refused, where room can be made; and whether there was time for all of that."""
    begun = time.perf_counter()
    first = calibrate(candidates, batch_size, device, effort)
    if not (_is_short_of_memory(first) and make_room()):
        return first, True
    left = effort.after(time.perf_counter() - begun)
    second = calibrate(candidates, batch_size, device, left, first.images_per_s)
    return replace(second, others=max(first.others, second.others)), not second.late


def _late_packs(result: Calibration) -> list[tuple[str, int]]:
    return [each for each in result.late if each[1] > 1]


def _why_no_packs(result: Calibration) -> str:
    """Why no packs were measured, where they were to be; empty where they were, or were not to be."""
    left_out = [f"executor {name}: {reason}" for name, reason in result.left_out(fewest=2).items()]
    if has_packs(result.images_per_s) or not left_out:
        return ""
    return f"no packs of them could be measured ({'; '.join(left_out)})"


def _is_short_of_memory(result: Calibration) -> bool:
    return any(refusal.is_passing for refusal in result.refused.values())


def _is_lasting(result: Calibration, width: Width, effort: Effort) -> bool:
    """Whether the next measurement would say the same: memory may hold more then, and there may be time for packs.

    Memory that holds packs, but none so large as it was thought to, is no larger the next time, unless others had some.
    """
    measured = {name for name, count in result.images_per_s if count > 1}
    may_fit = any(each.is_passing and name not in measured for (name, _), each in result.refused.items())
    may_fit = may_fit or (_is_short_of_memory(result) and not effort.is_alone)
    may_pay = width.size == 1 and bool(_late_packs(result))
    return not (result.is_busy or may_fit or may_pay)


def _most(result: Calibration, bound: int) -> int:
    """Trials a pack may have: `bound`, or what was measured where memory refused more."""
    return max(count for _, count in result.images_per_s) if _is_short_of_memory(result) else bound


def _notes(result: Calibration, what: str) -> list[str]:
    """For the user; where there are no packs at all, the width's own sentence says why."""
    left_out = result.left_out(fewest=2).items() if has_packs(result.images_per_s) else ()
    return [*(f"Executor {name} runs no packs of {what}: {reason}." for name, reason in left_out), *result.busy_notes]


def _unmeasured(asked: Sequence[tuple[str, int]], what: str, is_exportable: bool, why: str) -> Width:
    """What is likely to pay: a middling pack, fused where that can be."""
    packs = [each for each in asked if each[1] > 1 and (is_exportable or not EXECUTORS[each[0]].FUSES)]
    name, size = next((each for each in packs if EXECUTORS[each[0]].FUSES), [*packs, asked[0]][0])
    how = f"in packs of {size}" if size > 1 else "one at a time"
    return Width(size, {(name, size): 0.0}, f"Trials of {what} run {how} by executor {name}, {why}.")


def _still_round(index: int, count: int, batch_size: int) -> Round:
    """All take one batch, at a learning rate of 0."""
    return Round(index, (index * batch_size,) * count, (0.0,) * count, None)


def _memory_bound(trials: TrialsAlike, limit: int) -> tuple[int, list[str]]:
    choices, like = trials.choices, trials.like
    executor = "fused" if choices.executor == "auto" else choices.executor
    settings = replace(trials.settings, num_learners="auto", max_learners=limit, batch_size=like.batch_size)
    few, choices = trials.feed.first_samples(min(2, like.batch_size)), replace(choices, executor=executor)
    return learner_bound(trials.template, few, settings, choices, trials.loss, like.optimizer, Independent())
