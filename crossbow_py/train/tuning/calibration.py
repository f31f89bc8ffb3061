"""What `executor=auto` takes: every candidate runs a few rounds of the very job, and the fastest one is remembered.

Rounds run on a bank of their own that is thrown away, so of the run only the generators of random numbers have to be
put back. It takes some seconds; a candidate is not measured when that would take longer than what is left of them.
Choices are remembered by what they depend on, model, batch size, precision and device, in a file in the user's cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from crossbow_py.averaging.rule import AveragingRule, Stage
from crossbow_py.core.errors import CrossbowError, UserError, text_of
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.core.host_randomness import kept_host_state
from crossbow_py.core.measured import Remembered
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory, raise_if_lost
from crossbow_py.engine.executors import Executor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.rounds import Round

_BUDGET_S = 8.0
_WINDOW_S = 0.25
_WINDOWS = 3
_SLOW_S = 1.0
_FAR_BEHIND = 0.7  # of the best so far: more learners will not make up for it
_GAIN = 1.05  # times the throughput of fewer learners: what more of them have to reach, or still more are not tried
_BUSY = 0.2  # of the cores, taken by other programs: what is measured then is no choice to keep
_WORTH = 0.1  # of the time of what is to be trained: more is not spent on measuring how


Key = tuple[str, int]  # an executor, with so many learners


@dataclass(frozen=True)
class Candidate:
    """An executor with a number of learners; `build` gives it and what its rounds are.

    `needs_gain` spares it, unless the most learners of its executor that were measured gained on fewer of them.
    """

    executor: str
    num_learners: int
    build: Callable[[], tuple[Executor, Callable[[int], Round]]]
    needs_gain: bool = False


def still_round(index: int, num_learners: int, batch_size: int, rule: AveragingRule) -> Round:
    """A round that averages as the rule does, at a learning rate of 0."""
    return Round(
        index=index,
        starts=tuple((index * num_learners + j) * batch_size for j in range(num_learners)),
        learning_rates=(0.0,) * num_learners,
        together=rule.round(Stage(index, num_learners)),
    )


@dataclass(frozen=True)
class Effort:
    """What measuring may cost.

    Attributes:
        budget_s: at most, but for the first candidate.
        total_samples: to be trained on, where that is known: a tenth of the time they take is not exceeded either.
        spent_s: seconds that went into measuring for them before.
        stopped: whether there is nothing to be trained any more.
        is_alone: whether what else runs meanwhile is no part of the same run or search, as its other ranks and workers
            on this host are.
    """

    budget_s: float = _BUDGET_S
    total_samples: int | None = None
    spent_s: float = 0.0
    stopped: Callable[[], bool] = lambda: False
    is_alone: bool = True

    def seconds(self, fastest: float) -> float:
        """That may be spent, when the best throughput so far is `fastest` images/s."""
        if self.stopped():
            return 0.0
        worth_s = math.inf if self.total_samples is None else _WORTH * self.total_samples / fastest - self.spent_s
        return min(self.budget_s, worth_s)

    def after(self, seconds: float) -> Effort:
        """What is left of it when so many more are spent."""
        return replace(self, budget_s=max(0.0, self.budget_s - seconds), spent_s=self.spent_s + seconds)


@dataclass(frozen=True)
class Refusal:
    """Why an executor does not run so many learners; it may the next time where that `is_passing`: memory was short."""

    reason: str
    is_passing: bool = False


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        executor: the fastest.
        images_per_s: of every candidate that was measured.
        refused: those that could not run, and why.
        late: those that there was no time to measure.
        is_short: whether more would have been measured if more were to be trained.
        others: share of the cores that other programs took, 0 to 1; 0 where it does not matter.
        seconds: how long measuring took.
    """

    executor: str
    images_per_s: Mapping[Key, float]
    refused: Mapping[Key, Refusal] = field(default_factory=dict)
    late: tuple[Key, ...] = ()
    is_short: bool = False
    others: float = 0.0
    seconds: float = 0.0

    def left_out(self, fewest: int = 1) -> dict[str, str]:
        """Executors that were not measured with at least so many learners, though they were to be, and why."""
        measured = {name for name, count in self.images_per_s if count >= fewest}
        late = {
            name: f"measuring it with {count} learners takes too long" for name, count in self.late if count >= fewest
        }
        refused = {
            name: refusal.reason.rstrip(".")
            for (name, count), refusal in self.refused.items()
            if count >= fewest or not refusal.is_passing
        }
        return {name: reason for name, reason in {**late, **refused}.items() if name not in measured}

    @property
    def busy_notes(self) -> tuple[str, ...]:
        """A sentence about other programs, where they took much of the machine."""
        if not self.is_busy:
            return ()
        return (f"Other programs took {self.others:.0%} of the cores meanwhile: it is measured again the next time.",)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out().items():
            by_reason.setdefault(reason, []).append(name)
        return (
            *(
                f"Executor {names[0]} is left out for this model: {reason}."
                if len(names) == 1
                else f"Executors {' and '.join(names)} are left out for this model: {reason}."
                for reason, names in by_reason.items()
            ),
            *self.busy_notes,
        )

    @property
    def is_busy(self) -> bool:
        """Whether other programs took much of the machine."""
        return self.others > _BUSY

    @property
    def is_lasting(self) -> bool:
        """Whether it is worth keeping.

        Executors were compared, as far as there is ever time and memory for, with none beside.
        """
        measured, left_out = {name for name, _ in self.images_per_s}, self.left_out()
        is_compared = len(measured) > 1 or not left_out
        may_run = any(refusal.is_passing for (name, _), refusal in self.refused.items() if name in left_out)
        return is_compared and not may_run and not self.is_short and not self.is_busy

    @property
    def sentence(self) -> str:
        """For the user."""
        each = ", ".join(f"{name} {rate:,.0f} with {k}" for (name, k), rate in self.images_per_s.items())
        measured = {name for name, _ in self.images_per_s}
        if len(measured) == 1 and any(name not in measured for name, _ in self.late):
            return f"Executor {self.executor} is taken, the only one there was time to measure (images/s: {each})."
        kept = "; remembered for the next run" if self.is_lasting else ""
        return f"Executor {self.executor} was the fastest here (images/s: {each}){kept}."


