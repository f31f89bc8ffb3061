"""Measures executors for `executor=auto`: every candidate runs a few rounds of the actual job.

Rounds run on a bank of their own that is thrown away, so only the random number generators have to be restored. It
takes some seconds; a candidate is not measured if that would take longer than the time that is left. On CUDA a
candidate's first rounds compile kernels, for up to a minute; that is announced, and takes nothing from the time for
measuring. Choices are remembered by what they depend on (model, batch size, precision, device) in a file in the user's
cache.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from crossbow_py.averaging.rule import AveragingRule, Stage
from crossbow_py.core.errors import CrossbowError, UnknownIdError, UserError, text_of
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.engine.device.graphs import failed_capture
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory, quick_collections, raise_if_lost
from crossbow_py.engine.executors import Executor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.rounds import Round
from crossbow_py.engine.trust import not_used
from crossbow_py.train.tuning.busy_cores import sleeping_where_busy

_BUDGET_S = 30.0  # spent where rounds take a second
_QUICK_S = 5.0  # spent where they are short, of which training may have few
_QUICK_ROUNDS = 20
_WINDOW_S, _SHORT_WINDOW_S = 0.25, 0.08
_WINDOWS = 3
_SLOW_S, _VERY_SLOW_S = 1.0, 3.0
_FAR_BEHIND = 0.7  # of the best throughput so far: more learners will not make up for it
_HOPELESS = 0.5  # of the best throughput so far: what disturbs two windows in a row by so much is rare
_GAIN = 1.05  # times the throughput of fewer learners, below which still more are not tried
_BUSY = 0.2  # share of the cores used by other programs, above which a choice is not remembered
_WORTH = 0.1  # of the training time, the most to spend on measuring

Key = tuple[str, int]  # executor, number of learners


@dataclass(frozen=True)
class Candidate:
    """An executor with a number of learners. `build` makes it, and the function from an index to a round.

    With `needs_gain` it is skipped unless the throughput of its executor still rose with the number of learners.
    """

    executor: str
    num_learners: int
    build: Callable[[], tuple[Executor, Callable[[int], Round]]]
    needs_gain: bool = False


def calibration_round(index: int, num_learners: int, batch_size: int, rule: AveragingRule) -> Round:
    """Return a round that averages as the rule does, at a learning rate of 0."""
    return Round(
        index=index,
        starts=tuple((index * num_learners + j) * batch_size for j in range(num_learners)),
        learning_rates=(0.0,) * num_learners,
        together=rule.round(Stage(index, num_learners)),
    )


@dataclass(frozen=True)
class Effort:
    """The time that measuring may take.

    Attributes:
        budget_s: the limit in seconds; the first candidate may exceed it.
        total_samples: the samples to train on, if known: a share of the time that they take is a second limit.
        spent_s: seconds already spent on measuring for them.
        stopped: returns whether there is nothing left to train.
        is_alone: whether the run or search has no other ranks or workers on this host.
        share: that share.
        round_samples: the samples of a round of a run of unknown length, which may take no longer than measuring: it
            ends after a few seconds, or after as long as some rounds take. 0 for no such limit.
    """

    budget_s: float = _BUDGET_S
    total_samples: int | None = None
    spent_s: float = 0.0
    stopped: Callable[[], bool] = lambda: False
    is_alone: bool = True
    share: float = _WORTH
    round_samples: int = 0

    def seconds(self, fastest: float) -> float:
        """Return the seconds that may be spent, if the best throughput so far is `fastest` images/s."""
        if self.stopped():
            return 0.0
        worth_s = math.inf if self.total_samples is None else self.share * self.total_samples / fastest - self.spent_s
        quick_s = max(_QUICK_S, _QUICK_ROUNDS * self.round_samples / fastest) if self.round_samples else math.inf
        return min(self.budget_s, worth_s, quick_s)

    def after(self, seconds: float) -> Effort:
        """Return what is left after `seconds` more."""
        return replace(self, budget_s=max(0.0, self.budget_s - seconds), spent_s=self.spent_s + seconds)


@dataclass(frozen=True)
class Refusal:
    """The reason why an executor cannot run so many learners. It `is_passing` if memory was short, this time."""

    reason: str
    is_passing: bool = False


@dataclass(frozen=True)
class Calibration:
    """The result of measuring.

    Attributes:
        executor: the fastest executor.
        images_per_s: throughput of every candidate that was measured.
        refused: the candidates that could not run, and why.
        late: the candidates that there was no time to measure.
        is_short: whether a longer training would have left time to measure more.
        others: share of the cores that other programs used, 0 to 1; 0 where it does not matter.
        no_graphs: why some of it may have been measured without CUDA graphs, which a new process captures; or None.
        asleep: whether threads slept while they waited, for other programs.
        seconds: the time that all of it took.
        warm_up_s: the part of that before candidates were measured, which no effort counts; 0 on CPUs.
    """

    executor: str
    images_per_s: Mapping[Key, float]
    refused: Mapping[Key, Refusal] = field(default_factory=dict)
    late: tuple[Key, ...] = ()
    is_short: bool = False
    others: float = 0.0
    seconds: float = 0.0
    warm_up_s: float = 0.0
    no_graphs: str | None = None
    asleep: bool = False

    def left_out(self, fewest: int = 1) -> dict[str, str]:
        """Return the executors that could not be measured with at least `fewest` learners, and why."""
        measured = {name for name, count in self.images_per_s if count >= fewest}
        late = {
            name: f"measuring with {count} learners takes too long" for name, count in self.late if count >= fewest
        }
        refused = {
            name: refusal.reason.rstrip(".")
            for (name, count), refusal in self.refused.items()
            if count >= fewest or not refusal.is_passing
        }
        return {name: reason for name, reason in {**late, **refused}.items() if name not in measured}

    @property
    def disturbed_notes(self) -> tuple[str, ...]:
        """Messages about what disturbed the measurement."""
        reasons = [f"Other programs took {self.others:.0%} of the cores meanwhile"] if self.is_busy else []
        reasons += [f"CUDA graphs were not always used, because {self.no_graphs}"] if self.no_graphs else []
        return tuple(f"{reason}: it is measured again the next time." for reason in reasons)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about executors that were left out and other programs."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out().items():
            by_reason.setdefault(reason, []).append(name)
        return (
            *(
                not_used(f"Executor{'s' * (len(names) > 1)} {', '.join(names)}", reason)
                for reason, names in by_reason.items()
            ),
            *self.disturbed_notes,
        )

    @property
    def is_busy(self) -> bool:
        """True if other programs used much of the machine."""
        return self.asleep or self.others > _BUSY

    @property
    def is_disturbed(self) -> bool:
        """True if other programs, or a capture that failed, made some executors slower than they are."""
        return self.is_busy or self.no_graphs is not None

    @property
    def is_lasting(self) -> bool:
        """True if the choice is to be remembered.

        It is remembered if executors were compared, undisturbed, and another time would not allow to measure more of
        them.
        """
        measured, left_out = {name for name, _ in self.images_per_s}, self.left_out()
        is_compared = len(measured) > 1 or not left_out
        may_run = any(refusal.is_passing for (name, _), refusal in self.refused.items() if name in left_out)
        return is_compared and not may_run and not self.is_short and not self.is_disturbed

    @property
    def sentence(self) -> str:
        """A message for the user about the choice."""
        each = ", ".join(f"{name} {rate:,.0f} with {k}" for (name, k), rate in self.images_per_s.items())
        measured = {name for name, _ in self.images_per_s}
        if len(measured) == 1 and any(name not in measured for name, _ in self.late):
            return f"Executor {self.executor} is taken, the only one there was time to measure (images/s: {each})."
        return f"Executor {self.executor} was the fastest here (images/s: {each})."


def calibrate(
    candidates: Sequence[Candidate],
    batch_size: int,
    device: torch.device,
    effort: Effort = Effort(),
    known: Mapping[Key, float] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the candidates in the order given. The first ones of an executor decide whether later ones are skipped.

    A candidate that would take longer than what is left of `effort` is left out. `known` has images/s of candidates
    that need not be measured again. On CUDA `announce` is told of each candidate before it is compiled and measured.

    Raises:
        UserError: no candidate can run; from a MemoryError if one might with more memory.
        DeviceLostError: the device no longer responds.
    """
    begun, before = time.perf_counter(), LoadSnapshot.take()
    rates: dict[Key, float] = dict(known or {})
    refused: dict[Key, Refusal] = {}
    late: list[Key] = []
    warm_up = _WarmUp(device)
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    sleeping = sleeping_where_busy(device.type) if effort.is_alone else contextlib.nullcontext(False)
    # A run must not depend on whether its executor was remembered.
    with kept_generators(device), quick_collections(), sleeping as asleep:
        for number, candidate in enumerate(candidates, start=1):
            key = candidate.executor, candidate.num_learners
            if key in rates or _is_refused(key, refused) or _is_skipped(candidate, rates, cores):
                continue
            if rates:
                fastest = max(rates.values())
                predicted_s = 2 * batch_size * candidate.num_learners / fastest  # a warm-up round and a measured one
                if predicted_s > effort.seconds(fastest) - (time.perf_counter() - begun - warm_up.seconds):
                    late.append(key)
                    continue
            if device.type == "cuda":
                what = f"executor {candidate.executor} with {candidate.num_learners}"
                announce(f"Compiling and measuring {what} ({number} of at most {len(candidates)}).")
            try:
                rates[key] = _images_per_s(candidate, batch_size, warm_up, max(rates.values(), default=0.0))
            except UnknownIdError:  # whichever executor it is
                raise
            except (CrossbowError, RuntimeError, MemoryError) as error:
                raise_if_lost(error, device)
                reason = text_of(error)[:200] or type(error).__name__
                refused[key] = Refusal(reason, is_passing=is_out_of_memory(error))
            free_memory(device)
    if not rates:
        raise _none_runs(refused.values())
    best = max(rates, key=lambda key: rates[key])
    is_counted = effort.is_alone and device.type == "cpu"
    others = (foreign_share(before, LoadSnapshot.take()) or 0.0) if is_counted else 0.0
    is_short = bool(late) and replace(effort, round_samples=0).seconds(rates[best]) < effort.budget_s
    seconds = time.perf_counter() - begun
    no_graphs = failed_capture() if device.type == "cuda" else None
    return Calibration(
        best[0], rates, refused, tuple(late), is_short, others, seconds, warm_up.seconds, no_graphs, asleep
    )


