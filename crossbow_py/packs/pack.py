"""Trials on the rows of one bank, trained in lockstep: all do the same round, each at its own point of its own run.

Nothing is averaged. What a row sees is what its trial would see alone: its own position in the stream of samples, its
own learning rate, dropout and augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.averaging import Independent
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.mixing import Mixing
from crossbow_py.data.resident.resident_feed import STREAM, ResidentFeed, Variant
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.frozen_base import frozen_values, read_parameters
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.bank.saved import saved_base
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.modules.dropout import set_dropout_rate
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.rounds import Draws, Round, RoundOutcome, RoundTasks, smoothing_rows, take_all
from crossbow_py.engine.update.optimizers import side_by_side
from crossbow_py.engine.update.update_choice import choose_update
from crossbow_py.packs.padding import Padding
from crossbow_py.packs.trial import Checkpoint, Row, TrialSettings, new_row, own_dropout_rate, read_row, with_zero_state
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, evaluate_bank, load_state
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.executor_choice import new_bank

NON_FINITE = "its loss or gradient is not finite"


@dataclass(frozen=True)
class PackJob:
    """The settings that all packs of a search share.

    Attributes:
        settings, choices: those of all trials; a trial has its own seed and batch size.
        loss: what they minimise.
        choose_executor: returns the name of the executor for that many trials of a signature.
    """

    settings: RunSettings
    choices: Choices
    loss: Loss
    choose_executor: Callable[[str, int], str]


@dataclass
class TrialRow:
    """A trial on a row: how far it has been trained, and how far it will be.

    Attributes:
        begun: its checkpoint when its segment began, or when its pack was last parked; None for a new trial.
        end_samples: where the segment ends.
        planned_samples: its length if it is trained to the end, for its schedule.
        dropout_rate: the rate of the model's dropout layers; read if trials of its signature may differ in it.
        padding: how it lies in the wider model of its pack; None if its pack has its own model.
        first: the row that it begins with, without what is frozen; None if it is to be made.
        loss_sum, num_losses: sums over the rounds of this segment.
        failure: why it cannot go on.
        is_idle: whether it trains on for nobody, until another takes its row.
    """

    trial: int
    settings: TrialSettings
    begun: Checkpoint | None
    end_samples: int
    planned_samples: int
    dropout_rate: float = 0.0
    padding: Padding | None = None
    first: Row | None = None
    samples_seen: int = 0
    num_rounds: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    failure: str | None = None
    is_idle: bool = False

    def __post_init__(self) -> None:
        if self.begun is not None:
            self.samples_seen, self.num_rounds = self.begun.samples_seen, self.begun.num_rounds

    @property
    def is_over(self) -> bool:
        """True when its segment is over."""
        return not self.is_idle and (self.failure is not None or self.samples_seen >= self.end_samples)


@dataclass
class _Engine:
    """The bank, tasks and executor for a number of rows; built anew when that number changes."""

    name: str
    bank: ReplicaBank
    tasks: RoundTasks
    streams: list[int]
    executor: Executor | None = None  # made when the rows' settings are in: it may take them over as it is made


class Pack:
    """Trials of one signature. Used from one thread at a time; close it.

    Args:
        template: a model of theirs, on the device.
        feed: gives training batches of their size; closed with the pack.
        members: at least one.
        num_outputs: C, of a model whose batches are mixed; else None.
        shares_base: whether frozen parameters are the same for all.

    Raises LearnerError, MemoryError or RuntimeError from rounds that fail for all; see `Executor.submit`.
    """

    def __init__(
        self, job: PackJob, signature: str, template: nn.Module, feed: Feed, members: Sequence[TrialRow],
        num_outputs: int | None = None, shares_base: bool = True,
    ) -> None:  # fmt: skip
        self.job, self.signature, self.template, self.feed = job, signature, template, feed
        first = members[0].settings.optimizer
        self._update, self.warning = choose_update(
            first, Independent(), job.choices.device, job.choices.precision.master
        )
        self.members: list[TrialRow] = []
        self._engine: _Engine | None = None
        self._shares_base, self._base = shares_base, frozen_values(template) if shares_base else None
        self._num_outputs, self._mixings = num_outputs, dict[int, Mixing]()  # by stream
        if num_outputs is not None:
            feed.mixing = self._mix
        self._own_dropout = own_dropout_rate(template) is not None
        self._in_flight: list[list[TrialRow]] = []
        self._round_index = 0
        self.notes: list[str] = []
        try:
            self.assign(members)
        except BaseException:
            self.close()
            raise

    # --- rows ---------------------------------------------------------------------------------------------------------

    def assign(self, members: Sequence[TrialRow]) -> None:
        """Put these members on the rows; those that were there before keep their rows.

        Between `drain` and the next `step`. With as many members as before the others' rows are not touched.
        """
        staying = {id(member): row for row, member in enumerate(self.members)}
        if self._engine is not None and len(members) == len(self.members):
            kept = {id(member) for member in members}
            free = [row for row, member in enumerate(self.members) if id(member) not in kept]
            joining = [member for member in members if id(member) not in staying]
            for row, member in zip(free, joining, strict=True):
                self.members[row] = member
                self._bank.load_row(row, self._first_row(member), 0)
            if free:
                self._settle_rows(free)
            return
        rows = [
            read_row(self._bank, staying[id(member)]) if id(member) in staying else self._first_row(member)
            for member in members
        ]
        self._close_engine()
        self.members = list(members)
        if isinstance(self.feed, ResidentFeed):
            self.feed.serve(len(rows))
        job, first = self.job, members[0].settings
        name = job.choose_executor(self.signature, len(rows))
        bank = new_bank(
            self.template, len(rows), name, job.settings, job.choices, first.optimizer, has_corrections=False,
            shares_base=self._shares_base,
        )  # fmt: skip
        tasks = RoundTasks(
            bank, update=self._update, feed=self.feed, loss=job.loss, seed=first.seed, collective=Collective(),
            cache_features=job.settings.cache_features,
        )  # fmt: skip
        self._engine = _Engine(name, bank, tasks, [0] * len(rows))
        self._update.optimizer = side_by_side([member.settings.optimizer for member in members])
        for row, values in enumerate(rows):
            self._bank.load_row(row, values, 0)
        self._settle_rows(range(len(rows)))

    def _first_row(self, member: TrialRow) -> dict[str, object]:
        if member.begun is not None:
            row = member.begun.row
        else:
            row = member.first or new_row(member.settings.new_model().to(self.job.choices.device))
            row = with_zero_state(row, self._update.optimizer.state_names)
        if self._shares_base:
            row = {**row, "frozen": self._checked(row)}
        return row if member.padding is None else member.padding.pad_row(row)

    def _checked(self, row: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return no frozen values for a row that has those of the pack; raises UserError if it has others."""
        if row.get("base") not in (None, self._base):
            raise UserError(
                "the model's frozen parameters are not those that it was trained over; load the same file, or begin "
                "anew in another folder."
            )
        shared = read_parameters(self.template)
        for name, own in saved_base(row, 0).items():
            if name in shared and not torch.equal(own.to(shared[name]).nan_to_num(), shared[name].nan_to_num()):
                raise UserError(
                    f"the model's frozen parameter {name} has other values each time that the model is made; load them "
                    "from one file, or make them from a seed of their own."
                )
        return {}

    def _settle_rows(self, rows: Sequence[int]) -> None:
        """Apply the members' own settings: optimizer, dropout, label smoothing, augmentation."""
        engine = self._engine
        assert engine is not None, "rows are in a bank"
        self._update.optimizer = side_by_side([member.settings.optimizer for member in self.members])
        for row in rows:
            settings = self.members[row].settings
            if self._own_dropout:
                engine.bank.dropout_rates[row] = self.members[row].dropout_rate
                set_dropout_rate(engine.bank.module(row), self.members[row].dropout_rate)
            engine.streams[row] = 0  # where its stream of samples begins, unless it is its own
            own = settings.augmentation
            is_own = own.active or own.mixes or settings.order is not None
            if is_own and isinstance(self.feed, ResidentFeed):
                self.feed.set_variant(row + 1, Variant(settings.seed, own, settings.order))
                engine.streams[row] = (row + 1) * STREAM
            if self._num_outputs is not None:
                self._mixings[row + 1] = Mixing(own.mixup, own.cutmix, settings.seed, self._num_outputs)
        shares = [member.settings.label_smoothing for member in self.members]
        if engine.tasks.label_smoothing is None:
            engine.tasks.label_smoothing = smoothing_rows(max(shares), engine.bank)
        if engine.tasks.label_smoothing is not None:
            for row, share in enumerate(shares):
                engine.tasks.label_smoothing[row] = share
        if engine.executor is not None and self.job.choices.device.type == "cuda":
            engine.executor.close()  # what learners differ in lies on the device, in captured graphs
            engine.executor = None
        if engine.executor is None:
            engine.executor = EXECUTORS[engine.name](engine.tasks)

    def _mix(self, batch: Batch, start: int) -> Batch:
        stream, position = divmod(start, STREAM)
        mixing = self._mixings.get(stream) or next(iter(self._mixings.values()))  # executors look at the first batch
        return mixing(batch, position)

    @property
    def executor(self) -> str:
        """The name of what runs its rounds; empty once it is closed."""
        return "" if self._engine is None else self._engine.name

    @property
    def _bank(self) -> ReplicaBank:
        assert self._engine is not None, "the pack is open"
        return self._engine.bank

    @property
    def _executor(self) -> Executor:
        assert self._engine is not None, "the pack is open"
        assert self._engine.executor is not None, "its rows are settled"
        return self._engine.executor

    # --- rounds -------------------------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Return whether `step` has no round to wait for. Does not block."""
        return self._executor.is_ready()

    def step(self) -> bool:
        """Issue a round for all members, after the one before the last is over; that one may still run.

        Returns False if a member's segment is over: drain, and assign others first.
        """
        assert self._engine is not None, "the pack is open"
        executor = self._executor
        self._absorb(executor.collect())
        starts, rates, draws = list[int](), list[float](), list[Draws]()
        for stream, member in zip(self._engine.streams, self.members, strict=True):  # once: there may be a thousand
            if member.is_over:
                return False
            starts.append(stream + member.samples_seen)
            rates.append(self._learning_rate(member))
            draws.append(Draws(member.settings.seed, member.num_rounds))
        plan = Round(self._round_index, tuple(starts), tuple(rates), None, draws=tuple(draws))
        if not self.feed.announce(plan.starts):
            executor.settle()
            self.feed.wait(plan.starts)
        self._in_flight.append(list(self.members))
        executor.submit(plan, wait=False)
        for member in self.members:
            member.samples_seen += member.settings.batch_size
            member.num_rounds += 1
        self._round_index += 1
        return True

    def _learning_rate(self, member: TrialRow) -> float:
        settings, rate = member.settings, member.settings.optimizer.learning_rate
        assert not isinstance(rate, tuple), "a trial is one learner"
        num_samples = self.feed.num_samples if settings.order is None else settings.order.num_samples
        return rate * settings.schedule.factor(member.samples_seen, num_samples, member.planned_samples)

    def _absorb(self, outcomes: Sequence[RoundOutcome]) -> None:
        for outcome in outcomes:
            members = self._in_flight.pop(0)
            for member, loss, finite in zip(members, outcome.losses, outcome.finite, strict=True):
                if finite:
                    member.loss_sum, member.num_losses = member.loss_sum + loss, member.num_losses + 1
                elif member.failure is None:
                    member.failure = NON_FINITE

    def drain(self) -> None:
        """Wait for what is in flight; after that, members may be measured and exchanged."""
        self._absorb(self._executor.drain())
        self._bank.check_bindings(averages=self._bank.base.is_shared)
        self.notes += [*take_all(self._executor.notes), *self.feed.take_notes()]

    # --- results ------------------------------------------------------------------------------------------------------

    def evaluate(self, members: Sequence[TrialRow], evaluator: Evaluator, feed: Feed) -> list[Evaluation]:
        """Measure members on the samples of a feed, in one pass where they can be fused; drained."""
        return evaluate_bank(self._bank, evaluator, feed, [self._row(member) for member in members])

    def state(self, member: TrialRow, whole: bool = True) -> dict[str, Tensor]:
        """Return a copy of a member's weights and buffers by name, on its device; drained.

        What all members share is there once, on the host; not at all unless the state is to be `whole`.
        """
        row = self._row(member)
        found = self._bank.learner_state(row)
        if member.padding is not None:
            found = member.padding.unpad_state(found)
        state = {name: value.detach().clone() for name, value in found.items() if name not in self._bank.base}
        if not whole and self._bank.base.is_shared:
            return state
        return {**state, **{name: value[0] for name, value in self._bank.base.on_host(row).items()}}

    def restore(self, member: TrialRow, state: Mapping[str, Tensor]) -> None:
        """Give a member the weights and buffers of `state`; drained."""
        load_state(self._bank, self._row(member), state if member.padding is None else member.padding.pad_state(state))

    def checkpoint(self, member: TrialRow) -> Checkpoint:
        """Return where a member stands; the pack must be drained."""
        row = {**read_row(self._bank, self._row(member)), "base": self._base if self._shares_base else None}
        if member.padding is not None:
            row = member.padding.unpad_row(row)
        return Checkpoint(member.samples_seen, member.num_rounds, row)

    def _row(self, member: TrialRow) -> int:
        return next(row for row, own in enumerate(self.members) if own is member)

    def _close_engine(self) -> None:
        if self._engine is not None and self._engine.executor is not None:
            self._engine.executor.close()
        self._engine = None  # before there is another: both may not fit

    def close(self) -> None:
        """Stop threads and give memory back. Does not raise."""
        self._close_engine()
        self.members = []
        self.feed.close()