def calibrate(
    candidates: Sequence[Candidate],
    batch_size: int,
    device: torch.device,
    effort: Effort = Effort(),
    known: Mapping[Key, float] | None = None,
) -> Calibration:
    """Measure the candidates one after another, in the order given: of the first of an executor depends what follows.

    A candidate that would take longer than what is left of `effort` is left out; `known` are images/s of some that
    need not be measured again.

    Raises:
        UserError: none of them can run; from a MemoryError where one might with more memory.
        DeviceLostError: the device does nothing any more.
    """
    begun, before = time.perf_counter(), LoadSnapshot.take()
    rates: dict[Key, float] = dict(known or {})
    refused: dict[Key, Refusal] = {}
    late: list[Key] = []
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    with torch.random.fork_rng(), kept_host_state():  # a run must not hang on whether its executor was remembered
        for candidate in candidates:
            key = candidate.executor, candidate.num_learners
            if key in rates or _is_refused(key, refused) or _is_spared(candidate, rates, cores):
                continue
            if rates and _predicted_s(candidate, rates, batch_size) > _left_s(effort, rates, begun):
                late.append(key)
                continue
            try:
                rates[key] = _images_per_s(candidate, batch_size, device)
            except (CrossbowError, RuntimeError, MemoryError) as error:
                raise_if_lost(error, device)
                reason = text_of(error)[:200] or type(error).__name__
                refused[key] = Refusal(reason, is_passing=is_out_of_memory(error))
            free_memory(device)
    if not rates:
        reasons = dict.fromkeys(refusal.reason for refusal in refused.values())
        # Not from what was raised: its frames hold the memory that others need.
        cause = MemoryError() if any(refusal.is_passing for refusal in refused.values()) else None
        raise UserError(f"no executor can run this model: {'; '.join(reasons)}") from cause
    best = max(rates, key=lambda key: rates[key])
    is_counted = effort.is_alone and device.type == "cpu"
    others = (foreign_share(before, LoadSnapshot.take()) or 0.0) if is_counted else 0.0
    is_short = bool(late) and effort.seconds(rates[best]) < effort.budget_s
    return Calibration(best[0], rates, refused, tuple(late), is_short, others, time.perf_counter() - begun)


def _is_refused(key: Key, refused: Mapping[Key, Refusal]) -> bool:
    """Whether its executor runs nothing, or memory held no more learners than these."""
    name, count = key
    return any(
        own == name and (not refusal.is_passing or count >= learners) for (own, learners), refusal in refused.items()
    )


def _is_spared(candidate: Candidate, rates: Mapping[Key, float], cores: int) -> bool:
    """Whether what was measured of its executor says enough."""
    if candidate.needs_gain and not _gains(candidate.executor, rates):
        return True
    return _lost(candidate.executor, rates, cores)


def _gains(executor: str, rates: Mapping[Key, float]) -> bool:
    """Whether the most learners it was measured with are faster than fewer of them, by what matters."""
    own = [rate for _, rate in sorted((count, rate) for (name, count), rate in rates.items() if name == executor)]
    return len(own) > 1 and own[-1] >= _GAIN * max(own[:-1])


def _left_s(effort: Effort, rates: Mapping[Key, float], begun: float) -> float:
    return effort.seconds(max(rates.values())) - (time.perf_counter() - begun)


def _predicted_s(candidate: Candidate, rates: Mapping[Key, float], batch_size: int) -> float:
    """Of a round to warm up and one to measure, at the best throughput so far."""
    return 2 * batch_size * candidate.num_learners / max(rates.values())


def _lost(executor: str, rates: Mapping[Key, float], cores: int) -> bool:
    """Whether it is far behind, with learners enough for every core: a learner a core leaves the others idle."""
    own = [rate for (name, count), rate in rates.items() if name == executor and count >= cores]
    return bool(own) and max(own) < _FAR_BEHIND * max(rates.values())


def _images_per_s(candidate: Candidate, batch_size: int, device: torch.device) -> float:
    """Median over a few windows after a warm-up; one round after another where rounds are slow."""
    executor, plan = candidate.build()
    try:
        index = 0

        def window(seconds: float) -> float:
            nonlocal index
            begun, first = time.perf_counter(), index
            while index == first or time.perf_counter() - begun < seconds:
                executor.submit(plan(index))
                index += 1
            executor.drain()
            return (index - first) * batch_size * candidate.num_learners / (time.perf_counter() - begun)

        if device.type == "cuda":
            for _ in range(WARM_UP_ROUNDS + 1):  # kernels are compiled, ways measured, the graph captured
                window(0.0)
        begun = time.perf_counter()
        window(0.0)
        if time.perf_counter() - begun > _SLOW_S:
            return window(0.0)
        return statistics.median(window(_WINDOW_S) for _ in range(_WINDOWS))
    finally:
        executor.close()


class RememberedChoices(Remembered):
    """The executors that earlier runs took."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__("executors.json", path)