def _none_runs(refused: Collection[Refusal]) -> UserError:
    error = UserError(f"no executor can run this model: {'; '.join(dict.fromkeys(own.reason for own in refused))}")
    # Not the error that was raised: its frames hold memory that is needed elsewhere.
    error.__cause__ = MemoryError() if any(own.is_passing for own in refused) else None
    return error


def _is_refused(key: Key, refused: Mapping[Key, Refusal]) -> bool:
    """Return whether the executor cannot run at all, or as few learners did not fit in memory."""
    name, count = key
    return any(
        own == name and (not refusal.is_passing or count >= learners) for (own, learners), refusal in refused.items()
    )


def _is_skipped(candidate: Candidate, rates: Mapping[Key, float], cores: int) -> bool:
    """Return whether measurements of its executor already say enough.

    They do if more learners gained less than `_GAIN`, or if it is far behind with at least one learner per core; with
    fewer, cores are idle.
    """
    own = sorted((count, rate) for (name, count), rate in rates.items() if name == candidate.executor)
    if candidate.needs_gain and (len(own) < 2 or own[-1][1] < _GAIN * max(rate for _, rate in own[:-1])):
        return True
    busy = [rate for count, rate in own if count >= cores]
    return bool(busy) and max(busy) < _FAR_BEHIND * max(rates.values())


