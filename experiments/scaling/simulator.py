"""Rounds of many ranks as a recurrence over the ends of their tasks. Pure: values in, seconds out.

A rank is a device with its learners; they run side by side, so its learning task is over when the slowest is. Round n:

    learning(r, n)     after correction(r, n−1)
    correction(r, n)   after learning(r, n) and averaging(n−1)
    averaging(n)       after correction(·, n) of all ranks: sum of the learners, all-reduce, move of z

so averaging(n) runs beside learning(·, n+1), and a rank can be a round ahead of another before it waits. While
averaging is under way learners of its device may lose some of their speed: NCCL takes multiprocessors.

Learning times are a mean times two log-normal factors of mean 1: one drawn for every rank and round, one for every rank
once. Log-normal, since a task is slowed by many small things that multiply, never ends early by much, and has its tail
on the late side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

WARM_UP_ROUNDS = 512  # ranks drift apart like random walks until waiting holds them together
ROUNDS = 512


@dataclass(frozen=True)
class Tasks:
    """Seconds a device's tasks take alone.

    Attributes:
        learning_s: gradients of all of the device's learners, the mean.
        correction_s: their gradient steps and pulls.
        sum_s: adding up the device's corrections.
        move_s: the step of z.
        cv: coefficient of variation of learning from round to round.
        rank_cv: that of the ranks' own mean speeds.
    """

    learning_s: float
    correction_s: float
    sum_s: float = 0.0
    move_s: float = 0.0
    cv: float = 0.0
    rank_cv: float = 0.0


@dataclass(frozen=True)
class Averaging:
    """The averaging: when z moves, and what an all-reduce takes.

    Attributes:
        all_s: all-reduce over all ranks.
        period: τ; averages in every round n (from 1) that τ divides.
        node_period: H; beyond 1 nodes average for themselves, and in every H-th of these rounds z and z_prev become
            their means over nodes, two all-reduces more over all ranks.
        node_s: all-reduce inside a node.
        ranks_per_node: of the two-level period.
        patient: corrections of rounds that do not average wait for no averaging, as the engine's do. False is what
            they would lose by waiting.
    """

    all_s: float
    period: int = 1
    node_period: int = 1
    node_s: float = 0.0
    ranks_per_node: int = 1
    patient: bool = False

    def reduce_s(self, everywhere: bool) -> float:
        """All-reduces of one averaging task; `everywhere` says whether it is of those that H counts."""
        if self.node_period == 1:
            return self.all_s
        return self.node_s + 2 * self.all_s * everywhere


def sma_round_s(
    tasks: Tasks,
    num_ranks: int,
    averaging: Averaging | None,
    *,
    slowdown: float = 0.0,
    warm_up: int = WARM_UP_ROUNDS,
    rounds: int = ROUNDS,
    seed: int = 0,
    rank_factors: Sequence[float] = (),
) -> float:
    """Mean seconds a round, of `rounds` after the `warm_up`; both are rounded up to whole periods.

    `slowdown` is the share of its speed that learning loses while averaging is under way. Without `averaging` each rank
    runs for itself, and the mean is over ranks too. `rank_factors`, where given, multiply the ranks' learning times
    instead of factors that are drawn.
    """
    patient = averaging is not None and averaging.patient
    period = averaging.period * averaging.node_period if averaging else 1
    first, counted = (-(-number // period) * period for number in (warm_up, rounds))
    last = first + counted
    state, noise = _Ranks(num_ranks, slowdown), _Noise(tasks, num_ranks, seed, rank_factors)
    marks = [0.0]
    for index in range(1, last + 1):
        state.learn(tasks.learning_s * noise.factors())
        averages = averaging is not None and index % averaging.period == 0
        state.correct(tasks.correction_s, waits=averages or not patient)
        if averaging is not None and averages:
            everywhere = index % period == 0
            work_s = tasks.sum_s + tasks.move_s + averaging.reduce_s(everywhere)
            state.average(work_s, num_ranks if everywhere else min(num_ranks, averaging.ranks_per_node))
        if index in (first, last):
            marks.append(float(np.mean(state.ends)))
    return (marks[-1] - marks[-2]) / counted


def synchronous_round_s(
    tasks: Tasks,
    num_ranks: int,
    *,
    bulk_s: float,
    tail_s: float,
    overlap: float,
    slowdown: float = 0.0,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> float:
    """Mean seconds a round of synchronous data parallelism: nobody goes on before gradients of all are summed.

    Args:
        tasks: `correction_s` is the optimizer's step; `sum_s` and `move_s` are not used.
        num_ranks: devices.
        bulk_s: all-reduce of the gradients that are there before the last bucket.
        tail_s: all-reduce of the last bucket, for which there is nothing left to hide under.
        overlap: share of learning, its end, beside which gradients can be sent.
        slowdown: share of its speed that learning loses meanwhile.
        rounds: that many.
        seed: of the noise, the same draws as `sma_round_s` makes.
    """
    noise, now = _Noise(tasks, num_ranks, seed), 0.0
    for _ in range(rounds):
        work = tasks.learning_s * noise.factors()
        starts = np.full(num_ranks, now)
        begins = now + (1 - overlap) * float(work.max())
        sent = begins + bulk_s
        ends = learning_ends(starts, work, np.full(num_ranks, begins), np.full(num_ranks, sent), slowdown)
        now = max(float(ends.max()), sent) + tail_s + tasks.correction_s
    return now / rounds


class _Noise:
    """Factors of learning times, one a rank, round by round."""

    def __init__(self, tasks: Tasks, num_ranks: int, seed: int, rank_factors: Sequence[float] = ()) -> None:
        self._rng, self._num_ranks, self._sigma = np.random.default_rng(seed), num_ranks, log_sigma(tasks.cv)
        self._own = np.asarray(rank_factors) if rank_factors else self._draw(log_sigma(tasks.rank_cv))
        assert self._own.shape == (num_ranks,), "a factor a rank"

    def factors(self) -> Times:
        return self._own * self._draw(self._sigma)

    def _draw(self, sigma: float) -> Times:
        if sigma == 0:
            return np.ones(self._num_ranks)
        return np.exp(sigma * self._rng.standard_normal(self._num_ranks) - sigma**2 / 2)


def log_sigma(cv: float) -> float:
    """σ of the log-normal distribution whose standard deviation is `cv` times its mean."""
    return float(np.sqrt(np.log1p(cv**2)))


class _Ranks:
    """The ends of every rank's latest tasks, and the begin and end of averaging, in seconds from the start."""

    def __init__(self, num_ranks: int, slowdown: float) -> None:
        self.ends, self._slowdown = np.zeros(num_ranks), slowdown
        self._begins, self._averaged = np.zeros(num_ranks), np.zeros(num_ranks)

    def learn(self, work: Times) -> None:
        """Learning on all ranks, beside averaging that was begun."""
        self.ends = learning_ends(self.ends, work, self._begins, self._averaged, self._slowdown)

    def correct(self, correction_s: float, *, waits: bool) -> None:
        starts = np.maximum(self.ends, self._averaged) if waits else self.ends
        self.ends = starts + correction_s

    def average(self, work_s: float, group: int) -> None:
        """Begins when the last rank of a group has come."""
        self._begins = _of_group(self.ends, group)
        self._averaged = self._begins + work_s


def learning_ends(starts: Times, work: Times, begins: Times, averaged: Times, slowdown: float) -> Times:
    """Return when `work` begun at `starts` is done, slowed while averaging goes on, from `begins` to `averaged`."""
    speed = 1 - slowdown
    meets = np.maximum(starts, begins)
    left = starts + work - meets  # when averaging begins
    done = np.maximum(averaged - meets, 0) * speed  # of it until averaging is over
    slowed = np.where(left <= done, meets + left / speed, meets + done / speed + (left - done))
    return np.where(left <= 0, starts + work, slowed)


def _of_group(times: Times, group: int) -> Times:
    assert len(times) % group == 0, f"{len(times)} ranks are no whole number of groups of {group}"
    latest: Times = np.repeat(times.reshape(-1, group).max(1), group)
    return latest
