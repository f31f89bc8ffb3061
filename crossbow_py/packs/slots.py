"""The packs of one worker: segments on their way, each on a row of the pack of its signature, or alone in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from crossbow_py.core.errors import BaseWrittenError, CrossbowError, DataError, DeviceLostError, one_line
from crossbow_py.data.feed import Feed
from crossbow_py.engine.bank.frozen_base import frozen_parameters
from crossbow_py.engine.device.memory import (
    forget_frames,
    free_memory,
    is_out_of_memory,
    raise_if_lost,
    raising_if_lost,
)
from crossbow_py.packs.pack import Pack, PackJob, TrialRow
from crossbow_py.packs.trial import Checkpoint
from crossbow_py.packs.trial_registry import Described, TrialRegistry
from crossbow_py.train.evaluation.evaluator import Evaluation, evaluate_in_memory
from crossbow_py.train.tuning.busy_cores import BusyCores, busy_cores

Failures = dict[int, Exception]  # by the position of the pack
_PAUSE_S = 1e-4  # between looks at what runs


@dataclass
class Slot:
    """A member on its way, in a pack of this worker.

    Attributes:
        kept_at: when it was last saved, or claimed.
        first_sample: the sample at which this worker began with it.
    """

    member: TrialRow
    described: Described
    alone: bool
    seconds: float = 0.0
    kept_at: float = 0.0
    first_sample: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_sample = self.member.samples_seen

    @property
    def pack_key(self) -> str:
        """The key of its pack: that of its signature, or one of its own."""
        signature = self.described.signature
        return f"{signature} {self.member.trial}" if self.alone else signature

    @property
    def progress(self) -> float:
        """The share of the segment that is over, 0 to 1."""
        begun = self.first_sample
        return min(1.0, (self.member.samples_seen - begun) / max(1, self.member.end_samples - begun))


class Packs:
    """The packs of a worker: assigns slots to them, trains and measures. Used from one thread; close it.

    Args:
        message: takes sentences for the user.
    """

    def __init__(self, job: PackJob, registry: TrialRegistry, message: Callable[[str], None]) -> None:
        self._job, self._registry, self._message = job, registry, message
        self._device = job.choices.device
        self._packs: dict[str, Pack] = {}
        self._watch: tuple[str, BusyCores | None] = "", None  # of the executor of a pack that trains alone
        self._train_s = 0.0

    @property
    def count(self) -> int:
        """The number of packs."""
        return len(self._packs)

    def num_rows(self, key: str) -> int:
        """Return the number of rows of a pack; 0 if there is none."""
        return len(self._packs[key].members) if key in self._packs else 0

    def number_of(self, slot: Slot) -> int:
        """Return the number of the pack that a slot is in, from 0."""
        return list(self._packs).index(slot.pack_key) if slot.pack_key in self._packs else 0

    def assign(self, slots: Sequence[Slot]) -> dict[str, Exception]:
        """Build the packs of these slots; slots that go on keep their rows. Returns why packs failed, by key.

        A pack that failed is closed, and holds no memory while the next one is built.
        """
        groups: dict[str, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(slot.pack_key, []).append(slot)
        for key in [key for key in self._packs if key not in groups]:
            self.end(key)
        failures: dict[str, Exception] = {}
        for key, group in groups.items():
            members, signature = [slot.member for slot in group], group[0].described.signature
            try:
                if key in self._packs:
                    self._packs[key].assign(members)
                    continue
                self._packs[key] = Pack(  # no local name: the feed of one that fails would live on beside the next
                    self._job, signature, self._registry.template(signature),
                    self._registry.data.feed_of(members[0].settings.batch_size), members,
                    self._registry.num_outputs(signature), self._registry.shares_base(signature),
                )  # fmt: skip
                if warning := self._packs[key].warning:
                    self._message(warning)
            except (CrossbowError, RuntimeError, MemoryError) as error:
                failures[key] = error
            if key in failures:
                self.end(key)
                if is_out_of_memory(failures[key]):
                    forget_frames(failures[key])
                    free_memory(self._device)
        return failures

    def advance(self, is_enough: Callable[[], bool]) -> dict[str, Exception]:
        """Train all packs until a segment is over, or it is enough. Returns why packs failed, by key."""
        packs = list(self._packs.items())
        if len(packs) == 1 and packs[0][1].executor != self._watch[0]:
            self._end_watch()
            self._watch = packs[0][1].executor, busy_cores(packs[0][1].executor, self._device.type)
        elif len(packs) > 1:
            self._end_watch()
        begun = time.perf_counter()
        failures = advance([pack for _, pack in packs], is_enough, partial(self._look, begun), device=self._device)
        self._train_s += time.perf_counter() - begun
        for _, pack in packs:
            for note in pack.notes:
                self._message(note)
            pack.notes.clear()
        return {packs[number][0]: error for number, error in failures.items()}

    def _look(self, begun: float, pack: Pack) -> None:
        """Have threads sleep while they wait, if other programs have taken cores, after a round of the only pack."""
        watch = self._watch[1]
        if watch is not None:
            images = sum(member.settings.batch_size for member in pack.members)
            said = watch.after_round(images, len(pack.members), self._train_s + time.perf_counter() - begun)
            if said:
                self._message(said)

    def _end_watch(self) -> None:
        if self._watch[1] is not None:
            self._watch[1].stop()
        self._watch = "", None

    def park(self) -> bool:
        """Save all trials on the host, and close the packs, which are drained, for what needs their memory.

        `assign` continues them from there. Returns whether there were any packs. Raises as `checkpoint` does.
        """
        is_any = bool(self._packs)
        for pack in self._packs.values():
            for member in pack.members:
                member.begun = self._checkpoint(pack, member)
        self.close()
        with raising_if_lost(self._device):
            free_memory(self._device)
        return is_any

    def measure(self, slots: Sequence[Slot], data: Feed | None = None) -> list[Evaluation | str]:
        """Measure each slot's trial on `data`, by default the validation data.

        The result is a sentence if its model cannot be evaluated.

        If memory does not hold the evaluation beside the packs, these are parked.

        Raises:
            DataError: the data cannot be loaded.
            DeviceLostError: the device does nothing any more.
        """
        data = data or self._registry.data.validation
        found: dict[int, Evaluation | str | None] = {}
        for key, pack in self._packs.items():
            mine = [slot for slot in slots if slot.pack_key == key]
            found |= zip(map(id, mine), self._measured(pack, mine, data), strict=True)
        if any(each is None for each in found.values()):
            self._message("Memory does not hold the evaluation of trials beside packs; they are closed meanwhile.")
            self.park()
        return [found[id(slot)] or self._measured_alone(slot, data) for slot in slots]

    def _measured(self, pack: Pack, slots: Sequence[Slot], data: Feed) -> list[Evaluation | str | None]:
        """Measure the slots of one pack, one by one if together they fail. None means that memory is short."""
        if not slots:
            return []
        members = [slot.member for slot in slots]
        try:
            evaluator = self._registry.evaluator(pack.template)
            return list(pack.evaluate(members, evaluator, data))
        except Exception as error:  # of the user's model
            raise_if_lost(error, self._device)
            if isinstance(error, DataError):
                raise
            if len(slots) == 1:
                return [None if is_out_of_memory(error) else _failed(error)]
        return [found for slot in slots for found in self._measured(pack, [slot], data)]

    def _measured_alone(self, slot: Slot, data: Feed) -> Evaluation | str:
        template = self._registry.template(slot.described.signature)
        state, device = self.checkpoint(slot).state, self._device
        if slot.described.padding is not None:
            state = slot.described.padding.pad_state(state)
        try:
            with raising_if_lost(device):
                return evaluate_in_memory(self._registry.evaluator(template), state, data, device)
        except (DataError, DeviceLostError):
            raise
        except Exception as error:  # of the user's model
            return _failed(error)

    def state(self, slot: Slot, whole: bool = True) -> dict[str, Tensor]:
        """Return a slot's weights and buffers by name, a copy, see `Pack.state`; raises as `checkpoint` does."""
        with raising_if_lost(self._device):
            if slot.pack_key in self._packs:
                return self._packs[slot.pack_key].state(slot.member, whole)
        frozen = frozen_parameters(self._registry.template(slot.described.signature)) if whole else {}
        return {**{name: own.detach().cpu() for name, own in frozen.items()}, **self.checkpoint(slot).state}

    def restore(self, slot: Slot, state: Mapping[str, Tensor]) -> None:
        """Give a slot's trial the weights and buffers of `state`."""
        with raising_if_lost(self._device):
            if slot.pack_key in self._packs:
                self._packs[slot.pack_key].restore(slot.member, state)
                return
        slot.member.begun = self.checkpoint(slot).with_state(state)

    def checkpoint(self, slot: Slot) -> Checkpoint:
        """Return where a slot's trial stands. Raises DeviceLostError if the device does not answer any more."""
        if slot.pack_key in self._packs:
            return self._checkpoint(self._packs[slot.pack_key], slot.member)
        assert slot.member.begun is not None, "it is parked"
        return slot.member.begun

    def _checkpoint(self, pack: Pack, member: TrialRow) -> Checkpoint:
        with raising_if_lost(self._device):
            return pack.checkpoint(member)

    def end(self, key: str) -> None:
        """Close a pack, if it is there. Does not raise."""
        if key in self._packs:
            self._packs.pop(key).close()

    def close(self) -> None:
        """Close all. Does not raise."""
        self._end_watch()
        for key in list(self._packs):
            self.end(key)


