"""The auto-tuner chooses the number of learners of a device from measured throughput.

It is pure: a state and a throughput in, a state and a decision out; no clock, no torch, no randomness, so ranks that
are given the same numbers make the same decision. A measurement is the median of `windows` windows of throughput. There
are two searches:

    growing     counts upwards; a count is worth it if it beats the last such count by more than `min_gain`;
    shrinking   counts downwards; a count is worth it if it is within `min_gain` of the best.

A search goes one count past a count that was not worth it (3 learners on 2 cores may be slower and 4 faster), but stops
if throughput falls below half of the best. It settles on the fewest learners measured within `min_gain` of the best. If
growing settles on fewer learners than the last count, it measures them again, once: if the machine has slowed down
meanwhile, the larger counts were compared unfairly, and growing starts again from there. Once settled, the tuner
watches: throughput that stays lower by more than `drift` starts shrinking, higher starts growing. After a drop has
taken learners away, it also tries growing now and then: if another program frees a core that the learners do not use,
throughput does not show it. Every new search doubles the wait before the next, up to `2 ** _MAX_BACK_OFF`
measurements.

After Crossbow's auto-tuner (Koliousis et al., VLDB 2019), which takes one sample per count and then stops.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from crossbow_py.core.settings import check, known_fields, setting

Action = Literal["grow", "shrink", "stay"]
Phase = Literal["growing", "shrinking", "checking", "settled"]

_CLIFF = 0.5
_MAX_MISSES = 2
_MAX_BACK_OFF = 6


@dataclass(frozen=True)
class Decision:
    """The number of learners to have now, and a message for the console, empty while the tuner only measures."""

    action: Action
    num_learners: int
    reason: str = ""


@dataclass(frozen=True)
class AutoTunerState:
    """The state of the search; the default is that at the start of a run.

    Attributes:
        num_learners: the current count.
        phase: what the tuner does.
        num_windows: the windows since the count or the phase changed.
        recent: the throughputs of the current measurement so far, in images/s.
        measured: (learners, images/s) of the latest search, in its order.
        out_of_memory_at: the smallest count that did not fit in memory.
        drifted: the measurements in a row that were too high (positive) or too low (negative).
        before_drop: the most learners there were when a drop was seen.
        checked: whether this search has measured its choice again.
        num_searches_again: the searches after the first.
    """

    num_learners: int = 1
    phase: Phase = "growing"
    num_windows: int = 0
    recent: tuple[float, ...] = ()
    measured: tuple[tuple[int, float], ...] = ()
    out_of_memory_at: int | None = None
    drifted: int = 0
    before_drop: int = 0
    checked: bool = False
    num_searches_again: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {**asdict(self), "recent": list(self.recent), "measured": [list(pair) for pair in self.measured]}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> AutoTunerState:
        """Return the state in a checkpoint; fields that a newer version added have their defaults."""
        recent, measured = tuple(values.get("recent", ())), tuple(map(tuple, values.get("measured", ())))
        return cls(**known_fields(cls, {**values, "recent": recent, "measured": measured}, least=-(2**31)))


@dataclass(frozen=True, kw_only=True)
class AutoTuner:
    """Decides on the number of learners per device. Its settings are frozen; the caller keeps the state."""

    max_learners: int = setting(8, "most learners a device may have", minimum=1)
    min_gain: float = setting(0.03, "relative gain in throughput that is worth more learners", minimum=0)
    windows: int = setting(3, "throughput windows whose median is one measurement", minimum=1)
    drift: float = setting(0.25, "relative change of the settled throughput that starts a new search", above=0, below=1)
    warm_up_windows: int = setting(1, "windows dropped after the number of learners changes", minimum=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of learners it may choose, ascending: 1, 2, 3, 4, 6, 8, 12, ... and `max_learners`.

        The limit is always one of them: a limit of 5 or 7 comes from the user or from memory, and ending at 4 or 6
        would waste a learner.
        """
        limit = self.max_learners
        powers = {base << shift for base in (1, 3) for shift in range(limit.bit_length())}
        return tuple(sorted({limit, *(count for count in powers if count <= limit)}))

    def observe(
        self, state: AutoTunerState, images_per_s: float, num_windows: int = 1
    ) -> tuple[AutoTunerState, Decision]:
        """Take the throughput of one window over all learners, or of a longer time that counts as several.

        Numbers that are not positive and finite are ignored. Windows after a change are dropped here, and need not be
        by the caller.
        """
        stay = Decision("stay", state.num_learners)
        if not (math.isfinite(images_per_s) and images_per_s > 0):
            return state, stay
        warms_up = state.num_windows < self.warm_up_windows
        state = replace(state, num_windows=state.num_windows + num_windows)
        if warms_up:
            return state, stay
        state = replace(state, recent=(*state.recent, *(images_per_s,) * num_windows))
        if len(state.recent) < self.windows:
            return state, stay
        median = statistics.median(state.recent)
        state = replace(state, recent=())
        if state.phase == "settled":
            return self._watch(state, median)
        if state.phase == "checking":
            return self._check(state, median)
        return self._search(replace(state, measured=(*state.measured, (state.num_learners, median))))

    def resumed(self, state: AutoTunerState, former_limit: int) -> AutoTunerState:
        """Return the state of a resumed run, maybe on another machine, whose `max_learners` was `former_limit`.

        Counts that did not fit in memory may be tried again. A lower limit takes learners away, a higher one starts
        growing.
        """
        fitting = tuple(pair for pair in state.measured if pair[0] <= self.max_learners)
        state = replace(state, out_of_memory_at=None, measured=fitting)
        if state.num_learners > self.max_learners:
            state = replace(state, before_drop=0)
            if fitting:
                return _move(state, self._choice(state), "settled", "")[0]
            return _move(state, self.max_learners, "shrinking", "")[0]
        if self.max_learners > former_limit and state.phase in ("settled", "checking"):
            return _move(replace(state, measured=(), checked=False), state.num_learners, "growing", "")[0]
        return state

    def out_of_memory(self, state: AutoTunerState) -> tuple[AutoTunerState, Decision]:
        """Go back to fewer learners, because the current number did not fit in memory.

        It and larger ones are not tried again. The new number is the best of the smaller counts measured or, if none
        was, the next smaller count.
        """
        count = state.num_learners
        assert count > 1, "one learner does not fit in memory, which the caller has to report"
        fitting = tuple(pair for pair in state.measured if pair[0] < count)
        state = replace(state, out_of_memory_at=count, measured=fitting)
        smaller = self._choice(state) if fitting else self._neighbour(replace(state, phase="shrinking"))
        assert smaller is not None, f"no count below {count} in {self.counts}"
        reason = f"{count} → {_learners(smaller)}: memory does not hold {count}."
        return _move(state, smaller, "settled" if fitting else "growing", reason)

    def _search(self, state: AutoTunerState) -> tuple[AutoTunerState, Decision]:
        """Go to the next count to measure, or settle."""
        count, following = state.num_learners, self._following(state)
        if following is None:
            return self._settle(state)
        gain = ""
        if len(state.measured) > 1:
            (before, slower), (_, faster) = state.measured[-2:]
            gain = f", {_percent(faster / slower - 1)} on {before}"
        beyond = "; looks one count further" if self._misses(state) else ""
        reason = f"{count} → {_learners(following)}: {_rate(state.measured[-1])}{gain}{beyond}."
        return _move(state, following, state.phase, reason)

    def _settle(self, state: AutoTunerState) -> tuple[AutoTunerState, Decision]:
        count, choice = state.num_learners, self._choice(state)
        change = f"{count} → {_learners(choice)}" if choice != count else f"Settled on {_learners(count)}"
        rate = _rate((choice, dict(state.measured)[choice]))
        why = f"the fewest within {100 * self.min_gain:.3g} % of the best"
        if state.phase == "growing" and choice < count and not state.checked:
            return _move(replace(state, checked=True), choice, "checking", f"{change}: {rate}, {why}; measures again.")
        return _move(state, choice, "settled", f"{change}: {rate}, {why}.")

    def _check(self, state: AutoTunerState, median: float) -> tuple[AutoTunerState, Decision]:
        """Settle on the choice measured again, or grow from it if a count that it was preferred to beats it now."""
        count, before = state.num_learners, dict(state.measured)[state.num_learners]
        beaten = any(
            images_per_s > median * (1 + self.min_gain) for other, images_per_s in state.measured if other > count
        )
        rate = f"{_rate((count, median))}, {_percent(median / before - 1)} since"
        if not beaten:
            state = replace(state, measured=(*state.measured, (count, median)))
            return _move(state, count, "settled", f"Settled on {_learners(count)}: {rate}.")
        state = replace(state, measured=((count, median),))
        following = self._neighbour(replace(state, phase="growing"))
        assert following is not None, "more learners were measured than there may be"
        return _move(state, following, "growing", f"{count} → {_learners(following)}: {rate}.")

    def _watch(self, state: AutoTunerState, median: float) -> tuple[AutoTunerState, Decision]:
        """Compare a measurement with the one the tuner settled on, and search again if that is due."""
        change = median / dict(state.measured)[state.num_learners] - 1
        direction = (change > self.drift) - (change < -self.drift)
        in_a_row = state.drifted if state.drifted * direction > 0 else 0
        state = replace(state, drifted=in_a_row + direction)
        patience = 2 ** min(state.num_searches_again + 1, _MAX_BACK_OFF)
        if abs(state.drifted) >= patience:
            return self._search_again(state, median, f"{_percent(change)} since it settled")
        waited = state.num_windows >= patience * self.windows
        dropped = state.num_learners < state.before_drop
        if direction == 0 and waited and dropped and self._neighbour(replace(state, phase="growing")) is not None:
            return self._search_again(state, median, "looks whether more pay again")
        return state, Decision("stay", state.num_learners)

    def _search_again(self, state: AutoTunerState, median: float, why: str) -> tuple[AutoTunerState, Decision]:
        """Start a search, without the old measurements, which were taken under other conditions."""
        count, dropped = state.num_learners, state.drifted < 0
        state = replace(
            state,
            phase="shrinking" if dropped else "growing",
            measured=((count, median),),
            before_drop=max(state.before_drop, count) if dropped else state.before_drop,
            num_searches_again=state.num_searches_again + 1,
            checked=False,
        )
        following = self._following(state)
        rate = f"{_rate(state.measured[0])}, {why}."
        if following is None:
            return _move(state, count, "settled", f"{_learners(count)} still: {rate}")
        return _move(state, following, state.phase, f"{count} → {_learners(following)}: {rate}")

    def _following(self, state: AutoTunerState) -> int | None:
        """Return the count to measure next, or None if the search is over."""
        values = [images_per_s for _, images_per_s in state.measured]
        # A device that swaps or thrashes gets no more learners: on a host, these may get the process killed.
        if self._misses(state) >= _MAX_MISSES or values[-1] < _CLIFF * max(values):
            return None
        return self._neighbour(state)

    def _misses(self, state: AutoTunerState) -> int:
        """Return how many of the last counts in a row were not worth it."""
        misses, reference = 0, state.measured[0][1]
        for _, images_per_s in state.measured[1:]:
            if state.phase == "growing":
                worth = images_per_s > reference * (1 + self.min_gain)
            else:
                worth = images_per_s * (1 + self.min_gain) >= reference
            misses = 0 if worth else misses + 1
            reference = max(reference, images_per_s) if worth else reference
        return misses

    def _neighbour(self, state: AutoTunerState) -> int | None:
        """Return the next count in the direction of the search, or None at the end of the counts or of memory."""
        if state.phase == "shrinking":
            return max((count for count in self.counts if count < state.num_learners), default=None)
        limit = state.out_of_memory_at or self.max_learners + 1
        return min((count for count in self.counts if state.num_learners < count < limit), default=None)

    def _choice(self, state: AutoTunerState) -> int:
        """Return the fewest learners measured within `min_gain` of the best."""
        best = max(images_per_s for _, images_per_s in state.measured)
        return min(count for count, images_per_s in state.measured if images_per_s * (1 + self.min_gain) >= best)


def _move(state: AutoTunerState, count: int, phase: Phase, reason: str) -> tuple[AutoTunerState, Decision]:
    """Change the count and the phase, which starts a new measurement."""
    before = state.num_learners
    action: Action = "grow" if count > before else "shrink" if count < before else "stay"
    state = replace(state, num_learners=count, phase=phase, num_windows=0, recent=(), drifted=0)
    return state, Decision(action, count, reason)


def _learners(count: int) -> str:
    return "1 learner" if count == 1 else f"{count} learners"


def _rate(measurement: tuple[int, float]) -> str:
    count, images_per_s = measurement
    number = f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"
    return f"{number} images/s with {count}"


def _percent(change: float) -> str:
    return f"{'down' if change < 0 else 'up'} {100 * abs(change):.0f} %"
