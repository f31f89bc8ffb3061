"""The width of packs: how many trials of a signature train side by side, by which executor. Measured and remembered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from crossbow_py.averaging import Independent
from crossbow_py.core.measured import Remembered, fingerprint
from crossbow_py.core.trees import form_of
from crossbow_py.core.version import __version__
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors import EXECUTORS, Executor, SerialExecutor, candidates
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.fusion.fused_agreement import Comparison
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.trust import in_use
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.calibration import Calibration, Candidate, Effort, calibrate
from crossbow_py.train.tuning.executor_choice import new_bank, still_runs, why_not_fused
from crossbow_py.train.tuning.learner_tuning import learner_bound

NEARLY = 1.25  # of a pack's size
ASKED_FOR = "was asked for"
_WORTH = 1.05  # times the throughput of one at a time: what a pack has to reach, or it is not worth its memory
_CLOSE = 0.95  # of the best throughput: where packs begin to gain no more
_SLOW_START = 0.6  # of one trial's throughput is what an executor for packs has with one, where that is not measured
Rates = Mapping[tuple[str, int], float]  # images/s of all trials together, by (executor, trials)
# In the order they are measured: there may be time for the first alone, and an executor that is far behind the others
# with it is not measured with more. Twice the largest, and so on, come before the small ones, while they still gain.
_LARGE_SIZES, _SMALL_SIZES = (16, 8, 32), (4, 2)
# Parameters of a small model: 32 of them fit in a core's cache with gradients and state, and are measured first.
_SMALL_MODEL = 2**14
LARGEST_ALWAYS = max(_LARGE_SIZES)  # larger ones are measured while they gain
_RATE = re.compile(r"(?<=Dropout\()p=[^,)]*|(?<=Dropout[123]d\()p=[^,)]*")  # trials have their own
BUDGET_S = 20.0
SHARE = 0.25  # of the time of training one at a time, the most to spend on measuring: packs gain several times
_LITTLE = "which is not measured, as there is little to train"


@dataclass(frozen=True)
class CompatibleTrials:
    """Trials of one signature.

    Attributes:
        settings, choices: those of the search.
        like: the settings of one of the trials.
        template: its model, on the device.
        feed: gives training batches of its size.
        loss: what they minimise.
        shares_base: whether their frozen parameters are the same.
    """

    settings: RunSettings
    choices: Choices
    like: TrialSettings
    template: nn.Module
    feed: Feed
    loss: Loss
    shares_base: bool = True

    @property
    def compared(self) -> Comparison:
        """The comparison that comes before their models are fused; in packs they take the same batches."""
        precision, channels_last = self.choices.precision, self.settings.channels_last
        return Comparison(
            self.template, self.feed, self.loss, precision, channels_last, shared=True, shares_base=self.shares_base
        )

    def __str__(self) -> str:
        return f"{self.like.name} with batches of {self.like.batch_size}"


@dataclass(frozen=True)
class Width:
    """The size of a full pack, what was measured, and a sentence for the user."""

    size: int
    rates: Rates
    sentence: str

    def executor(self, num_trials: int) -> str:
        """Return the fastest executor for that many trials, by what was measured with fewer and with more."""
        names = dict.fromkeys(name for name, _ in self.rates)
        return max(names, key=lambda name: self._rate(name, num_trials))

    def _rate(self, name: str, num_trials: int) -> float:
        """Return images/s. The time of a round is linear in its trials; more than were measured are as fast."""
        rounds = {count: count / rate for (own, count), rate in self.rates.items() if own == name and rate}
        if not rounds:
            return 0.0  # nothing was measured: there is one executor
        alone = max((rate for (_, count), rate in self.rates.items() if count == 1), default=0.0)
        if alone:  # and a round of one takes no longer than one of more
            rounds.setdefault(1, min(1 / (_SLOW_START * alone), rounds[min(rounds)]))
        counts, num_trials = sorted(rounds), min(num_trials, max(rounds))
        return num_trials / float(np.interp(num_trials, counts, [rounds[count] for count in counts]))


def choose_width(
    rates: Rates, what: str, bound: int, why_alone: str = ASKED_FOR, is_busy: bool = False
) -> Width:  # fmt: skip
    """Return the smallest pack close to the best throughput, or one trial at a time if packs do not pay. Pure.

    `rates` has one trial at a time, by whatever executor; `what` names the trials, of which `bound` are all there can
    be. A pack that takes nearly all of them takes all, as those that were left would train alone in the end.
    `why_alone` says why there are no packs in `rates`, where that is so. Rates of a busy machine were not measured at
    the same moment, so that their ratio is not said.
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
        sentence += f", and {alone:,.0f} one at a time" + ("" if is_busy else f" ({rate / alone:.1f} times)")
    return Width(size, rates, f"{sentence}.")


