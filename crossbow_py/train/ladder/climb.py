"""Climbing: which rungs are tried, in what order, with what; pure, but for the functions it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crossbow_py.core.switches import KERNELS, Switches
from crossbow_py.engine.trust import Outcome, proven
from crossbow_py.train.ladder.rungs import BEST, Rung

_ENDED = {"failed": "failed", "skipped": "was skipped"}


@dataclass(frozen=True)
class Attempt:
    """What a rung's child process is to do.

    Attributes:
        rung: the rung.
        executor: the executor to train with.
        precisions: the precisions to train in.
        switches: the kernels and graphs to use.
    """

    rung: Rung
    executor: str
    precisions: tuple[str, ...]
    switches: Switches


def attempt_at(rung: Rung, has: frozenset[str]) -> Attempt:
    """Return how a rung is tried where the features `has` are proven."""
    fastest = "fused" if "fused" in has else "serial"
    features = rung.features(has)
    able = tuple(each for each in rung.precisions if each != "bf16" or "bf16" in (*has, *rung.proves))
    switches = Switches(features.intersection(KERNELS), "graphs" in features)
    return Attempt(rung, fastest if rung.executor == BEST else rung.executor, able, switches)


def climb(
    rungs: Sequence[Rung],
    run: Callable[[Attempt], Outcome],
    lacks: Callable[[Rung], str | None] = lambda _: None,
    known: Mapping[str, Outcome] | None = None,
    tell: Callable[[Rung, Outcome, bool], None] = lambda *_: None,
    title: Callable[[Rung], str] = lambda rung: rung.title,
) -> dict[str, Outcome]:
    """Try the rungs in order, and return their outcomes by name.

    A rung whose predecessor did not pass, or that the machine cannot try, is skipped; others are tried all the same.

    Args:
        rungs: the rungs; those that a rung is `after` come before it, or it is tried without them.
        run: tries one.
        lacks: returns what the machine lacks to try a rung, on one line, or None.
        known: outcomes that are remembered, and not found out again, unless the rung was skipped.
        tell: called with each rung and its outcome, and whether that was known.
        title: returns what a rung is called on the screen.
    """
    found: dict[str, Outcome] = {}
    titles = {rung.name: title(rung) for rung in rungs}
    for rung in rungs:
        missed = [name for name in rung.after if name in found and not found[name].passed]
        is_known = False
        if reason := lacks(rung):
            outcome = Outcome("skipped", reason, proves=rung.proves)
        elif missed:
            before = found[missed[0]]
            reason = f"it builds on '{titles[missed[0]].removeprefix('+ ')}', which {_ENDED[before.status]}"
            outcome = Outcome("skipped", reason, proves=rung.proves, may_change=before.may_change)
        elif known and rung.name in known and known[rung.name].status != "skipped":
            outcome, is_known = known[rung.name], True
        else:
            outcome = run(attempt_at(rung, proven(found)))
        found[rung.name] = outcome
        tell(rung, outcome, is_known)
    return found


def untried(
    rungs: Sequence[Rung], lacks: Callable[[Rung], str | None], known: Mapping[str, Outcome]
) -> list[Rung]:
    """Return the rungs that `climb` would try, if each of them passed."""
    found: list[Rung] = []

    def run(attempt: Attempt) -> Outcome:
        found.append(attempt.rung)
        return Outcome("passed", proves=attempt.rung.proves)

    climb(rungs, run, lacks, known)
    return found
