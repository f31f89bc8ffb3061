"""The auto-tuner chooses the number of learners of a device from measured throughput, and from what it is worth.

It is pure: a state and a throughput in, a state and a decision out; no clock, no torch, no randomness, so ranks that
are given the same numbers make the same decision. A measurement is the median of `windows` windows of throughput. What
counts is goodput: throughput times the efficiency of a sample with that many learners, which follows from the gradient
noise scale φ (`goodput.py`). Counts whose efficiency is below a half are not tried. Without φ, or with
objective=throughput, the efficiency is 1. There are two searches:

    growing     counts upwards; a count is worth it if it beats the last such count by more than `min_gain`;
    shrinking   counts downwards; a count is worth it if it is within `min_gain` of the best.

A search goes one count past a count that was not worth it (3 learners on 2 cores may be slower and 4 faster), but stops
if throughput falls below half of the best. It settles on the fewest learners measured within `min_gain` of the best. If
growing settles on fewer learners than the last count, it measures them again, once: if the machine has slowed down
meanwhile, the larger counts were compared unfairly, and growing starts again from there. Once settled, the tuner
watches: throughput that stays lower by more than `drift` starts shrinking, higher starts growing. After a drop has
taken learners away, it also tries growing now and then: if another program frees a core that the learners do not use,
throughput does not show it. Every new search doubles the wait before the next, up to `2 ** _MAX_BACK_OFF`
measurements. As φ moves, it goes to whichever measured count is best by then, and starts growing where the next count
would be worth much more than when the last search ended.

After Crossbow's auto-tuner (Koliousis et al., VLDB 2019), which takes one sample per count and then stops.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from crossbow_py.core.settings import check, known_fields, setting
from crossbow_py.engine.goodput import NoiseScale, efficiency

Objective = Literal["goodput", "throughput"]
Action = Literal["grow", "shrink", "stay"]
Phase = Literal["growing", "shrinking", "checking", "settled"]

_CLIFF = 0.5
_LEAST_EFFICIENCY = 0.5  # counts that waste more than half of their samples are not tried
_RISE = 1.1  # the gain of the next count by efficiency, since the last search, that is worth another
_MAX_MISSES = 2
_MAX_BACK_OFF = 6


@dataclass(frozen=True)
class Decision:
    """The number of learners to have now, by whom, and a message, empty while the tuner only measures."""

    action: Action
    num_learners: int
    reason: str = ""
    source: str = "auto-tuner"


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
        noise_scale: φ when the last search ended; None without.
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
    noise_scale: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {**asdict(self), "recent": list(self.recent), "measured": [list(pair) for pair in self.measured]}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> AutoTunerState:
        """Return the state in a checkpoint; fields that a newer version added have their defaults."""
        recent, measured = tuple(values.get("recent", ())), tuple(map(tuple, values.get("measured", ())))
        return cls(**known_fields(cls, {**values, "recent": recent, "measured": measured}, least=-(2**31)))


@dataclass(frozen=True, kw_only=True)
class AutoTunerSettings:
    """The objective of num_learners=auto."""

    GROUP: ClassVar[str] = "auto_tuner"

    objective: Objective = setting(
        "goodput",
        "what num_learners=auto maximises: goodput (images/s times what an image is worth in so large a batch), or "
        "throughput (images/s)",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class AutoTuner(AutoTunerSettings):
    """Decides on the number of learners per device. Its settings are frozen; the caller keeps the state."""

    GROUP: ClassVar[str] = ""

    max_learners: int = setting(8, "most learners a device may have", minimum=1)
    num_devices: int = setting(1, "devices whose learners train together", minimum=1)
    min_gain: float = setting(0.03, "relative gain that is worth more learners", minimum=0)
    windows: int = setting(3, "throughput windows whose median is one measurement", minimum=1)
    drift: float = setting(0.25, "relative change of the settled throughput that starts a new search", above=0, below=1)
    warm_up_windows: int = setting(1, "windows dropped after the number of learners changes", minimum=0)

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
        self, state: AutoTunerState, images_per_s: float, num_windows: int = 1, noise: NoiseScale | None = None
    ) -> tuple[AutoTunerState, Decision]:
        """Take the throughput of one window over all learners, or of a longer time that counts as several.

        Numbers that are not positive and finite are ignored. Windows after a change are dropped here, and need not be
        by the caller. While the `noise` is not known well enough, several learners stay as many; a single one gets
        another, with which a sample is worth half as much at least. None is for no noise to be known.
        """
        stay = Decision("stay", state.num_learners)
        noise = noise if self.objective == "goodput" else None
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
        if noise is not None and noise.samples is None and state.num_learners > 1:
            return replace(state, recent=state.recent[len(state.recent) - self.windows + 1 :]), stay
        state, worth = replace(state, recent=()), _Worth(noise, self.num_devices)
        if state.phase == "settled":
            return self._watch(state, median, worth)
        if state.phase == "checking":
            return self._check(state, median, worth)
        return self._search(replace(state, measured=(*state.measured, (state.num_learners, median))), worth)

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
                return _move(state, self._choice(state, _Worth()), "settled", "")[0]
            return _move(state, self.max_learners, "shrinking", "")[0]
        if self.max_learners > former_limit and state.phase in ("settled", "checking"):
            return _move(replace(state, measured=(), checked=False), state.num_learners, "growing", "")[0]
        return state

    def out_of_memory(
        self, state: AutoTunerState, noise: NoiseScale | None = None
    ) -> tuple[AutoTunerState, Decision]:
        """Go back to fewer learners, because the current number did not fit in memory.

        It and larger ones are not tried again. The new number is the best of the smaller counts measured or, if none
        was, the next smaller count. `noise` is as for `observe`.
        """
        worth = _Worth(noise if self.objective == "goodput" else None, self.num_devices)
        count = state.num_learners
        assert count > 1, "one learner does not fit in memory, which the caller has to report"
        fitting = tuple(pair for pair in state.measured if pair[0] < count)
        state = replace(state, out_of_memory_at=count, measured=fitting)
        smaller = self._choice(state, worth) if fitting else self._neighbour(replace(state, phase="shrinking"), worth)
        assert smaller is not None, f"no count below {count} in {self.counts}"
        reason = f"{count} → {_learners(smaller)}: memory does not hold {count}."
        return _move(state, smaller, "settled" if fitting else "growing", reason)

    def _search(self, state: AutoTunerState, worth: _Worth) -> tuple[AutoTunerState, Decision]:
        """Go to the next count to measure, or settle."""
        count, following = state.num_learners, self._following(state, worth)
        if following is None:
            return self._settle(state, worth)
        gain = ""
        if len(state.measured) > 1:
            before, now = state.measured[-2:]
            gain = f", {_percent(worth.of(now) / worth.of(before) - 1)} on {before[0]}"
        beyond = "; looks one count further" if self._misses(state, worth) else ""
        reason = f"{count} → {_learners(following)}: {worth.said(state.measured[-1])}{gain}{beyond}."
        return _move(state, following, state.phase, reason)

    def _settle(self, state: AutoTunerState, worth: _Worth) -> tuple[AutoTunerState, Decision]:
        count, choice = state.num_learners, self._choice(state, worth)
        state = replace(state, noise_scale=worth.scale)
        change = f"{count} → {_learners(choice)}" if choice != count else f"Settled on {_learners(count)}"
        rate = worth.said((choice, dict(state.measured)[choice]))
        why = f"the fewest within {100 * self.min_gain:.3g} % of the best"
        if state.phase == "growing" and choice < count and not state.checked:
            return _move(replace(state, checked=True), choice, "checking", f"{change}: {rate}, {why}; measures again.")
        return _move(state, choice, "settled", f"{change}: {rate}, {why}.")

    def _check(self, state: AutoTunerState, median: float, worth: _Worth) -> tuple[AutoTunerState, Decision]:
        """Settle on the choice measured again, or grow from it if a count that it was preferred to beats it now."""
        count, before = state.num_learners, dict(state.measured)[state.num_learners]
        least = worth.of((count, median)) * (1 + self.min_gain)
        beaten = any(other > count and worth.of((other, rate)) > least for other, rate in state.measured)
        rate = f"{worth.said((count, median))}, {_percent(median / before - 1)} since it was measured first"
        if beaten:
            state = replace(state, measured=((count, median),))
            following = self._neighbour(replace(state, phase="growing"), worth)
            if following is not None:  # else φ has fallen meanwhile
                return _move(state, following, "growing", f"{count} → {_learners(following)}: {rate}.")
        state = replace(state, measured=(*state.measured, (count, median)))
        return _move(state, count, "settled", f"Settled on {_learners(count)}: {rate}.")

    def _watch(self, state: AutoTunerState, median: float, worth: _Worth) -> tuple[AutoTunerState, Decision]:
        """Compare a measurement with the one the tuner settled on, and search again if that is due."""
        change = median / dict(state.measured)[state.num_learners] - 1
        direction = (change > self.drift) - (change < -self.drift)
        in_a_row = state.drifted if state.drifted * direction > 0 else 0
        state = replace(state, drifted=in_a_row + direction)
        patience = 2 ** min(state.num_searches_again + 1, _MAX_BACK_OFF)
        if abs(state.drifted) >= patience:
            return self._search_again(state, median, f"{_percent(change)} since it settled", worth)
        if direction == 0 and (moved := self._follow_noise(state, median, worth)):
            return moved
        waited = state.num_windows >= patience * self.windows
        dropped = state.num_learners < state.before_drop
        if direction == 0 and waited and dropped and self._grown(state, worth) is not None:
            return self._search_again(state, median, "looks whether more pay again", worth)
        return state, Decision("stay", state.num_learners)

    def _follow_noise(
        self, state: AutoTunerState, median: float, worth: _Worth
    ) -> tuple[AutoTunerState, Decision] | None:
        """Go to the measured count that is best by the φ of now, or grow again; None if the number is right."""
        if worth.noise is None:
            return None
        count, choice = state.num_learners, self._choice(state, worth)
        now, best = ((each, dict(state.measured)[each]) for each in (count, choice))
        moved = f"the gradient noise scale is {_samples(worth.scale)}"
        if choice != count and worth.of(best) > worth.of(now) * (1 + self.min_gain):
            reason = f"{count} → {_learners(choice)}: {worth.said(best)}, as {moved}."
            return _move(state, choice, "settled", reason)
        is_least = count == min(each for each, _ in state.measured)
        if is_least and count > 1 and worth.efficiency(count) < _LEAST_EFFICIENCY:
            return self._search_again(replace(state, drifted=-1), median, moved, worth)
        following = self._grown(replace(state, num_learners=max(each for each, _ in state.measured)), worth)
        if following is None or worth.rise(count, following, state.noise_scale) < _RISE:
            return None
        return self._search_again(replace(state, drifted=0), median, moved, worth)

    def _search_again(
        self, state: AutoTunerState, median: float, why: str, worth: _Worth
    ) -> tuple[AutoTunerState, Decision]:
        """Start a search, without the old measurements, which were taken under other conditions."""
        count, dropped = state.num_learners, state.drifted < 0
        state = replace(
            state,
            phase="shrinking" if dropped else "growing",
            measured=((count, median),),
            before_drop=max(state.before_drop, count) if dropped else state.before_drop,
            num_searches_again=state.num_searches_again + 1,
            checked=False,
            noise_scale=worth.scale,
        )
        following = self._following(state, worth)
        rate = f"{worth.said(state.measured[0])}, {why}."
        if following is None:
            return _move(state, count, "settled", f"{_learners(count)} still: {rate}")
        return _move(state, following, state.phase, f"{count} → {_learners(following)}: {rate}")

    def _following(self, state: AutoTunerState, worth: _Worth) -> int | None:
        """Return the count to measure next, or None if the search is over."""
        values = [images_per_s for _, images_per_s in state.measured]
        # A device that swaps or thrashes gets no more learners: on a host, these may get the process killed.
        if self._misses(state, worth) >= _MAX_MISSES or values[-1] < _CLIFF * max(values):
            return None
        return self._neighbour(state, worth)

    def _misses(self, state: AutoTunerState, worth: _Worth) -> int:
        """Return how many of the last counts in a row were not worth it."""
        values = [worth.of(each) for each in state.measured]
        misses, reference = 0, values[0]
        for value in values[1:]:
            if state.phase == "growing":
                pays = value > reference * (1 + self.min_gain)
            else:
                pays = value * (1 + self.min_gain) >= reference
            misses = 0 if pays else misses + 1
            reference = max(reference, value) if pays else reference
        return misses

    def _neighbour(self, state: AutoTunerState, worth: _Worth) -> int | None:
        """Return the next count in the direction of the search, or None at the end of the counts or of memory."""
        if state.phase == "shrinking":
            return max((count for count in self.counts if count < state.num_learners), default=None)
        return self._grown(state, worth)

    def _grown(self, state: AutoTunerState, worth: _Worth) -> int | None:
        """Return the next larger count; None if there may be none, or if it would waste half of its samples."""
        limit = state.out_of_memory_at or self.max_learners + 1
        found = min((count for count in self.counts if state.num_learners < count < limit), default=None)
        return None if found is None or worth.efficiency(found) < _LEAST_EFFICIENCY else found

    def _choice(self, state: AutoTunerState, worth: _Worth) -> int:
        """Return the fewest learners measured within `min_gain` of the best."""
        values = {count: worth.of((count, images_per_s)) for count, images_per_s in state.measured}
        best = max(values.values())
        return min(count for count, value in values.items() if value * (1 + self.min_gain) >= best)


@dataclass(frozen=True)
class _Worth:
    """The worth of learners at a gradient noise; without noise an image is worth the same in any number of them."""

    noise: NoiseScale | None = None
    num_devices: int = 1

    @property
    def scale(self) -> float | None:
        return None if self.noise is None else self.noise.samples

    def efficiency(self, num_learners: int, scale: float | None = None) -> float:
        """Return the efficiency of K learners on each device, at the φ of now or at another."""
        scale = self.scale if scale is None else scale
        if self.noise is None or scale is None:
            return 1.0
        return efficiency(scale, self.noise.batch_size, num_learners * self.num_devices)

    def of(self, measurement: tuple[int, float]) -> float:
        """Return the goodput."""
        count, images_per_s = measurement
        return images_per_s * self.efficiency(count)

    def rise(self, count: int, following: int, scale: float | None) -> float:
        """Return how much more a following count is worth, to `count`, than at an earlier φ."""
        if scale is None:
            return 1.0
        then, now = ((self.efficiency(following, at) / self.efficiency(count, at)) for at in (scale, None))
        return now / then

    def said(self, measurement: tuple[int, float]) -> str:
        if self.noise is None:
            return _rate(measurement)
        count, images_per_s = measurement
        worth = f"{_number(images_per_s)} images/s × {self.efficiency(count):.2f}"
        return f"goodput {_number(self.of(measurement))} with {count} ({worth})"


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
    return f"{_number(images_per_s)} images/s with {count}"


def _number(images_per_s: float) -> str:
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def _percent(change: float) -> str:
    return f"{'down' if change < 0 else 'up'} {100 * abs(change):.0f} %"


def _samples(scale: float | None) -> str:
    return "too large to tell" if scale is None or math.isinf(scale) else f"{scale:,.0f} samples"
