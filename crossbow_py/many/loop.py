"""The loop of `train_many`: members wait for a row of a pack, train, are measured, and leave when they end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.data.feed import Feed
from crossbow_py.engine.device.host import flushed_denormals
from crossbow_py.engine.device.memory import forget_frames, free_memory, raising_if_lost
from crossbow_py.many.members import Settled
from crossbow_py.many.results import MemberResult, Status
from crossbow_py.many.store import Store, Underway
from crossbow_py.packs.pack import PackJob, TrialRow
from crossbow_py.packs.policies import Waiting, admit, few_kinds
from crossbow_py.packs.slots import Packs, Slot, verdict
from crossbow_py.packs.trial_registry import TrialRegistry
from crossbow_py.train.evaluation.evaluator import Evaluation

_TURN_S = 1.0  # between looks at signals and the clock
_IDLE_SHARE = 0.25  # of a pack's rows may train on for nobody before the pack is built anew with fewer rows


@dataclass(frozen=True)
class Plan:
    """How members end and what is measured.

    Attributes:
        evaluations_per_epoch: on the way, where there are validation samples or stops.
        patience: evaluations in a row that were not the best before a member stops; None for no such stop.
        restore_best: whether members return the weights of their best evaluation.
        metric: what the best has: `accuracy`, `loss`, or the name of a metric.
        maximize: whether greater values are better.
        max_rounds: rounds after which a member ends at the latest.
        checkpoint_every_s: how often members on their way are saved, where there is a folder; None is never.
    """

    evaluations_per_epoch: int
    patience: int | None
    restore_best: bool
    metric: str
    maximize: bool
    checkpoint_every_s: float | None
    max_rounds: int | None = None

    def value(self, evaluation: Evaluation) -> float | None:
        """Return what evaluations are compared by."""
        return {"accuracy": evaluation.accuracy, "loss": evaluation.loss, **evaluation.metrics}.get(self.metric)


@dataclass(eq=False)
class Progress:
    """A member on its way.

    Attributes:
        member: it.
        slot: its place in the packs.
        so_far: what was measured.
    """

    member: Settled
    slot: Slot
    so_far: Underway

    @property
    def row(self) -> TrialRow:
        """Its row."""
        return self.slot.member


@dataclass
class Hooks:
    """The functions that the loop calls; each may be left out."""

    message: Callable[[str], None] = lambda _: None
    progress: Callable[[ManyLoop], None] = lambda _: None
    clock: Callable[[], float] = field(default=time.perf_counter)


class ManyLoop:
    """Trains members in packs; those that wait take rows as they come free. Used from one thread.

    Args:
        members: all of them.
        registry: describes them by their numbers.
        plan: how they end.
        validation: returns the feed that a member is measured on while it trains; None for none.
        test: the feed that each is measured on at its end; None for none.
        store: what is known of them from before, and where it is kept.

    Attributes:
        results: of those that have ended.
        running: those on their way.
        train_s, evaluation_s: seconds spent.
        samples: samples trained on.
    """

    def __init__(
        self, members: Sequence[Settled], registry: TrialRegistry, plan: Plan,
        validation: Callable[[Settled], Feed | None], test: Feed | None, store: Store, hooks: Hooks,
    ) -> None:  # fmt: skip
        self.members, self.registry, self.plan, self.store, self.hooks = members, registry, plan, store, hooks
        self._validation, self._test = validation, test
        self.device = registry.choices.device
        job = PackJob(registry.settings, registry.choices, registry.data.loss, registry.executor)
        self.packs = Packs(job, registry, hooks.message)
        registry.make_room, registry.has_packs = self._make_room, lambda: self.packs.count > 0
        self.results: dict[int, MemberResult] = {}
        self.running: list[Progress] = []
        self._idle: list[Slot] = []  # of members that have ended, whose rows nobody has taken
        self._waiting: deque[int] = deque()
        self._alone: set[int] = set()
        self._is_stale = False
        self.train_s = self.evaluation_s = 0.0
        self.samples = 0

    @flushed_denormals()
    def run(self, stopped: Callable[[], bool]) -> None:
        """Train until all have ended, or `stopped`; then those on their way are saved.

        Raises:
            DataError: the data cannot be loaded.
            DeviceLostError: the device does nothing any more.
            UserError: the first member cannot train, or the disk refuses what is saved.
        """
        self.registry.stopped = stopped
        for member in self.members:
            known = self.store.load(member)
            if known is not None:
                self.results[member.number] = known
        if len(self.results) < len(self.members):
            self._waiting.extend(number for number in self._widest_first() if number not in self.results)
        try:
            while (self._waiting or self.running) and not stopped():
                self._admit()
                if self.running:
                    self._train(stopped)
                    self._settle()
                self.hooks.progress(self)
            self._keep(0.0)
            for each in self.running:
                self._end(each, "not finished", test=None)
        finally:
            self.packs.close()

    def _widest_first(self) -> list[int]:
        """Return the members' numbers, those of larger models first, in whose packs the others may train.

        One of each model is described, also of those that have ended, so that a resumed call has the same packs.
        """
        firsts = {each.settings.model_key: each for each in reversed(self.members)}
        if len(firsts) == 1:
            return [each.number for each in self.members]
        sizes = {key: self._size(each) for key, each in firsts.items()}
        order = sorted(self.members, key=lambda each: -sizes[each.settings.model_key])
        for each in order:
            if firsts[each.settings.model_key] is each:
                self.registry.of(each.number, {})
        return [each.number for each in order]

    def _size(self, member: Settled) -> int:
        """Return the parameters of its model; 0 of one that fails, as its description will say."""
        try:
            return sum(own.numel() for own in member.settings.new_model().parameters())
        except Exception:  # of the user's model
            return 0

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting members rows, as many as fit."""
        running = [
            self.registry.waiting(each.member.number, each.slot.described, each.slot.alone, each.row.samples_seen)
            for each in self.running
        ]
        described: dict[int, Waiting] = {}
        for number in list(self._waiting):
            if sum(each.share for each in running) + sum(each.share for each in described.values()) > 1 - 1e-9:
                break
            known = self.registry.of(number, {})
            if isinstance(known, str):
                if not self.results and not self.running:  # the first one: it is no member's own mistake
                    raise UserError(f"member {self.members[number].name}: {known}")
                self._waiting.remove(number)
                self._fail(self.members[number], known)
                continue
            described[number] = self.registry.waiting(number, known, number in self._alone, 0)
        chosen = admit("signature", list(described.values()), running, seed=0)
        most = torch.get_num_threads() if self.device.type == "cpu" else len(running) + len(chosen)
        taken = [each.trial for each in few_kinds(chosen, running, most)]
        for number in taken:
            self._waiting.remove(number)
            self.running.append(self._begun(self.members[number]))
        if taken or self._is_stale:
            self._is_stale = False
            self._assign()

    def _begun(self, member: Settled) -> Progress:
        described = self.registry.of(member.number, {})
        assert not isinstance(described, str), "it can train"
        before = self.store.load_underway(member) or Underway()
        planned = self._samples_of(member, member.max_epochs)
        if self.plan.max_rounds is not None:
            planned = min(planned, self.plan.max_rounds * described.settings.batch_size)
        row = described.row(member.number, before.checkpoint, 0, planned)
        row.loss_sum, row.num_losses = before.loss_sum, before.num_losses
        row.end_samples = self._next_end(member, row)
        slot = Slot(row, described, member.number in self._alone, before.seconds, self.hooks.clock())
        return Progress(member, slot, before)

    def _assign(self) -> None:
        """Have packs hold the members that run. Idle rows stay where a pack would have nearly as many rows."""
        keys = [each.slot.pack_key for each in self.running]
        self._idle = [slot for slot in self._idle if slot.pack_key in keys]
        for key in dict.fromkeys(keys):
            mine = [slot for slot in self._idle if slot.pack_key == key]
            rows, joining = self.packs.num_rows(key), keys.count(key)
            kept = mine[: max(0, rows - joining)] if rows - joining <= _IDLE_SHARE * rows else []
            self._idle = [slot for slot in self._idle if slot not in mine or slot in kept]
        self._give_up_all(self.packs.assign([*(each.slot for each in self.running), *self._idle]))

    def _make_room(self) -> bool:
        """Park all packs, which are drained, until slots are assigned again. Returns whether there were any."""
        self._is_stale = True
        self._idle = []
        return self.packs.park()

    def _samples_of(self, member: Settled, epochs: float) -> int:
        return max(1, round(epochs * member.num_samples(self.registry.data.num_samples)))

    def _next_end(self, member: Settled, row: TrialRow) -> int:
        """Return the sample at which the member is measured next."""
        if self._validation(member) is None:
            return row.planned_samples
        each = member.num_samples(self.registry.data.num_samples) / self.plan.evaluations_per_epoch
        return min(row.planned_samples, math.ceil((math.floor(row.samples_seen / each + 1e-9) + 1) * each - 1e-6))

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, stopped: Callable[[], bool]) -> None:
        """Train until a member is to be measured, or a turn has passed."""
        clock = self.hooks.clock
        begun, before = clock(), sum(each.row.samples_seen for each in self.running)
        failures = self.packs.advance(lambda: clock() - begun >= _TURN_S or stopped())
        seconds = clock() - begun
        self.train_s += seconds
        self.samples += sum(each.row.samples_seen for each in self.running) - before
        for each in self.running:
            each.slot.seconds += seconds / len(self.running)
        self._give_up_all(failures)
        if self.plan.checkpoint_every_s is not None:
            self._keep(self.plan.checkpoint_every_s)

    def _keep(self, every_s: float) -> None:
        """Save members on their way that were last saved that long ago; packs are drained."""
        now = self.hooks.clock()
        for each in self.running:
            # What has come to its evaluation is saved after that: whoever goes on from there would not measure it.
            if not each.row.is_over and now - each.slot.kept_at >= every_s:
                self.store.save_underway(each.member, each.so_far.at(self.packs.checkpoint(each.slot), each.slot))
                each.slot.kept_at = now

    def _give_up_all(self, failures: Mapping[str, Exception]) -> None:
        is_beside = len({each.slot.pack_key for each in self.running}) > 1
        for key, error in failures.items():
            self._give_up(key, error, is_beside)

    def _give_up(self, key: str, error: Exception, is_beside: bool) -> None:
        """A pack failed: its members begin again from where they were saved, as `verdict` says."""
        mine = [each for each in self.running if each.slot.pack_key == key]
        num_rows = max(len(mine), self.packs.num_rows(key))  # with idle ones
        what = verdict(error, num_rows, is_beside, self.device)
        self.packs.end(key)
        self.running = [each for each in self.running if each not in mine]
        self._idle = [slot for slot in self._idle if slot.pack_key != key]
        cause = error.__cause__ or error
        if what == "fails":
            self._fail(mine[0].member, one_line(cause))
        else:
            self._waiting.extendleft(each.member.number for each in reversed(mine))
        if what == "narrower":
            self.registry.narrow(mine[0].slot.described.signature, num_rows // 2)
            self.hooks.message(f"Memory does not hold {num_rows} members side by side; {num_rows // 2} are tried.")
        elif what != "fails":
            self._alone.update(each.member.number for each in mine)
        if what == "apart":
            self.hooks.message(f"A pack of {len(mine)} failed ({one_line(cause)}); its members train one by one now.")
        forget_frames(error)
        with raising_if_lost(self.device):
            free_memory(self.device)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Measure the members that have come to an evaluation, and end those whose time it is."""
        over = [each for each in self.running if each.row.is_over]
        if not over:
            return
        begun = self.hooks.clock()
        self._measure_on_the_way([each for each in over if each.row.failure is None])
        ended: list[tuple[Progress, Status]] = []
        for each in over:
            if each.row.failure is not None:
                self._fail(each.member, each.row.failure, each.so_far)
                self._leave(each)
            elif each.row.samples_seen >= each.row.planned_samples:
                ended.append((each, "finished"))
            elif self.plan.patience is not None and each.so_far.num_stale >= self.plan.patience:
                ended.append((each, "stopped early"))
            else:
                each.row.end_samples = self._next_end(each.member, each.row)
        self._finish(ended)
        self.evaluation_s += self.hooks.clock() - begun

    def _measure_on_the_way(self, reached: Sequence[Progress]) -> None:
        feeds = {id(each): self._validation(each.member) for each in reached}
        found: dict[int, Evaluation | str] = {}
        for feed in dict.fromkeys(feed for feed in feeds.values() if feed is not None):
            mine = [each for each in reached if feeds[id(each)] is feed]
            measured = self.packs.measure([each.slot for each in mine], feed)
            found |= zip(map(id, mine), measured, strict=True)
        for each in reached:
            evaluation = found.get(id(each))
            if isinstance(evaluation, str):
                each.row.failure = evaluation
            elif evaluation is not None and not math.isfinite(evaluation.loss):
                each.row.failure = "its loss on the validation data is not finite"
            else:
                self._record(each, evaluation)

    def _record(self, each: Progress, evaluation: Evaluation | None) -> None:
        row, so_far = each.row, each.so_far
        epoch = row.samples_seen / each.member.num_samples(self.registry.data.num_samples)
        entry = {"epoch": epoch, "samples": row.samples_seen}
        if row.num_losses:
            entry["train_loss"] = row.loss_sum / row.num_losses
        row.loss_sum, row.num_losses = 0.0, 0
        if evaluation is not None:
            entry |= named("validation", evaluation)
        so_far.history.append(entry)
        value = None if evaluation is None else self.plan.value(evaluation)
        if value is None:
            return
        before = so_far.best_value
        is_better = before is None or (value > before if self.plan.maximize else value < before)
        so_far.num_stale = 0 if is_better else so_far.num_stale + 1
        if is_better:
            so_far.best_value, so_far.best = value, len(so_far.history) - 1
            if self.plan.restore_best:
                so_far.best_state = self.packs.state(each.slot, whole=False)

    def _finish(self, ended: Sequence[tuple[Progress, Status]]) -> None:
        for each, _ in ended:
            is_last = each.so_far.best in (None, len(each.so_far.history) - 1)
            if self.plan.restore_best and not is_last and each.so_far.best_state is not None:
                self.packs.restore(each.slot, each.so_far.best_state)
        tests: Sequence[Evaluation | str | None] = [None] * len(ended)
        if self._test is not None and ended:
            tests = self.packs.measure([each.slot for each, _ in ended], self._test)
        for (each, status), test in zip(ended, tests, strict=True):
            if isinstance(test, str):
                self._fail(each.member, test, each.so_far)
            else:
                self._end(each, status, test)
        for each, _ in ended:
            self._leave(each)

    def _leave(self, each: Progress) -> None:
        """The member's row trains on for nobody, until another takes it."""
        self.running.remove(each)
        each.row.is_idle = True
        self._idle.append(each.slot)
        self._is_stale = True

    def _end(self, each: Progress, status: Status, test: Evaluation | None) -> None:
        state = {name: value.cpu() for name, value in self.packs.state(each.slot).items()}
        self._keep_result(each.member, each.so_far, status, state, test)

    def _fail(self, member: Settled, reason: str, so_far: Underway | None = None) -> None:
        self.hooks.message(f"Member {member.name} failed: {reason.rstrip('.')}.")
        self._keep_result(member, so_far or Underway(), "failed", {}, None, reason)

    def _keep_result(
        self, member: Settled, so_far: Underway, status: Status, state: Mapping[str, Tensor],
        test: Evaluation | None, reason: str | None = None,
    ) -> None:  # fmt: skip
        history = so_far.history
        at = so_far.best if self.plan.restore_best and so_far.best is not None else len(history) - 1
        entry = history[at] if history else {}
        own = {name.removeprefix("validation_"): value for name, value in entry.items() if "validation_" in name}
        result = MemberResult(
            name=member.name,
            group=member.group,
            held_out=0 if member.validation is None else len(member.validation),
            seed=member.settings.seed,
            status=status,
            epochs=history[-1]["epoch"] if history else 0.0,
            best_epoch=entry.get("epoch"),
            test_loss=None if test is None else test.loss,
            test_accuracy=None if test is None else test.accuracy,
            test_metrics={} if test is None else test.metrics,
            validation_loss=own.pop("loss", None),
            validation_accuracy=own.pop("accuracy", None),
            validation_metrics=own,
            history=history,
            reason=reason,
            state=state,
        )
        self.results[member.number] = result
        if status in ("finished", "stopped early"):  # what failed is tried again by the next call
            self.store.save(member, result)


def named(what: str, evaluation: Evaluation) -> dict[str, float]:
    """Return the figures of an evaluation by name, such as `validation_loss`."""
    found = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, **evaluation.metrics}
    return {f"{what}_{name}": value for name, value in found.items() if value is not None}
