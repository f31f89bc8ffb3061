"""What was measured of packs in earlier searches."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossbow_py.core.user_cache import Remembered
from crossbow_py.core.version import __version__
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.search.packs.compatible_trials import TrialsAlike
from crossbow_py.search.packs.width import Rates
from crossbow_py.train.tuning.calibration import Effort, fingerprint

_RATE = re.compile(r"(?<=Dropout\()p=[^,)]*|(?<=Dropout[123]d\()p=[^,)]*")  # trials have their own


@dataclass(frozen=True)
class Found:
    """What is remembered of measuring.

    Attributes:
        rates: throughputs.
        why_no_packs: why no packs are among them, where some were to be.
        bound: trials side by side that memory was thought to hold then.
        most: that a pack may have.
    """

    rates: Rates
    why_no_packs: str
    bound: int
    most: int

    def within(self, bound: int) -> Found | None:
        """What of it counts where memory holds no more trials than that; None where that is nothing."""
        rates = {key: rate for key, rate in self.rates.items() if key[1] <= bound}
        return replace(self, rates=rates, most=min(self.most, bound)) if rates else None


class WidthMemory:
    """What was measured for such trials before, in long searches and in those with little to train.

    Args:
        trials: the trials.
        names: of the executors that may run them.
        limit: trials side by side, at most.
        is_alone: whether no other search takes part of the machine.
    """

    def __init__(self, trials: TrialsAlike, names: Sequence[str], limit: int, is_alone: bool) -> None:
        key = _fingerprint(trials, names, limit, is_alone)
        self._known, self._key, self._short_key = Remembered("packs.json"), key, f"{key} short"

    def recall(self, effort: Effort, bound: int, *, beside_packs: bool) -> Found | None:
        """What is known of as many trials as memory holds, `bound`; of what a short search measured only in another.

        Where packs hold memory it is what memory held without them.
        """
        found = self._read(self._key)
        if found is None or found.bound < bound:
            found = self._read(self._short_key)
            if not found or effort.seconds(max(found.rates.values())) >= effort.budget_s or found.bound < bound:
                return None
        return found if beside_packs else found.within(bound)

    def keep(self, found: Found, *, is_short: bool) -> None:
        """Keep it for the next time."""
        rates = [[name, count, rate] for (name, count), rate in found.rates.items()]
        plain = json.dumps(
            {"rates": rates, "why_no_packs": found.why_no_packs, "bound": found.bound, "most": found.most}
        )
        self._known.remember(self._short_key if is_short else self._key, plain)

    def _read(self, key: str) -> Found | None:
        try:
            plain = json.loads(self._known.recall(key) or "{}")
            rates = {(str(name), int(count)): float(rate) for name, count, rate in plain["rates"]}
            why, bound, most = str(plain["why_no_packs"]), int(plain["bound"]), int(plain["most"])
        except (ValueError, TypeError, KeyError):
            return None
        return Found(rates, why, bound, most) if rates and all(name in EXECUTORS for name, _ in rates) else None


def _fingerprint(trials: TrialsAlike, names: Sequence[str], limit: int, is_alone: bool) -> str:
    trial, template, choices, inputs = trials.like, trials.template, trials.choices, trials.feed.first_samples(1).inputs
    return fingerprint(
        crossbow_py=__version__,
        model=(trial.model_key, _RATE.sub("p=", f"{template}")),
        parameters=[tuple(parameter.shape) for parameter in template.parameters()],
        inputs=(tuple(inputs.shape[1:]), str(inputs.dtype), trial.batch_size),
        device=str(choices.device),
        precision=choices.precision.name,
        optimizer=trial.optimizer.shared(),
        packs=(list(names), limit),
        **({} if is_alone else {"beside": "other workers"}),
    )