def has_packs(rates: Rates) -> bool:
    """Return whether the rates have trials side by side."""
    return any(count > 1 for _, count in rates)


def asked(names: Sequence[str], bound: int, is_small: bool = False) -> list[tuple[str, int]]:
    """Return the executors and sizes to measure, the most telling first: one trial at a time, and packs.

    Trials that run apart on a CPU gain nothing from there being more of them than cores. Of small models the widest of
    the usual packs comes first.
    """
    packed = [name for name in names if name != SerialExecutor.NAME or len(names) == 1]
    packed.sort(key=lambda name: not EXECUTORS[name].FUSES)  # which pay most, and may be all that there is time for
    apart = sorted({min(size, bound) for size in (torch.get_num_threads(), 4, 8)})
    are_apart = {name: not EXECUTORS[name].FUSES and EXECUTORS[name].DEVICE != "cuda" for name in packed}
    sizes = {name: apart if are_apart[name] else _sizes(bound, is_small) for name in packed}
    packs = [
        (name, own[index]) for index in range(max(map(len, sizes.values()))) for name, own in sizes.items()
        if index < len(own)
    ]  # fmt: skip
    first = [(names[0], 1), *packs[: len(packed)]]
    order = [*first, *((name, 1) for name in names[1:]), *packs[len(packed) :]]
    return list(dict.fromkeys(order))


def _sizes(bound: int, is_small: bool) -> list[int]:
    """Return sizes of packs of up to `bound` trials: some fixed ones, and doubled ones up to nearly `bound`."""
    doubled, size = [], LARGEST_ALWAYS
    large = sorted(_LARGE_SIZES, reverse=True) if is_small else _LARGE_SIZES
    while NEARLY * size < bound:
        size *= 2
        doubled.append(size)
    return list(dict.fromkeys(min(size, bound) for size in (*large, *doubled, *_SMALL_SIZES)))


def steady(bound: int) -> int:
    """`bound` rounded down to 1, 2, 3, 4, 6, 8, 12 and so on: free memory is never quite the same."""
    power = 1 << (bound.bit_length() - 1)
    return power + power // 2 if 2 * bound >= 3 * power else power


@dataclass(frozen=True)
class Found:
    """The remembered result of measuring.

    Attributes:
        rates: the throughputs.
        why_no_packs: why they have no packs, if some were to be measured.
        bound: the trials side by side that memory was thought to hold.
        most: the most trials of a pack.
    """

    rates: Rates
    why_no_packs: str
    bound: int
    most: int

    def within(self, bound: int) -> Found | None:
        """Return the part that counts if memory holds no more than `bound` trials; None if that is nothing."""
        rates = {key: rate for key, rate in self.rates.items() if key[1] <= bound}
        return replace(self, rates=rates, most=min(self.most, bound)) if rates else None


class WidthMemory:
    """The memory of what was measured for such trials in earlier searches, long ones and those with little to train.

    Args:
        names: the executors that may run them.
        limit: the most trials side by side.
        is_alone: whether no other search takes part of the machine.
    """

    def __init__(self, trials: CompatibleTrials, names: Sequence[str], limit: int, is_alone: bool) -> None:
        key = _fingerprint(trials, names, limit, is_alone)
        self._known, self._key, self._short_key = Remembered("packs.json"), key, f"{key} short"

    def recall(self, effort: Effort, bound: int, *, beside_packs: bool) -> Found | None:
        """Return what is known of up to `bound` trials, which memory holds.

        Results of short searches serve only short ones. If packs hold memory now, the result is what memory held
        without them.
        """
        found = self._read(self._key)
        if found is None or found.bound < bound:
            found = self._read(self._short_key)
            if not found or effort.seconds(max(found.rates.values())) >= effort.budget_s or found.bound < bound:
                return None
        return found if beside_packs else found.within(bound)

    def keep(self, found: Found, *, is_short: bool) -> None:
        """Remember it for the next search."""
        rates = [[name, count, rate] for (name, count), rate in found.rates.items()]
        self._known.remember(self._short_key if is_short else self._key, json.dumps({**vars(found), "rates": rates}))

    def _read(self, key: str) -> Found | None:
        try:
            plain = json.loads(self._known.recall(key) or "{}")
            rates = {(str(name), int(count)): float(rate) for name, count, rate in plain["rates"]}
            why, bound, most = str(plain["why_no_packs"]), int(plain["bound"]), int(plain["most"])
        except (ValueError, TypeError, KeyError):
            return None
        return Found(rates, why, bound, most) if rates and all(name in EXECUTORS for name, _ in rates) else None


