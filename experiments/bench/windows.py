"""Windows of a training run that is fed while it trains: from the ends of rounds to medians over repetitions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

from crossbow_py.core.host import LoadSnapshot

MAX_FOREIGN_SHARE = 0.15  # a window in which others took more of the cores is of no use
ATTEMPTS, RETRY_AFTER_S = 3, 0.3


class Mark(NamedTuple):
    """The end of a round: seconds of training, and of them spent waiting for data."""

    elapsed_s: float
    waited_s: float


@dataclass(frozen=True)
class Window:
    """The result of a window. `images_per_s` counts an image once for every model that trained on it.

    `foreign_share` is the part of the processor that other programs took; None when the kernel does not tell.
    """

    images_per_s: float
    wait_share: float
    round_s: float
    rounds: int
    foreign_share: float | None = None


def window_of(marks: Sequence[Mark], first: int, images_a_round: int) -> Window:
    """Make the window from the end of round `first`, counted from 0, to the end of the last."""
    begin, end, rounds = marks[first], marks[-1], len(marks) - 1 - first
    seconds = end.elapsed_s - begin.elapsed_s
    return Window(
        images_per_s=images_a_round * rounds / seconds,
        wait_share=(end.waited_s - begin.waited_s) / seconds,
        round_s=seconds / rounds,
        rounds=rounds,
    )


class Taken(Protocol):
    """A window of any comparison."""

    @property
    def foreign_share(self) -> float | None:
        """The part of the cores that other programs took; None when the kernel does not tell."""


W = TypeVar("W", bound=Taken)


def clean_window(
    take: Callable[[], W], may_retry: Callable[[], bool], max_foreign_share: float = MAX_FOREIGN_SHARE
) -> tuple[W | None, int]:
    """Take a window until others left the cores alone meanwhile, but no more than a few times.

    Args:
        take: takes one.
        may_retry: waits for the others to be gone, or says that there is no time to.
        max_foreign_share: from which on a window is of no use.

    Returns the window, None when none was clean, and how many were dropped.
    """
    for attempt in range(ATTEMPTS):
        if attempt and not may_retry():
            return None, attempt
        window = take()
        if window.foreign_share is None or window.foreign_share <= max_foreign_share:
            return window, attempt
    return None, ATTEMPTS


def wait_for_others() -> bool:
    """Wait a little before a window is taken again."""
    time.sleep(RETRY_AFTER_S)
    return True


@dataclass
class Windows:
    """The windows of one side, None for a repetition in which others were busy at every attempt.

    `dropped` counts the attempts that were of no use, `load_known` says whether every window knows what others took.
    """

    taken: list[Window | None] = field(default_factory=list)
    dropped: int = 0
    load_known: bool = True

    def add(self, take: Callable[[], Window], until_s: float = float("inf")) -> None:
        """Add a clean window. One during which others were busy is taken again, up to `until_s` on the clock."""
        window, dropped = clean_window(
            take, lambda: time.monotonic() <= until_s and wait_for_others(), MAX_FOREIGN_SHARE
        )
        self.dropped += dropped
        self.load_known = self.load_known and (window is None or window.foreign_share is not None)
        self.taken.append(window)

    def kept(self) -> list[Window]:
        return [window for window in self.taken if window is not None]

    def summary(self) -> dict[str, Any]:
        """Medians as plain values, None without a clean window."""
        kept = self.kept()
        shares, rates = [w.wait_share for w in kept], [w.images_per_s for w in kept]
        return {
            "images_per_s": round(median(rates), 1) if kept else None,
            "wait_share": spread(shares),
            "n": len(kept),
            "dropped": self.dropped,
            "images_per_s_windows": [None if w is None else round(w.images_per_s, 1) for w in self.taken],
            "wait_share_windows": [None if w is None else round(w.wait_share, 4) for w in self.taken],
        }

    def ratio(self, other: Windows) -> dict[str, float] | None:
        """Return the ratio of images/s to the other's, within repetitions in which both have a clean window."""
        pairs = zip(self.taken, other.taken, strict=False)
        return spread([own.images_per_s / base.images_per_s for own, base in pairs if own and base])


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float] | None:
    """Median, smallest and largest; None of nothing."""
    if not values:
        return None
    found = {"median": median(values), "minimum": min(values), "maximum": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def dropped_windows(method: Mapping[str, Any], then: str = "dropped and tried again") -> str:
    """Say what became of the windows in which others were busy, as the end of a sentence."""
    if not method["foreign_load_known"]:
        return "this kernel does not tell whether others were busy meanwhile, so no window was dropped."
    share = f"{100 * method['max_foreign_share']:g} %"
    return f"windows during which others took more than {share} of the cores were {then}."


def load_with_ended() -> LoadSnapshot:
    """Take a snapshot in which the time of processes that have ended, such as workers, counts as our own."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return replace(LoadSnapshot.take(), own_s=own_s)
