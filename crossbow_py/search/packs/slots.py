"""The packs of one worker: segments on their way, each on a row of the pack of its signature, or alone in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import nn

from crossbow_py.core.errors import CrossbowError, DataError, DeviceLostError, one_line
from crossbow_py.engine.device.memory import (
    forget_frames,
    free_memory,
    is_out_of_memory,
    raise_if_lost,
    raising_if_lost,
)
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.search.hyperband import Segment
from crossbow_py.search.packs.pack import Member, Pack, PackJob
from crossbow_py.search.packs.trial import Checkpoint
from crossbow_py.search.packs.trial_registry import Described, Roster
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, evaluate_in_memory, evaluation_batch_size
from crossbow_py.train.run_settings import Choices

Failures = dict[int, Exception]  # by place of the pack
_PAUSE_S = 1e-4  # between looks at what runs


@dataclass
class Place:
    """A segment on its way, in a pack of this worker.

    Attributes:
        kept_at: when it was last kept on its way, or claimed.
        first_sample: where this worker began with it.
    """

    segment: Segment
    member: Member
    described: Described
    alone: bool
    seconds: float = 0.0
    kept_at: float = 0.0
    first_sample: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_sample = self.member.samples_seen

    @property
    def pack_key(self) -> str:
        """Which pack it is in: that of its signature, or one of its own."""
        signature = self.described.signature
        return f"{signature} {self.segment.trial}" if self.alone else signature

    @property
    def progress(self) -> float:
        """How much of the segment is over, 0 to 1."""
        begun = self.first_sample
        return min(1.0, (self.member.samples_seen - begun) / max(1, self.member.end_samples - begun))


class Packs:
    """Seats places, trains and measures them. Used from one thread; close it.

    Args:
        job: what all packs share.
        roster: what is known of trials.
        choices, loss: of all trials.
        message: is told what users should know.
    """

    def __init__(
        self, job: PackJob, roster: Roster, choices: Choices, loss: Loss, message: Callable[[str], None]
    ) -> None:
        self._job, self._roster, self._choices, self._loss, self._message = job, roster, choices, loss, message
        self._packs: dict[str, Pack] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._packs)

    def number_of(self, place: Place) -> int:
        """Which of the packs a place is in, from 0."""
        return list(self._packs).index(place.pack_key) if place.pack_key in self._packs else 0

    def seat(self, places: Sequence[Place]) -> dict[str, Exception]:
        """Have packs of these places from now on; those that go on keep their rows. Why packs failed, by key.

        What failed is closed, and holds no memory while the next is seated.
        """
        groups: dict[str, list[Place]] = {}
        for place in places:
            groups.setdefault(place.pack_key, []).append(place)
        for key in [key for key in self._packs if key not in groups]:
            self.end(key)
        failures: dict[str, Exception] = {}
        for key, group in groups.items():
            try:
                self._seat(key, group)
            except (CrossbowError, RuntimeError, MemoryError) as error:
                failures[key] = error
            if key in failures:
                self.end(key)
                self._let_go(failures[key])
        return failures

    def _let_go(self, error: Exception) -> None:
        """Of memory that was short."""
        if is_out_of_memory(error):
            forget_frames(error)
            free_memory(self._choices.device)

    def _seat(self, key: str, places: Sequence[Place]) -> None:
        members, signature = [place.member for place in places], places[0].described.signature
        if key in self._packs:
            self._packs[key].seat(members)
            return
        feed = self._roster.data.feed_of(members[0].settings.batch_size)
        self._packs[key] = Pack(self._job, signature, self._roster.template(signature), feed, members)
        if warning := self._packs[key].warning:
            self._message(warning)

    def advance(self, is_enough: Callable[[], bool]) -> dict[str, Exception]:
        """Train all packs until a segment is over, or it is enough. Returns why packs failed, by key."""
        packs = list(self._packs.items())
        failures = advance([pack for _, pack in packs], is_enough, device=self._choices.device)
        for _, pack in packs:
            for note in pack.notes:
                self._message(note)
            pack.notes.clear()
        return {packs[number][0]: error for number, error in failures.items()}

    def park(self) -> bool:
        """Keep where all trials stand on the host, and close the packs, drained, for what needs their memory.

        `seat` has them go on from there. Whether there were any. Raises as `checkpoint` does.
        """
        is_any = bool(self._packs)
        for pack in self._packs.values():
            for member in pack.members:
                member.begun = self._checkpoint(pack, member)
        self.close()
        with raising_if_lost(self._choices.device):
            free_memory(self._choices.device)
        return is_any

    def measure(self, places: Sequence[Place]) -> list[Evaluation | str]:
        """Of each on the validation data; a sentence for one whose model cannot be evaluated.

        Where memory does not hold it beside packs they are parked.

        Raises:
            DataError: the data cannot be loaded.
            DeviceLostError: the device does nothing any more.
        """
        found: dict[int, Evaluation | str | None] = {}
        for key, pack in self._packs.items():
            mine = [place for place in places if place.pack_key == key]
            found |= zip(map(id, mine), self._measured(pack, mine), strict=True)
        if any(each is None for each in found.values()):
            self._message("Memory does not hold the evaluation of trials beside packs; they are closed meanwhile.")
            self.park()
        return [found[id(place)] or self._measured_alone(place) for place in places]

    def _measured(self, pack: Pack, places: Sequence[Place]) -> list[Evaluation | str | None]:
        """Of one pack; where that fails each is evaluated alone, to find out which it was. None: memory is short."""
        if not places:
            return []
        members, data = [place.member for place in places], self._roster.data.validation
        try:
            return list(pack.evaluate(members, self._evaluator(pack.template), data))
        except Exception as error:  # of the user's model
            raise_if_lost(error, self._choices.device)
            if isinstance(error, DataError):
                raise
            if len(places) == 1:
                return [None if is_out_of_memory(error) else _failed(error)]
        return [found for place in places for found in self._measured(pack, [place])]

    def _measured_alone(self, place: Place) -> Evaluation | str:
        """Of one that is parked; with as many samples at once as memory holds."""
        template, data = self._roster.template(place.described.signature), self._roster.data.validation
        state, device = self.checkpoint(place).state, self._choices.device
        try:
            with raising_if_lost(device):
                return evaluate_in_memory(self._evaluator(template), state, data, device)
        except (DataError, DeviceLostError):
            raise
        except Exception as error:  # of the user's model
            return _failed(error)

    def _evaluator(self, template: nn.Module) -> Evaluator:
        few = self._roster.data.validation.first_samples(1)
        return Evaluator(
            template, precision=self._choices.precision, loss=self._loss, metrics={},
            batch_size=evaluation_batch_size(few.inputs.numel()), channels_last=self._job.settings.channels_last,
        )  # fmt: skip

    def checkpoint(self, place: Place) -> Checkpoint:
        """Where a place's trial stands. Raises DeviceLostError when the device does not say any more."""
        if place.pack_key in self._packs:
            return self._checkpoint(self._packs[place.pack_key], place.member)
        assert place.member.begun is not None, "it is parked"
        return place.member.begun

    def _checkpoint(self, pack: Pack, member: Member) -> Checkpoint:
        with raising_if_lost(self._choices.device):
            return pack.checkpoint(member)

    def end(self, key: str) -> None:
        """Close a pack, if it is there. Does not raise."""
        if key in self._packs:
            self._packs.pop(key).close()

    def close(self) -> None:
        """Close all. Does not raise."""
        for key in list(self._packs):
            self.end(key)