def _fingerprint(trials: CompatibleTrials, names: Sequence[str], limit: int, is_alone: bool) -> str:
    trial, template, choices, inputs = trials.like, trials.template, trials.choices, trials.feed.first_samples(1).inputs
    return fingerprint(
        crossbow_py=__version__,
        model=(trial.model_key, _RATE.sub("p=", f"{template}")),
        parameters=[(*own.shape, *([] if own.requires_grad else ["frozen"])) for own in template.parameters()],
        inputs=(form_of(inputs), trial.batch_size),
        device=str(choices.device),
        **({"in_use": in_use(choices.device)} if choices.device.type == "cuda" else {}),
        precision=choices.precision.name,
        optimizer=trial.optimizer.shared(),
        packs=(list(names), limit),
        **({} if is_alone else {"beside": "other workers"}),
    )


def measured_width(
    trials: CompatibleTrials, limit: int, announce: Callable[[str], None], beside_packs: bool,
    make_room: Callable[[], bool], effort: Effort,
) -> tuple[Width, list[str]]:  # fmt: skip
    """Return the width for such trials, with at most `limit` side by side, and no more than memory holds.

    Measured for a model, batch size and machine, which takes some seconds, and remembered; guessed when `effort` leaves
    no time for that. Where memory is short for measuring, `make_room` gives back what it can, and says whether there
    was any; `beside_packs` says whether packs hold some, which what is remembered need not fit beside. Also returns
    sentences for the user.
    """
    choices, what = trials.choices, f"{trials}"

    def memory_bound() -> tuple[int, list[str]]:
        bound, notes = _memory_bound(trials, limit)
        return (bound if bound >= limit else steady(bound)), notes

    def recalled() -> Width | None:
        found = memory.recall(effort, bound, beside_packs=beside_packs)
        if found is None:
            return None
        width = choose_width(found.rates, what, found.most, found.why_no_packs or why_alone)
        executor = width.executor(width.size)
        return width if still_runs(executor, trials.compared) else None

    bound, notes = memory_bound()
    why_alone = ASKED_FOR if limit == 1 else "memory holds no more"
    names = candidates(choices.device) if choices.executor == "auto" else [choices.executor]
    memory = WidthMemory(trials, names, limit, effort.is_alone)
    width = recalled()
    if width is None and bound < limit and make_room():
        beside_packs = False
        bound, notes = memory_bound()
        width = recalled()
    if width is not None:
        return width, [] if beside_packs else notes
    every = asked(names, bound, sum(own.numel() for own in trials.template.parameters()) <= _SMALL_MODEL)
    fuses = any(EXECUTORS[name].FUSES for name, _ in every)
    is_exportable = fuses and why_not_fused(trials.compared) is None
    if len(every) == 1 or effort.budget_s <= 0:
        why = f"as {why_alone}" if len(every) == 1 else _LITTLE
        return _unmeasured(every, what, is_exportable, why), notes
    announce(f"Measuring how many trials of {what} pay side by side; it takes some seconds.")
    attempts = [_candidate(*each, trials) for each in every]
    result, is_whole = _calibrated(attempts, trials.feed.batch_size, choices.device, effort, make_room, announce)
    rates = result.images_per_s
    able = [each for each in every if each[0] not in {name for name, _ in result.refused}]
    if result.is_short and not has_packs(rates) and any(each in able for each in _late_packs(result)):
        return _unmeasured(able, what, is_exportable, _LITTLE), notes
    why_no_packs, remarks = _left_out(result, what)
    most = max(count for _, count in rates) if _is_short_of_memory(result) else bound
    found = Found(dict(rates), why_no_packs, bound, most)
    width = choose_width(found.rates, what, found.most, found.why_no_packs or why_alone, result.is_busy)
    if is_whole and _is_lasting(result, width, effort):
        memory.keep(found, is_short=result.is_short)
    return width, [*notes, *remarks, *result.disturbed_notes]


