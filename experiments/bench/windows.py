"""Windows of a training run that is fed while it trains: from the ends of rounds to medians over repetitions."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from crossbow_py.core.host import LoadSnapshot

MAX_FOREIGN_SHARE = 0.15  # a window in which others took more of the cores is of no use
ATTEMPTS, RETRY_AFTER_S = 3, 0.3
_ORDER_SEED = 0
S = TypeVar("S")


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


class Rated(Taken, Protocol):
    """A window in which images were trained on."""

    @property
    def images_per_s(self) -> float:
        """Throughput."""


W = TypeVar("W", bound=Taken)
R = TypeVar("R", bound=Rated)


def wait_for_others() -> bool:
    """Wait a little before a window is taken again."""
    time.sleep(RETRY_AFTER_S)
    return True


def wait_until(end_s: float) -> Callable[[], bool]:
    """Wait a little, or say that there is no time to: it is past `end_s` on the monotonic clock."""
    return lambda: time.monotonic() <= end_s and wait_for_others()


def clean_window(
    take: Callable[[], W], may_retry: Callable[[], bool] = wait_for_others, max_foreign_share: float = MAX_FOREIGN_SHARE
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


def by_turns(sides: Sequence[S], repetitions: int) -> Iterator[S]:
    """Every side in every repetition, in a new random order each time."""
    order, draw = list(sides), random.Random(_ORDER_SEED)
    for _ in range(repetitions):
        draw.shuffle(order)
        yield from order


@dataclass
class Windows(Generic[R]):
    """The windows of one side, None for a repetition in which others were busy at every attempt.

    `dropped` counts the attempts that were of no use, `load_known` says whether every window knows what others took.
    """

    taken: list[R | None] = field(default_factory=list)
    dropped: int = 0
    load_known: bool = True

    def add(
        self, take: Callable[[], R], may_retry: Callable[[], bool] = wait_for_others,
        max_foreign_share: float = MAX_FOREIGN_SHARE,
    ) -> None:  # fmt: skip
        """Add a window, see `clean_window`."""
        window, dropped = clean_window(take, may_retry, max_foreign_share)
        self.dropped += dropped
        self.load_known = self.load_known and (window is None or window.foreign_share is not None)
        self.taken.append(window)

    def kept(self) -> list[R]:
        return [window for window in self.taken if window is not None]

    def rates(self) -> list[float | None]:
        """Images/s by repetition."""
        return [None if window is None else window.images_per_s for window in self.taken]

    def ratio(self, other: Windows[Any]) -> dict[str, float] | None:
        return spread(paired_ratios(self.rates(), other.rates()))

    def figures(self) -> dict[str, Any]:
        """Images/s as plain values: their median, None without a clean window, and what stands behind it."""
        kept = [window.images_per_s for window in self.kept()]
        return {
            "images_per_s": round(median(kept), 1) if kept else None,
            "n": len(kept),
            "dropped": self.dropped,
            "images_per_s_windows": [None if rate is None else round(rate, 1) for rate in self.rates()],
        }


def waiting(windows: Windows[Window]) -> dict[str, Any]:
    """The figures of windows of training that is fed meanwhile, with the share of the time spent waiting for data."""
    return {
        **windows.figures(),
        "wait_share": spread([window.wait_share for window in windows.kept()]),
        "wait_share_windows": [None if w is None else round(w.wait_share, 4) for w in windows.taken],
    }


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


def paired_ratios(own: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Ratio within every repetition in which both sides have a clean window."""
    return [ours / theirs for ours, theirs in zip(own, base, strict=False) if ours is not None and theirs is not None]