def _failed(error: Exception) -> str:
    return f"its evaluation failed: {one_line(error)}"


def advance(packs: Sequence[Pack], is_enough: Callable[[], bool], *, device: torch.device) -> Failures:
    """Train all packs until a segment of any of them is over, or it is enough; afterwards all are drained.

    Operators that a pack's thread runs itself take a share of a CPU's cores. Executors with threads of their own keep
    as many as they have alone, and the system shares out the cores: they would otherwise have to be made anew whenever
    a pack comes or goes.

    Every pack goes at its own pace: on a CPU in a thread of its own, on CUDA, where rounds are only enqueued, in turn
    with those that are through with theirs. What raises ends its own pack's rounds and is returned.
    """
    if len(packs) == 1 or device.type == "cuda":
        return _in_turn(packs, is_enough)
    stop = threading.Event()
    share = max(1, torch.get_num_threads() // len(packs))
    with ThreadPoolExecutor(len(packs), "crossbow pack", lambda: torch.set_num_threads(share)) as pool:
        found = pool.map(lambda pack: _alone(pack, is_enough, stop), packs)
        return {place: error for place, error in enumerate(found) if error is not None}


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


def _in_turn(packs: Sequence[Pack], is_enough: Callable[[], bool]) -> Failures:
    """A round for every pack that has none to wait for, again and again: a slow pack holds up no fast one."""
    failures: Failures = {}
    goes_on = True
    while goes_on and not is_enough():
        is_idle = True
        for place, pack in enumerate(packs):
            try:
                if len(packs) == 1 or pack.is_ready():
                    goes_on, is_idle = pack.step() and goes_on, False
            except Exception as error:
                failures[place] = error
                goes_on = False
                break  # the others are tried again when what it held is given back
        if goes_on and is_idle:
            time.sleep(_PAUSE_S)  # every pack has a round behind the one it waits for: no device runs dry
    for place, pack in enumerate(packs):
        if place not in failures:
            try:
                pack.drain()
            except Exception as error:
                failures[place] = error
    return failures