class _WarmUp:
    """The seconds that candidates on CUDA took to be built, compiled and captured, also those that failed."""

    def __init__(self, device: torch.device) -> None:
        self.rounds = WARM_UP_ROUNDS + 1 if device.type == "cuda" else 0  # the last one is a graph's
        self.seconds = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block, if there is a warm-up on this device."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun if self.rounds else 0.0


def _images_per_s(candidate: Candidate, batch_size: int, warm_up: _WarmUp, fastest: float) -> float:
    """Return the median over a few windows after a warm-up; of slow rounds the faster of two.

    Where two windows are far behind the `fastest` candidate so far, there is no third, and the faster one counts.
    """
    with warm_up.counted():
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

        with warm_up.counted():
            for _ in range(warm_up.rounds):
                window(0.0)
        samples = batch_size * candidate.num_learners
        round_s = samples / window(0.0)
        if round_s < _WINDOW_S:  # the first one prepares
            round_s = samples / window(0.0)
        if round_s > _SLOW_S:  # what disturbs a single round makes it slower, never faster
            return max(window(0.0) for _ in range(2 if round_s < _VERY_SLOW_S else 1))
        window_s = min(_WINDOW_S, max(_SHORT_WINDOW_S, _QUICK_ROUNDS * round_s))
        rates = [window(window_s), window(window_s)]
        if max(rates) < _HOPELESS * fastest:
            return max(rates)
        rates += [window(window_s) for _ in range(_WINDOWS - len(rates))]
        return statistics.median(rates)
    finally:
        executor.close()