def check_features(trials: CompatibleTrials) -> None:
    """Raise UserError if trials are to keep features by all means, and cannot."""
    if trials.settings.cache_features is True:
        executor, _ = _candidate(FusedExecutor.NAME, 1, trials).build()
        executor.close()


def _candidate(name: str, count: int, trials: CompatibleTrials) -> Candidate:
    def build() -> tuple[Executor, Callable[[int], Round]]:
        choices, optimizer, feed = trials.choices, trials.like.optimizer, trials.feed
        bank = new_bank(
            trials.template, count, name, trials.settings, choices, optimizer, has_corrections=False,
            shares_base=trials.shares_base,
        )  # fmt: skip
        update, _ = choose_update(optimizer, Independent(), choices.device, choices.precision.master)
        tasks = RoundTasks(
            bank, update=update, feed=feed.for_measuring(), loss=trials.loss, seed=0, collective=Collective(),
            cache_features=trials.settings.cache_features is True,
        )  # fmt: skip

        def still_round(index: int) -> Round:  # all take the same batch, at a learning rate of 0
            return Round(index, (index * feed.batch_size,) * count, (0.0,) * count, None)

        return EXECUTORS[name](tasks), still_round

    return Candidate(name, count, build, needs_gain=count > LARGEST_ALWAYS)


def _calibrated(
    candidates: Sequence[Candidate], batch_size: int, device: torch.device, effort: Effort,
    make_room: Callable[[], bool], announce: Callable[[str], None],
) -> tuple[Calibration, bool]:  # fmt: skip
    """Measure, and again what memory refused if room can be made. Also returns whether there was time for all."""
    begun = time.perf_counter()
    first = calibrate(candidates, batch_size, device, effort, announce=announce)
    if not (_is_short_of_memory(first) and make_room()):
        return first, True
    left = effort.after(time.perf_counter() - begun - first.warm_up_s)
    second = calibrate(candidates, batch_size, device, left, first.images_per_s, announce)
    return replace(second, others=max(first.others, second.others)), not second.late


def _late_packs(result: Calibration) -> list[tuple[str, int]]:
    return [each for each in result.late if each[1] > 1]


def _left_out(result: Calibration, what: str) -> tuple[str, list[str]]:
    """Return why there are no packs, and a sentence for each executor without packs if others have some."""
    reasons = result.left_out(fewest=2).items()
    if has_packs(result.images_per_s):
        return "", [f"Executor {name} runs no packs of {what}: {reason}." for name, reason in reasons]
    why = "; ".join(f"executor {name}: {reason}" for name, reason in reasons)
    return f"no packs of them could be measured ({why})" if why else "", []


def _is_short_of_memory(result: Calibration) -> bool:
    return any(refusal.is_passing for refusal in result.refused.values())


def _is_lasting(result: Calibration, width: Width, effort: Effort) -> bool:
    """Return whether the next measurement would say the same: memory may hold more then, or time suffice for packs.

    Memory that holds packs, but none so large as it was thought to, is no larger the next time, unless others had some.
    """
    measured = {name for name, count in result.images_per_s if count > 1}
    may_fit = any(each.is_passing and name not in measured for (name, _), each in result.refused.items())
    may_fit = may_fit or (_is_short_of_memory(result) and not effort.is_alone)
    may_pay = width.size == 1 and bool(_late_packs(result))
    return not (result.is_disturbed or may_fit or may_pay)


def _unmeasured(asked: Sequence[tuple[str, int]], what: str, is_exportable: bool, why: str) -> Width:
    """Return the width that is likely to pay: a middling pack, fused if that is possible."""
    packs = [each for each in asked if each[1] > 1 and (is_exportable or not EXECUTORS[each[0]].FUSES)]
    name, size = next((each for each in packs if EXECUTORS[each[0]].FUSES), [*packs, asked[0]][0])
    how = f"in packs of {size}" if size > 1 else "one at a time"
    return Width(size, {(name, size): 0.0}, f"Trials of {what} run {how} by executor {name}, {why}.")


def _memory_bound(trials: CompatibleTrials, limit: int) -> tuple[int, list[str]]:
    choices, like = trials.choices, trials.like
    executor = "fused" if choices.executor == "auto" else choices.executor
    settings = replace(trials.settings, num_learners="auto", max_learners=limit, batch_size=like.batch_size)
    few, choices = trials.feed.first_samples(min(2, like.batch_size)), replace(choices, executor=executor)
    return learner_bound(
        trials.template, few, settings, choices, trials.loss, like.optimizer, Independent(), trials.shares_base
    )
