"""The loop of one worker process: it takes segments from the shared study, packs them, trains, measures and tells.

Everything that is decided about trials follows from the study's results alone (`hyperband`), so a search may be killed
at any moment and started again, or shared by any number of workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import torch

from crossbow_py.core.errors import CrossbowError, UserError, one_line
from crossbow_py.engine.device.host import flushed_denormals
from crossbow_py.engine.device.memory import (
    forget_frames,
    free_memory,
    raising_if_lost,
)
from crossbow_py.packs.pack import PackJob
from crossbow_py.packs.policies import Policy, Waiting, admit, fair_share, few_kinds
from crossbow_py.packs.slots import Packs, Slot, verdict
from crossbow_py.packs.trial_registry import Described, TrialRegistry
from crossbow_py.search.hyperband import Bracket, Results, Segment, beaten, is_over, ready, standing, to_epochs
from crossbow_py.search.study.states import TrialStates, Underway
from crossbow_py.search.study.study import SharedStudy
from crossbow_py.train.evaluation.evaluator import Evaluation
from crossbow_py.train.run_settings import StopConditions

_TURN_S = 1.0  # between looks at leases, signals and the clock
_POLL_S = 0.5  # while others hold all that is left


@dataclass(frozen=True)
class SearchRules:
    """The rules of a search.

    Attributes:
        brackets: the trials, and how far each is trained.
        metric: what is measured on the validation data: `accuracy`, `loss`, or the name of a metric's value.
        policy: which trials are packed together.
        lookahead: new trials that are sampled before there is room for them, for policies to choose from.
        checkpoint_every_s: how often a segment in progress is saved; None saves only when a stop ends it.
        maximize: whether greater values are better.
    """

    brackets: tuple[Bracket, ...]
    metric: str
    policy: Policy
    seed: int
    lookahead: int
    checkpoint_every_s: float | None = None
    maximize: bool = True


@dataclass
class Spent:
    """The seconds that a worker spent on each activity, and the samples it trained on."""

    train_s: float = 0.0
    evaluation_s: float = 0.0
    waiting_s: float = 0.0
    tuning_s: float = 0.0
    samples: int = 0


@dataclass
class SearchHooks:
    """The functions that a search calls, in its own thread; each may be left out."""

    message: Callable[[str], None] = lambda _: None
    progress: Callable[[SearchLoop], None] = lambda _: None
    finished: Callable[[SearchLoop, Segment], None] = lambda _, __: None
    clock: Callable[[], float] = field(default=time.perf_counter)
    sleep: Callable[[float], None] = field(default=time.sleep)


@dataclass(kw_only=True)
class SegmentSlot(Slot):
    """A slot with a segment of the search."""

    segment: Segment


class SearchLoop:
    """One worker of a search. Used from one thread; close it.

    Args:
        study: the open study, shared with other workers.
        states: the checkpoints of trials between segments.
    """

    def __init__(
        self, rules: SearchRules, study: SharedStudy, registry: TrialRegistry, states: TrialStates, hooks: SearchHooks
    ) -> None:
        self.rules, self.study, self.registry, self.states, self.hooks = rules, study, registry, states, hooks
        self.device = registry.choices.device
        self.num_samples = registry.data.num_samples
        longest = max(bracket.epochs[-1] for bracket in rules.brackets)
        self._planned = epoch_samples(longest, self.num_samples)
        job = PackJob(registry.settings, registry.choices, registry.data.loss, registry.executor)
        self.packs = Packs(job, registry, hooks.message)
        registry.make_room, registry.has_packs = self._make_room, lambda: self.packs.count > 0
        self.slots: list[SegmentSlot] = []
        self._alone: set[int] = set()
        self._concluded: set[int] = set()
        self._forgotten: set[int] = set()  # whose files are removed
        self.spent = Spent()
        self.results: Results = {}
        self._admitted_at: tuple[int, tuple[Segment, ...]] = (-1, ())
        self._num_failed = 0
        self._is_stale = False  # whether packs hold members that have no slot

    # --- the loop -----------------------------------------------------------------------------------------------------

    @flushed_denormals()
    def run(self, stopped: Callable[[], bool]) -> bool:
        """Train until nothing is left, or `stopped`; then what is held is given back. Whether nothing is left.

        Segments that a stop interrupts are saved, so that whoever goes on in this folder continues them.

        Raises:
            StorageError: the storage is gone; what was finished is in it.
            DataError: the data cannot be loaded.
            DeviceLostError: the device fails whatever it is asked for.
        """
        self.registry.stopped = stopped
        try:
            while not stopped():
                self._drop_lost(self.study.renew())
                self.results = self.study.results()
                self._conclude()
                if is_over(self.rules.brackets, self.results, maximize=self.rules.maximize):
                    return True
                num_failed = self._num_failed
                self._admit()
                if stopped():  # packs were parked to make room
                    break
                if not self.slots:
                    if num_failed == self._num_failed:  # others hold all that may train
                        begun = self.hooks.clock()
                        self.hooks.sleep(_POLL_S)
                        self.spent.waiting_s += self.hooks.clock() - begun
                    continue
                self._train(stopped)
                self._settle()
                self.hooks.progress(self)
            self._keep_underway(0.0)
            return False
        finally:
            self.close()

    def close(self) -> None:
        """Give back what is held and end all packs. Does not raise what the storage says: leases end by themselves."""
        self.packs.close()
        with suppress(CrossbowError):  # once is enough: every call waits for a storage that is gone
            for slot in self.slots:
                self.study.release(slot.segment)
            self.study.leave()
        self.slots = []
        self.study.close()

    # --- who trains ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Claim what the policy wants beside what runs, and give it slots. It wants nothing if nothing has changed."""
        now = (len(self.results), tuple(slot.segment for slot in self.slots))
        if self.slots and now == self._admitted_at and not self._is_stale:
            return
        segments = ready(self.rules.brackets, self.results, maximize=self.rules.maximize)
        self.registry.is_alone = self.study.num_searchers(here=True) == 1
        waiting, running = self._waiting(segments), self._running()
        if self.registry.stopped():  # while packs were measured
            return
        chosen = admit(self.rules.policy, [each for _, each in waiting], running, seed=self.rules.seed)
        most = torch.get_num_threads() if self.device.type == "cpu" else len(running) + len(chosen)
        # Where samples are streamed, each pack would load its own.
        chosen = few_kinds(chosen, running, 1 if self.registry.data.streams else most)
        quota = fair_share(len(segments), self.study.num_searchers()) - len(running)
        wanted = {each.trial for each in chosen[: max(0, quota)]}
        claimed = self.study.claim([segment for segment, each in waiting if each.trial in wanted])
        self.slots += [self._filled_slot(segment) for segment in claimed]
        self._admitted_at = (len(self.results), tuple(slot.segment for slot in self.slots))
        if claimed or self._is_stale:
            self._is_stale = False
            self._give_up_all(self.packs.assign(self.slots))

    def _make_room(self) -> bool:
        """Park all packs, which are drained, until slots are assigned again. Returns whether there were any."""
        self._is_stale = True
        return self.packs.park()

    def _waiting(self, segments: Sequence[Segment]) -> list[tuple[Segment, Waiting]]:
        """Return those of the segments that may be claimed, as far as the policy looks ahead."""
        held = {slot.segment for slot in self.slots}
        free = self.study.free([each for each in segments if each not in held])
        found: list[tuple[Segment, Waiting]] = []
        num_new = 0
        for segment in sorted(free, key=self._is_elsewhere):
            if segment.rung == 0:
                num_new += 1
                # Where a policy takes trials in their order, one that is sampled later knows more results.
                if num_new > self.rules.lookahead:
                    break
                used = sum(each.share for each in [*self._running(), *(each for _, each in found)])
                if self.rules.policy == "signature" and used > 1 - 1e-9:
                    break
            known = self._described(segment)
            if known is not None:
                trial, sample = segment.trial, self._first_sample(segment, known)
                found.append((segment, self.registry.waiting(trial, known, trial in self._alone, sample)))
        return found

    def _is_elsewhere(self, segment: Segment) -> bool:
        """Return whether the trial's files are in another worker's folder: that worker had better go on with it."""
        return segment.rung > 0 and not self.states.has(Segment(segment.trial, segment.rung - 1))

    def _described(self, segment: Segment) -> Described | None:
        params, begun = self.study.params(segment.trial), self.hooks.clock()
        known = self.registry.of(segment.trial, params)
        self.spent.tuning_s += self.hooks.clock() - begun
        if isinstance(known, Described):
            return known
        if self.study.claim([segment]):
            self._fail(segment, known)
        return None

    def _running(self) -> list[Waiting]:
        return [
            self.registry.waiting(slot.segment.trial, slot.described, slot.alone, slot.member.samples_seen)
            for slot in self.slots
        ]

    def _first_sample(self, segment: Segment, described: Described) -> int:
        """Return the sample at which its training goes on; -1 if that is known only once it does."""
        if not segment.rung:
            return -1 if self.states.is_underway(segment) else 0
        before = Segment(segment.trial, segment.rung - 1)
        if self.states.is_underway(segment) or not self.states.has(before):
            return -1
        batch = described.settings.batch_size
        return -(-epoch_samples(to_epochs(self.rules.brackets, before), self.num_samples) // batch) * batch

    def _filled_slot(self, segment: Segment) -> SegmentSlot:
        """Return a slot with a claimed segment, ready to train from where its trial stood, or from its beginning."""
        known = self.registry.of(segment.trial, self.study.params(segment.trial))
        assert isinstance(known, Described), "what is claimed can train"
        underway = self.states.load_underway(segment)
        begun = underway.checkpoint if underway is not None else None
        if begun is None and segment.rung:
            begun = self.states.load(Segment(segment.trial, segment.rung - 1))
            if begun is None:
                self.hooks.message(f"Trial {segment.trial} is trained from its beginning: its files are not here.")
        end = epoch_samples(to_epochs(self.rules.brackets, segment), self.num_samples)
        member = known.row(segment.trial, begun, end, self._planned)
        slot = SegmentSlot(member, known, segment.trial in self._alone, kept_at=self.hooks.clock(), segment=segment)
        if underway is not None:
            member.loss_sum, member.num_losses = underway.loss_sum, underway.num_losses
            slot.seconds = underway.seconds
        return slot

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, stopped: Callable[[], bool]) -> None:
        """Train until a segment is over, or a turn has passed."""
        clock = self.hooks.clock
        begun, samples = clock(), self._samples()
        failures = self.packs.advance(lambda: clock() - begun >= _TURN_S or stopped())
        seconds = clock() - begun
        self.spent.train_s += seconds
        self.spent.samples += self._samples() - samples
        for slot in self.slots:
            slot.seconds += seconds / len(self.slots)
        self._give_up_all(failures)
        if self.rules.checkpoint_every_s is not None:
            self._keep_underway(self.rules.checkpoint_every_s)

    def _keep_underway(self, every_s: float) -> None:
        """Save the segments that train on and were last saved that long ago; their packs are drained."""
        now = self.hooks.clock()
        for slot in self.slots:
            member = slot.member
            if member.is_over or now - slot.kept_at < every_s or not slot.progress:
                continue
            checkpoint = self.packs.checkpoint(slot)
            underway = Underway(checkpoint, member.loss_sum, member.num_losses, slot.seconds)
            self.states.save_underway(slot.segment, underway)
            slot.kept_at = now

    def _samples(self) -> int:
        return sum(slot.member.samples_seen for slot in self.slots)

    def _give_up_all(self, failures: Mapping[str, Exception]) -> None:
        is_beside = len({slot.pack_key for slot in self.slots}) > 1
        for key, error in failures.items():
            self._give_up(key, error, is_beside=is_beside)

    def _give_up(self, key: str, error: Exception, *, is_beside: bool) -> None:
        """A pack failed: its trials begin their segments anew, as `verdict` says. Raises what is no trial's fault."""
        mine = [slot for slot in self.slots if slot.pack_key == key]
        what = verdict(error, len(mine), is_beside, self.device)
        self.packs.end(key)
        self.slots = [slot for slot in self.slots if slot.pack_key != key]
        cause = error.__cause__ or error
        self._admitted_at = (-1, ())  # what is given back may be admitted again
        if what == "fails":
            self._fail(mine[0].segment, one_line(cause))
        elif what == "narrower":
            self.registry.narrow(mine[0].described.signature, len(mine) // 2)
            self.hooks.message(f"Memory does not hold {len(mine)} trials side by side; {len(mine) // 2} are tried.")
        else:
            self._alone.update(slot.segment.trial for slot in mine)
        if what == "apart":
            self.hooks.message(f"A pack of {len(mine)} failed ({one_line(cause)}); its trials train one at a time now.")
        for slot in mine if what != "fails" else ():
            self.study.release(slot.segment)
        forget_frames(error)
        with raising_if_lost(self.device):
            free_memory(self.device)

    # --- measuring and telling ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        over = [slot for slot in self.slots if slot.member.is_over]
        if not over:
            return
        healthy = [slot for slot in over if slot.member.failure is None]
        begun = self.hooks.clock()
        measured = self.packs.measure(healthy)
        self.spent.evaluation_s += self.hooks.clock() - begun
        for slot, evaluation in zip(healthy, measured, strict=True):
            if isinstance(evaluation, str):
                slot.member.failure = evaluation
            elif not math.isfinite(evaluation.loss):
                slot.member.failure = "its loss on the validation data is not finite"
            elif not math.isfinite(value := self._value(evaluation)):
                slot.member.failure = f"its {self.rules.metric} on the validation data is not finite"
            else:
                self._finish(slot, evaluation, value)
        for slot in over:
            if slot.member.failure is not None:
                self._fail(slot.segment, slot.member.failure)
        self.slots = [slot for slot in self.slots if not slot.member.is_over]
        self._is_stale = True  # who is admitted next takes their rows

    def _value(self, evaluation: Evaluation) -> float:
        """Return what trials are compared by. Raises UserError if the evaluation does not have it."""
        name, metrics = self.rules.metric, evaluation.metrics
        value = {"accuracy": evaluation.accuracy, "loss": evaluation.loss, **metrics}.get(name)
        if value is None and name == "accuracy":
            raise UserError("metric=accuracy needs targets that are classes; set metric=loss.")
        if value is None:
            raise UserError(f"metric={name} is none of what the metrics give, {', '.join(metrics)}; set one of these.")
        return value

    def _finish(self, slot: SegmentSlot, evaluation: Evaluation, value: float) -> None:
        segment, member = slot.segment, slot.member
        self.states.save(segment, self.packs.checkpoint(slot))
        attrs = {
            "train_loss": member.loss_sum / member.num_losses if member.num_losses else None,
            "validation_loss": evaluation.loss if math.isfinite(evaluation.loss) else None,
            "validation_accuracy": evaluation.accuracy,
            "samples": member.samples_seen,
        }
        epochs = to_epochs(self.rules.brackets, segment)
        if self.study.finish(segment, value, epochs=epochs, seconds=slot.seconds, attrs=attrs):
            self.states.forget(segment.trial, before_rung=segment.rung)
        self.hooks.finished(self, segment)

    def _fail(self, segment: Segment, reason: str) -> None:
        self._num_failed += 1
        if self.study.fail(segment, reason):
            self.states.forget(segment.trial)
        self.hooks.message(f"Trial {segment.trial} failed: {reason.rstrip('.')}.")
        self.hooks.finished(self, segment)

    def _conclude(self) -> None:
        """Report the trials that have ended, by the results of all workers, and remove the files of beaten ones."""
        brackets, maximize = self.rules.brackets, self.rules.maximize
        standings = standing(brackets, self.results, maximize=maximize)
        for trial, where in standings.items():
            if where.state.has_ended and trial not in self._concluded:
                self._concluded.add(trial)
                self.study.conclude(trial, where.state, where.value)
        for trial in beaten(brackets, standings, maximize=maximize) - self._forgotten:
            self._forgotten.add(trial)
            self.states.forget(trial)

    def _drop_lost(self, segments: Sequence[Segment]) -> None:
        """Drop the segments that other workers have taken, as this one seemed dead."""
        if segments:
            self.slots = [slot for slot in self.slots if slot.segment not in segments]
            self._is_stale = True
            self.hooks.message(f"{len(segments)} trials were taken over by another worker.")


@cache
def epoch_samples(epochs: float, samples_per_epoch: int) -> int:
    """Return the samples after which a training run of so many epochs ends."""
    planned = StopConditions(max_epochs=epochs).planned_samples(samples_per_epoch)
    assert planned is not None, "a number of epochs is a number of samples"
    return planned
