"""How many trials of a signature train side by side, and by which executor: what is the fastest, by throughputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NEARLY = 1.25  # of a pack's size
ASKED_FOR = "was asked for"
_WORTH = 1.05  # times the throughput of one at a time: what a pack has to reach, or it is not worth its memory
_CLOSE = 0.95  # of the best throughput: where packs begin to gain no more
_SLOW_START = 0.6  # of one trial's throughput is what an executor for packs has with one, where that is not measured
Rates = Mapping[tuple[str, int], float]  # images/s of all trials together, by (executor, trials)


@dataclass(frozen=True)
class Width:
    """The size of a full pack, what was measured, and a sentence for the user."""

    size: int
    rates: Rates
    sentence: str

    def executor(self, num_trials: int) -> str:
        """For that many trials: the fastest by what was measured with fewer and with more."""
        names = dict.fromkeys(name for name, _ in self.rates)
        return max(names, key=lambda name: self._rate(name, num_trials))

    def _rate(self, name: str, num_trials: int) -> float:
        """Images/s: a round takes a time that is linear in its trials; more than were measured are as fast."""
        rounds = {count: count / rate for (own, count), rate in self.rates.items() if own == name and rate}
        if not rounds:
            return 0.0  # nothing was measured: there is one executor
        alone = max((rate for (_, count), rate in self.rates.items() if count == 1), default=0.0)
        if alone:  # and a round of one takes no longer than one of more
            rounds.setdefault(1, min(1 / (_SLOW_START * alone), rounds[min(rounds)]))
        below = max((count for count in rounds if count <= num_trials), default=None)
        above = min((count for count in rounds if count >= num_trials), default=None)
        if above is None or above == below:
            nearest = num_trials if above == below else max(rounds)
            return nearest / rounds[nearest]
        if below is None:  # the share of them that is there
            return num_trials / rounds[above]
        share = (num_trials - below) / (above - below)
        return num_trials / (rounds[below] + share * (rounds[above] - rounds[below]))


def choose_width(rates: Rates, what: str, bound: int, why_alone: str = ASKED_FOR) -> Width:
    """The smallest pack close to the best throughput; one at a time where packs do not pay. Pure.

    `rates` has one trial at a time, by whatever executor; `what` names the trials, of which `bound` are all there can
    be. A pack that takes nearly all of them takes all, as those that were left would train alone in the end.
    `why_alone` says why there are no packs in `rates`, where that is so.
    """
    alone = max((rate for (_, count), rate in rates.items() if count == 1), default=None)
    fastest = max(rates.values())
    if alone is not None and fastest < _WORTH * alone:
        name = max((own for own, count in rates if count == 1), key=lambda own: rates[own, 1])
        reason = f"packing does not pay: {fastest:,.0f} images/s at best, and {alone:,.0f} one at a time"
        if not has_packs(rates):
            reason = f"{why_alone}, by executor {name}: {alone:,.0f} images/s"
        return Width(1, rates, f"Trials of {what} run one at a time, as {reason}.")
    size = min(count for (_, count), rate in rates.items() if rate >= _CLOSE * fastest)
    name = max((own for own, count in rates if count == size), key=lambda own: rates[own, size])
    rate, size = rates[name, size], bound if bound <= NEARLY * size else size
    sentence = f"Trials of {what} run in packs of {size} by executor {name}: {rate:,.0f} images/s"
    if alone is not None:
        sentence += f", and {alone:,.0f} one at a time ({rate / alone:.1f} times)"
    return Width(size, rates, f"{sentence}.")


def has_packs(rates: Rates) -> bool:
    """Whether trials side by side are among them."""
    return any(count > 1 for _, count in rates)