def _failed(error: Exception) -> str:
    return f"its evaluation failed: {one_line(error)}"


Verdict = Literal["apart", "fails", "narrower", "alone"]


def verdict(error: Exception, num_trials: int, is_beside: bool, device: torch.device) -> Verdict:
    """Return what becomes of the trials of a pack that failed, which begin again from where they were.

    They train again, fewer of them where memory was short (`narrower`), else each alone (`apart`). A trial that fails
    alone has failed (`fails`); for want of memory only where no other pack could hold any, else it waits (`alone`).
    Raises what is no trial's fault.
    """
    raise_if_lost(error, device)
    if isinstance(error, DataError | BaseWrittenError):  # others may be over that base
        raise error
    if not isinstance(error, CrossbowError | RuntimeError | MemoryError):
        raise error
    is_short = is_out_of_memory(error.__cause__ or error)
    if num_trials == 1:
        return "alone" if is_beside and is_short else "fails"
    return "narrower" if is_short else "apart"


def advance(
    packs: Sequence[Pack], is_enough: Callable[[], bool], after: Callable[[Pack], None] = lambda _: None,
    *, device: torch.device,
) -> Failures:  # fmt: skip
    """Train all packs until a segment of any of them is over, or it is enough; afterwards all are drained.

    Operators that a pack's thread runs itself take a share of a CPU's cores. Executors with threads of their own keep
    as many as they have alone, and the system shares out the cores: they would otherwise have to be made anew whenever
    a pack comes or goes.

    Every pack goes at its own pace: on a CPU in a thread of its own, on CUDA, where rounds are only enqueued, in turn
    with those that are through with theirs. What raises ends its own pack's rounds and is returned. `after` is called
    after each round where a single pack trains.
    """
    if len(packs) == 1 or device.type == "cuda":
        return _in_turn(packs, is_enough, after)
    stop = threading.Event()
    share = max(1, torch.get_num_threads() // len(packs))
    with ThreadPoolExecutor(len(packs), "crossbow pack", lambda: torch.set_num_threads(share)) as pool:
        found = pool.map(lambda pack: _alone(pack, is_enough, stop), packs)
        return {number: error for number, error in enumerate(found) if error is not None}


def _alone(pack: Pack, is_enough: Callable[[], bool], stop: threading.Event) -> Exception | None:
    try:
        while not stop.is_set() and not is_enough() and pack.step():
            pass
        stop.set()
        pack.drain()
    except Exception as error:
        stop.set()
        return error
    return None


def _in_turn(packs: Sequence[Pack], is_enough: Callable[[], bool], after: Callable[[Pack], None]) -> Failures:
    """A round for every pack that has none to wait for, again and again: a slow pack holds up no fast one."""
    failures: Failures = {}
    goes_on = True
    while goes_on and not is_enough():
        is_idle = True
        for number, pack in enumerate(packs):
            try:
                if len(packs) == 1 or pack.is_ready():
                    goes_on, is_idle = pack.step() and goes_on, False
                    if goes_on and len(packs) == 1:
                        after(pack)
            except Exception as error:
                failures[number] = error
                goes_on = False
                break  # the others are tried again when what it held is given back
        if goes_on and is_idle:
            time.sleep(_PAUSE_S)  # every pack has a round behind the one it waits for: no device runs dry
    for number, pack in enumerate(packs):
        if number not in failures:
            try:
                pack.drain()
            except Exception as error:
                failures[number] = error
    return failures
