"""How many trials of a signature train side by side, and by which executor: what was measured to be the fastest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from crossbow_py.averaging import Independent
from crossbow_py.averaging.collective import Collective
from crossbow_py.calibration import Candidate, Effort, calibrate, fingerprint
from crossbow_py.data.feed import Feed
from crossbow_py.engine.executors import EXECUTORS, Executor, SerialExecutor, candidates
from crossbow_py.engine.fusion.graph import FusionError, exported
from crossbow_py.engine.rounds import Loss, Round, RoundTasks
from crossbow_py.engine.update import choose_update
from crossbow_py.executor_choice import new_bank
from crossbow_py.learner_bound import learner_bound
from crossbow_py.packing.trial import TrialSettings
from crossbow_py.run_settings import Choices, RunSettings
from crossbow_py.user_cache import Remembered
from crossbow_py.version import __version__

_WORTH = 1.05  # times the throughput of one at a time: what a pack has to reach, or it is not worth its memory
_CLOSE = 0.95  # of the best throughput: where packs begin to gain no more
# In the order they are measured: there may be time for the first alone, and an executor that is far behind the others
# with it is not measured with more.
_FUSED_SIZES = (16, 8, 32, 4, 2)
BUDGET_S = 20.0
_RATE = re.compile(r"(?<=Dropout\()p=[^,)]*|(?<=Dropout[123]d\()p=[^,)]*")  # trials have their own
_NEARLY = 1.25  # of a pack's size
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
        if alone:
            rounds.setdefault(1, 1 / (_SLOW_START * alone))
        below = max((count for count in rounds if count <= num_trials), default=None)
        above = min((count for count in rounds if count >= num_trials), default=None)
        if above is None or above == below:
            nearest = num_trials if above == below else max(rounds)
            return nearest / rounds[nearest]
        if below is None:  # the share of them that is there
            return num_trials / rounds[above]
        share = (num_trials - below) / (above - below)
        return num_trials / (rounds[below] + share * (rounds[above] - rounds[below]))


def choose_width(rates: Rates, what: str, bound: int) -> Width:
    """The smallest pack close to the best throughput; one at a time where packs do not pay. Pure.

    `rates` has one trial at a time, by whatever executor; `what` names the trials, of which `bound` are all there can
    be. A pack that takes nearly all of them takes all, as those that were left would train alone in the end.
    """
    alone = max((rate for (_, count), rate in rates.items() if count == 1), default=None)
    fastest = max(rates.values())
    if alone is not None and fastest < _WORTH * alone:
        name = max((own for own, count in rates if count == 1), key=lambda own: rates[own, 1])
        reason = f"packing does not pay: {fastest:,.0f} images/s at best, and {alone:,.0f} one at a time"
        if all(count == 1 for _, count in rates):
            reason = f"was asked for, by executor {name}: {alone:,.0f} images/s"
        return Width(1, rates, f"Trials of {what} run one at a time, as {reason}.")
    size = min(count for (_, count), rate in rates.items() if rate >= _CLOSE * fastest)
    name = max((own for own, count in rates if count == size), key=lambda own: rates[own, size])
    rate, size = rates[name, size], bound if bound <= _NEARLY * size else size
    sentence = f"Trials of {what} run in packs of {size} by executor {name}: {rate:,.0f} images/s"
    if alone is not None:
        sentence += f", and {alone:,.0f} one at a time ({rate / alone:.1f} times)"
    return Width(size, rates, f"{sentence}.")


def measured_width(
    settings: RunSettings,
    choices: Choices,
    trial: TrialSettings,
    template: nn.Module,
    feed: Feed,
    loss: Loss,
    limit: int,
    announce: Callable[[str], None],
    effort: Effort,
) -> tuple[Width, list[str]]:
    """The width for trials like `trial`, with at most `limit` side by side, and no more than memory holds.

    Measured for a model, batch size and machine, which takes some seconds, and remembered; guessed when `effort` leaves
    no time for that. Also returns sentences for the user.
    """
    bound, notes = _memory_bound(settings, choices, trial, template, feed, loss, limit)
    what = f"{trial.name} with batches of {trial.batch_size}"
    names = candidates(choices.device) if choices.executor == "auto" else [choices.executor]
    asked = _asked(names, bound)
    known, key = Remembered("packs.json"), _fingerprint(choices, trial, template, feed, asked)
    if (found := _recalled(known, key) or _recalled_short(known, key, effort)) is not None:
        width = choose_width(found, what, bound)
        # The key says what a model consists of, not what its forward does: that may have changed since.
        if not EXECUTORS[width.executor(width.size)].FUSES or _is_exportable(template, feed, choices):
            return width, notes
    is_exportable = any(EXECUTORS[name].FUSES for name, _ in asked) and _is_exportable(template, feed, choices)
    if len(asked) == 1 or effort.budget_s <= 0:
        return _unmeasured(asked, what, is_exportable), notes
    announce(f"Measuring how many trials of {what} pay side by side; it takes some seconds.")

    def candidate(name: str, count: int) -> Candidate:
        def build() -> tuple[Executor, Callable[[int], Round]]:
            bank = new_bank(template, count, name, settings, choices, trial.optimizer)
            update, _ = choose_update(trial.optimizer, Independent(), choices.device, choices.precision.master)
            tasks = RoundTasks(
                bank, update=update, feed=feed.for_measuring(), loss=loss, seed=0, collective=Collective()
            )
            return EXECUTORS[name](tasks), lambda index: _still_round(index, count, feed.batch_size)

        return Candidate(name, count, build)

    result = calibrate([candidate(*each) for each in asked], feed.batch_size, choices.device, effort)
    rates = dict(result.images_per_s)
    if result.is_short and all(count == 1 for _, count in rates) and any(count > 1 for _, count in asked):
        return _unmeasured(asked, what, is_exportable), notes
    if not result.is_busy:
        plain = json.dumps([[name, count, rate] for (name, count), rate in rates.items()])
        known.remember(_short(key) if result.is_short else key, plain)
    return choose_width(rates, what, bound), [*notes, *(note for note in result.notes if "meanwhile" in note)]


def _unmeasured(asked: Sequence[tuple[str, int]], what: str, is_exportable: bool) -> Width:
    """What is likely to pay: a middling pack, fused where that can be."""
    packs = [each for each in asked if each[1] > 1 and (is_exportable or not EXECUTORS[each[0]].FUSES)]
    name, size = next((each for each in packs if EXECUTORS[each[0]].FUSES), [*packs, asked[0]][0])
    how = f"in packs of {size}" if size > 1 else "one at a time"
    why = "as was asked for" if len(asked) == 1 else "which is not measured, as there is little to train"
    return Width(size, {(name, size): 0.0}, f"Trials of {what} run {how} by executor {name}, {why}.")


def _is_exportable(template: nn.Module, feed: Feed, choices: Choices) -> bool:
    try:
        exported(template, feed.for_measuring().batch(0).inputs, choices.precision)
    except FusionError:
        return False
    return True


def _asked(names: Sequence[str], bound: int) -> list[tuple[str, int]]:
    """What is to be measured, what tells most first: one trial at a time, and packs where they run side by side.

    Trials that are not fused gain nothing from there being more of them than cores.
    """
    packed = [name for name in names if name != SerialExecutor.NAME or len(names) == 1]
    fused = list(dict.fromkeys(min(size, bound) for size in _FUSED_SIZES))
    apart = sorted({min(size, bound) for size in (torch.get_num_threads(), 4, 8)})
    sizes = {name: fused if EXECUTORS[name].FUSES else apart for name in packed}
    places = range(len(_FUSED_SIZES))
    packs = [(name, own[place]) for place in places for name, own in sizes.items() if place < len(own)]
    first = [(names[0], 1), *packs[: len(packed)]]
    order = [*first, *((name, 1) for name in names[1:]), *packs[len(packed) :]]
    return list(dict.fromkeys(order))


def _still_round(index: int, count: int, batch_size: int) -> Round:
    """All take one batch, at a learning rate of 0."""
    return Round(index, (index * batch_size,) * count, (0.0,) * count, None)


def _memory_bound(
    settings: RunSettings,
    choices: Choices,
    trial: TrialSettings,
    template: nn.Module,
    feed: Feed,
    loss: Loss,
    limit: int,
) -> tuple[int, list[str]]:
    executor = ("fused" if choices.executor == "auto" else choices.executor)
    asked = replace(settings, num_learners="auto", max_learners=limit, batch_size=trial.batch_size)
    few = feed.first_samples(min(2, trial.batch_size))
    return learner_bound(
        template, few, asked, replace(choices, executor=executor), loss, trial.optimizer, Independent()
    )


def _recalled(known: Remembered, key: str) -> Rates | None:
    text = known.recall(key)
    try:
        found = {(str(name), int(count)): float(rate) for name, count, rate in json.loads(text or "[]")}
    except (ValueError, TypeError):
        return None
    return found if found and all(name in EXECUTORS for name, _ in found) else None


def _recalled_short(known: Remembered, key: str, effort: Effort) -> Rates | None:
    """What a short search measured, for another one."""
    found = _recalled(known, _short(key))
    return found if found and effort.seconds(max(found.values())) < effort.budget_s else None


def _short(key: str) -> str:
    return f"{key} short"


def _fingerprint(
    choices: Choices, trial: TrialSettings, template: nn.Module, feed: Feed, asked: list[tuple[str, int]]
) -> str:
    inputs = feed.first_samples(1).inputs
    return fingerprint(
        crossbow_py=__version__,
        model=(trial.model_key, _RATE.sub("p=", f"{template}")),
        parameters=[tuple(parameter.shape) for parameter in template.parameters()],
        inputs=(tuple(inputs.shape[1:]), str(inputs.dtype), trial.batch_size),
        device=str(choices.device),
        precision=choices.precision.name,
        optimizer=trial.optimizer.shared(),
        packs=asked,
    )


__all__ = ["Rates", "Width", "choose_width", "measured_width"]
