"""The executor `fused`: all learners in one pass over one graph, whose operators run once for K learners.

Work of other learners in the same operator uses what a small batch leaves idle. On CPU the host gates, updates and
averages after each pass; with several devices averaging(n), which waits for the others, runs beside the passes up to
the next corrections that pull. On CUDA a whole round is one graph, captured once and replayed on a stream of its own:

    load(n)  round(n): forward, backward, gate, corrections  averaging(n): z  report(n)  record

If Triton kernels update, the round also moves z, and there is no averaging(n) unless there are several devices. With
several devices a round is two graphs, and averaging has a stream of its own, beside the next round's learning:

    load(n)  learning(n)  [wait averaging(n−1)]  correction(n)  report(n)  record
                                                 averaging(n): all-reduce, z

The host is a round ahead: it reads losses, and which learners were gated, once the next round is enqueued. All learners
are one group, so a round's order is that of its tasks, and needs no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter

from torch import Tensor

from crossbow_py.core.errors import CrossbowError, LearnerError, one_line
from crossbow_py.core.switches import KERNELS
from crossbow_py.core.trees import map_tree, raise_unknown_id
from crossbow_py.engine.device.device_tasks import FusedTasks, average_gated, compare_gradients
from crossbow_py.engine.device.graphs import Body, CudaStreams
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors.base import Executor, even_groups
from crossbow_py.engine.executors.on_device import CaptureError, DeviceRounds, Program, Slot
from crossbow_py.engine.executors.spans import TaskSpans
from crossbow_py.engine.fusion.features import keep_features
from crossbow_py.engine.fusion.fused_agreement import outdated, trusted_pass
from crossbow_py.engine.fusion.fused_pass import FusedPass, PassNotes
from crossbow_py.engine.rounds import GradientSum, Round, RoundOutcome, RoundTasks, comparison_of
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch
from crossbow_py.engine.tasks import AveragingTask
from crossbow_py.engine.trust import not_used, why_not
from crossbow_py.engine.update.device_update import knows
from crossbow_py.engine.update.kernel_update import choose_kernel_update
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step
from crossbow_py.telemetry.timeline import Timeline

ALL_LEARNERS = "all learners"

_DRAWS = "the model or the loss draws random numbers outside nn.Dropout modules"


def learn_fused(tasks: RoundTasks, fused: FusedPass, outcome: RoundOutcome) -> Sequence[Tensor | None]:
    """Return gradients `[K, *shape]` of a pass's learners; losses and right predictions go to the outcome."""
    plan, own = outcome.plan, slice(fused.learners.start, fused.learners.stop)
    for learner in fused.learners if fused.graph.draws else ():
        tasks.seed_dropout(learner, plan)
    batch, shared = fused.batch(plan), fused.shares(plan)
    try:
        learned = fused.learn_in_parts(batch, shared)
    except (IndexError, RuntimeError) as error:  # as the rule of embeddings raises
        of_data = tasks.bank.device.type == "cpu" and not is_out_of_memory(error)
        for row, learner in enumerate(fused.learners if of_data else ()):
            inputs = batch.inputs if shared else map_tree(itemgetter(row), batch.inputs)
            raise_unknown_id(tasks.bank.module(learner), inputs)
        raise
    outcome.losses[own] = learned.losses.tolist()  # host–device synchronisation on CUDA
    if learned.num_correct is not None:
        outcome.num_correct[own] = [float(count) for count in learned.num_correct.tolist()]
    return learned.gradients


class FusedExecutor(Executor):
    """Runs a round as one forward and one backward pass of all learners.

    On CUDA, with a bank in `blocks` and an optimizer that `device_update.py` knows, the host only issues rounds.
    Between a drain and the next submit the bank is the caller's; everything enqueued afterwards waits for the caller's
    work on its current stream.

    Args:
        tasks: what to compute.
        device: for tests; by default the bank's device if that is CUDA, else the calling thread.
        kernels: for tests; by default Triton kernels are used on CUDA, where possible.

    Raises:
        FusionError: the model cannot be fused.
    """

    NAME = "fused"
    FUSES = True
    ORDER = "blocks"
    HAS_ONE_ROW = True

    def __init__(self, tasks: RoundTasks, device: CudaStreams | None = None, kernels: bool | None = None) -> None:
        super().__init__(tasks)
        bank = tasks.bank
        if kernels is None:
            kernels = bank.device.type == "cuda" and self._may_use_kernels()
        if bank.device.type == "cpu":
            keep_freed_memory()
        elif not knows(tasks.update.optimizer):
            self.notes.append(not_used("Updates of all learners at once", "this optimizer has none"))
        elif bank.order == "blocks":
            device = device or CudaStreams(bank.device)
        self._pass_notes = PassNotes()
        by_row = tasks.update.optimizer.clips_groups  # by norms that are taken row by row
        in_one = bank.order == "blocks" and not bank.one_row and not by_row
        self._rows = StackedRows(bank) if in_one else None
        self._device = device
        # On CPU a sum over devices blocks the thread that asks for it; with NCCL the host does not wait.
        blocks = bank.device.type == "cpu" and device is None and not tasks.collective.is_alone
        self._thread = ThreadPoolExecutor(1, "crossbow averaging") if blocks else None
        self._averaging: Future[None] | None = None
        self._build(kernels)
        # Until a first round with kernels has succeeded, buffers are kept to repeat a failed one without them.
        self._on_trial = kernels
        self._before: list[tuple[Tensor, Tensor]] = []

    def _may_use_kernels(self) -> bool:
        """Return whether any kernel may be used on the bank's device; if not, say why."""
        reasons = [why_not(each, self.tasks.bank.device) for each in KERNELS]
        if None not in reasons:
            self.notes.append(not_used("Kernels", f"{reasons[0]}"))
        return None in reasons

    def _build(self, kernels: bool) -> None:
        self._pass, device = trusted_pass(self.tasks, kernels), self._device
        keep_features(self.tasks, self._pass)
        self._on_device = (
            FusedRounds(self.tasks, self._pass, device, self.notes, kernels, self.span) if device else None
        )

    @classmethod
    def groups_of(cls, num_learners: int) -> list[range]:
        return even_groups(num_learners, 1)

    @property
    def looped(self) -> list[str]:
        """The operators that run learner by learner, for want of a rule; known after the first round."""
        return self._pass.graph.looped

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        return on_callers_stream if self._on_device is None else self._on_device.rounds.spans(timeline)

    def in_effect(self) -> list[str]:
        on_device, by_kernel = self._on_device, self._pass.graph.by_kernel()
        there = {
            "graphs": on_device is not None and on_device.rounds.has_graphs,
            "update": on_device is not None and on_device.bodies.has_kernels,
            "loss": self._pass.has_kernel,
            "batches": on_device is not None and on_device.bodies.gathers_by_kernel,
            "layers": bool(self._pass.graph.written),
            f"convolutions: {by_kernel}": by_kernel > 0,
        }
        return [name for name, is_there in there.items() if is_there]

    def drain(self) -> list[RoundOutcome]:
        outcomes = super().drain()
        if self._on_device is not None:
            self._on_device.rounds.bank_changed = True
        return outcomes

    def recheck(self) -> None:
        # On CUDA a pass outside of the captured graph would disturb it.
        if self._on_device is None and (found := outdated(self.tasks, self._pass)):
            self.notes.append(found)

    def _start(self, outcome: RoundOutcome) -> None:
        bank, collective = self.tasks.bank, self.tasks.collective
        if self._on_trial and not self._before:
            modules = (bank.module(learner) for learner in range(bank.num_learners))
            self._before = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
        num_sums = collective.num_sums
        try:
            if self._on_device is None:
                self._run(outcome)
            else:
                self._on_device.issue(outcome)
        except CrossbowError:
            raise
        except Exception as error:
            # A round in which other devices have summed with this one cannot be repeated.
            if not self._on_trial or collective.num_sums > num_sums or is_out_of_memory(error):
                raise LearnerError("round", outcome.plan.index, ALL_LEARNERS, error) from error
            self._give_up_kernels(error)
            self._start(outcome)
        self._on_trial, self._before = False, []

    def _give_up_kernels(self, error: Exception) -> None:
        """Prepare to repeat with operators a first round that failed with kernels, before it updated anything."""
        if self._on_device is not None:
            self._on_device.close()  # host–device synchronisation: queued work still writes
        for buffer, before in self._before:
            buffer.copy_(before)
        self._on_trial = False
        self.notes.append(not_used("Kernels", f"the first round with them failed ({one_line(error)})"))
        self._build(kernels=False)
        if self._timeline is not None:
            self.trace(self._timeline)  # on the new stream

    def _run(self, outcome: RoundOutcome) -> None:
        tasks = self.tasks
        gradients: Sequence[Tensor | None]
        with self.computing(), self.span("pass", ALL_LEARNERS, outcome.plan.index):
            if tasks.bank.one_row and outcome.plan.compares:
                own = tasks.learn_apart(self._pass.learners, outcome)
                outcome.comparison, gradients = comparison_of(own), own.total
            else:
                gradients = learn_fused(tasks, self._pass, outcome)
        if self.tasks.bank.one_row:
            self._correct_one_row(gradients, outcome)
            return
        if outcome.plan.averaging is not None:
            self._wait_for_z()
        with self.computing(), self.span("update", ALL_LEARNERS, outcome.plan.index):
            self._update(gradients, outcome)
        self._note_pass()

    def _correct_one_row(self, gradients: Sequence[Tensor | None], outcome: RoundOutcome) -> None:
        """Step the row of all learners, given the sums of gradients."""
        plan, tasks, shared = outcome.plan, self.tasks, self._pass.shares(outcome.plan)

        def alone() -> Iterator[list[Tensor]]:
            return tasks.gradients_alone(plan, self._pass.inputs(plan), shared, self._pass.learners)

        with self.computing(), self.span("update", ALL_LEARNERS, plan.index):
            tasks.correct_one_row(gradients, outcome, alone)
        self._note_pass()

    def _note_pass(self) -> None:
        """Pass on the notes of the pass, each once."""
        self._pass_notes.read(self._pass)
        self.notes += self._pass_notes.take()

    def _update(self, gradients: Sequence[Tensor | None], outcome: RoundOutcome) -> None:
        """Correct all learners and move z, in one pass if there is native code for it."""
        tasks, update, averaging = self.tasks, self.tasks.update, outcome.plan.averaging
        if outcome.plan.compares:
            given = [own for own in gradients if own is not None]
            each = ([own[j] for own in given] for j in range(tasks.bank.num_learners))
            outcome.comparison = comparison_of(GradientSum.of(each))
        sums = averaging is not None and averaging.moves_z
        # One pass over all learners writes `total`, which otherwise stays what it was.
        if isinstance(update, NativeUpdate) and self._rows is not None and (averaging is None or sums):
            steps = self._steps(update, self._rows, gradients, outcome)
            moves = tasks.collective.is_alone
            update.correct_all(self._rows, averaging, steps, moves=moves)
            self._rows.gradients = tasks.bank.stacked_gradients()  # frees those of autograd
            if sums and not moves:
                self._average(tasks.move, outcome)
            return
        tasks.bank.store_stacked_gradients(gradients)
        if tasks.gradient_mean is not None:
            tasks.average_gradients(outcome)
        for learner in range(tasks.bank.num_learners):
            tasks.correct(learner, outcome)
        if sums:
            self._average(tasks.average, outcome)

    def _steps(
        self, update: NativeUpdate, rows: StackedRows, gradients: Sequence[Tensor | None], outcome: RoundOutcome
    ) -> list[Step | None]:
        """Return the learners' steps, and set `rows.gradients` to the gradients to step by."""
        tasks, learners = self.tasks, range(self.tasks.bank.num_learners)
        if rows.share_gradient:
            stacked, rows.gradients = self._in_place(gradients), tasks.bank.total.trained()
            own = [[each[learner] for each in stacked] for learner in learners]
            tasks.sum_gradients(own, outcome, lambda: tasks.bank.store_stacked_gradients(gradients))
            return [tasks.next_summed_step(learner, outcome) for learner in learners]
        if tasks.gradient_mean is None:
            rows.gradients = self._in_place(gradients)
        else:
            tasks.bank.store_stacked_gradients(gradients)
            tasks.average_gradients(outcome)
        norms = update.gradient_norms(rows)
        return [tasks.next_step(j, norms[j], outcome) for j in learners]

    def _in_place(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return gradients where autograd left them, if they have the bank's strides and dtype; else in the bank.

        Autograd may have one tensor for two parameters, as for those of a sum, which an optimizer that writes to
        gradients needs twice.
        """
        found, seen = list[Tensor](), set[int]()
        for view, gradient in zip(self.tasks.bank.stacked_gradients(), gradients, strict=True):
            if gradient is None:
                found.append(view.zero_())
            else:
                fits = (gradient.stride(), gradient.dtype) == (view.stride(), view.dtype)
                fits = fits and gradient.data_ptr() not in seen
                seen.add(gradient.data_ptr())
                found.append(gradient if fits else view.copy_(gradient))
        return found

    def _average(self, body: Callable[[RoundOutcome], None], outcome: RoundOutcome) -> None:
        """Move z: now, or on a thread if this waits for other devices."""
        if self._thread is None:
            body(outcome)
        else:
            assert self._averaging is None, "an averaging reads what the one before wrote"
            launch = Launch(AveragingTask(outcome.plan.index), AVERAGING_STREAM)
            self._averaging = self._thread.submit(self.run_task, launch, outcome, body)

    def _wait(self, outcome: RoundOutcome) -> None:
        # On CPU the round was over when it was issued, except for averaging.
        if self._on_device is not None:
            self._on_device.read(outcome)
            self._note_pass()
        if self._averaging is not None and self._averaging.done():
            self._wait_for_z()

    def _is_over(self, outcome: RoundOutcome) -> bool:
        return self._on_device is None or self._on_device.rounds.is_over(outcome.plan.index)

    def _wait_for_z(self) -> None:
        if self._on_device is not None:
            self._on_device.rounds.finish_average()
        averaging, self._averaging = self._averaging, None
        try:
            if averaging is not None:
                averaging.result()
        finally:
            del averaging  # frees what an error's frames hold

    def _settle(self) -> None:
        if self._on_device is not None:
            self._on_device.rounds.settle()
        if self._averaging is not None:
            wait([self._averaging])

    def close(self) -> None:
        if self._on_device is not None:
            self._on_device.close()
        if self._thread is not None:
            self._thread.shutdown()  # lets the averaging end, because other ranks wait for its sum
            self._averaging = None


class FusedRounds:
    """Issues fused rounds to a device.

    Args:
        tasks: what to compute, over a bank in `blocks` and with an optimizer that has a device update.
        fused: the forward and backward pass of all learners.
        device: the device.
        notes: gets a message if rounds cannot be captured and run eagerly.
        kernels: whether to use Triton kernels where possible.
        span: makes a context around work on a stream, for traces.
    """

    def __init__(
        self,
        tasks: RoundTasks,
        fused: FusedPass,
        device: CudaStreams,
        notes: list[str],
        kernels: bool,
        span: Callable[[str, str, int], AbstractContextManager[None]],
    ) -> None:
        self._notes, self._span, update = notes, span, None
        self._is_alone = alone = tasks.collective.is_alone
        if kernels:
            optimizer, rule = tasks.update.optimizer, tasks.update.rule
            update, note = choose_kernel_update(tasks.bank, optimizer, rule, moves=alone)
            notes += [note] if note else []
        self.bodies = FusedTasks(tasks, fused, update, gathers=kernels)
        averages_on = ALL_LEARNERS if alone else AVERAGING_STREAM
        self.rounds = DeviceRounds(device, "fused", list(dict.fromkeys([ALL_LEARNERS, averages_on])), tasks)
        program, pool = self.rounds.program, device.new_pool()
        self._round = program("round" if alone else "learning", ALL_LEARNERS, pool)
        self._correction = program("correction", ALL_LEARNERS, pool)
        self._averaging = program("averaging", averages_on, pool)
        self._one_row, self._average_gradients = tasks.bank.one_row, list[Body]()
        if self._one_row:
            self._average_gradients = [self.bodies.average_sum]
        elif tasks.gradient_mean is not None:
            self._average_gradients = [partial(average_gated, [self.bodies])]
        self._gradient_mean = program("gradient mean", ALL_LEARNERS, pool)
        self._comparison = program("comparison", ALL_LEARNERS, pool)
        if not alone:  # sums by NCCL are not captured
            self._averaging.captures = self._gradient_mean.captures = False
        notes += [not_used("CUDA graphs", reason)] if (reason := self.rounds.no_graphs) else []

    def issue(self, outcome: RoundOutcome) -> None:
        """Enqueue a round. Blocks the host only if a graph is captured or if the feed does."""
        slot = self.rounds.begin()
        with self._span("round", ALL_LEARNERS, outcome.plan.index):
            self._issue(outcome, slot)

    def _issue(self, outcome: RoundOutcome, slot: Slot) -> None:
        rounds, bodies, plan = self.rounds, self.bodies, outcome.plan
        stream, shared, apart = rounds.streams[ALL_LEARNERS], bodies.shares(plan), self._one_row and plan.compares
        variant = (plan.averaging, plan.compares, shared) if self._is_alone else (shared, apart)
        ahead = self._round.runs_graph(variant)
        load = partial(bodies.load, plan, bank_changed=rounds.bank_changed, masks_ahead=ahead)
        rounds.device.run("load", load, stream)

        def learn() -> None:
            bodies.learn(shared, masks_ahead=ahead, apart=apart)
            if self._is_alone:
                for body, _, _ in self._before_corrections(plan):
                    body()
                bodies.correct(plan.averaging)

        self._launch(self._round, learn, variant)
        average = partial(self._launch, self._averaging, partial(bodies.average, outcome), plan.averaging)
        sums = plan.averaging is not None and plan.averages
        if self._is_alone:
            if sums and not bodies.moves_z:
                average()
        else:
            with rounds.waiting(ALL_LEARNERS):
                for body, program, own in self._before_corrections(plan):
                    self._launch(program, body, own)
                if plan.averaging is not None:
                    rounds.wait_for_average(ALL_LEARNERS)
            self._launch(self._correction, partial(bodies.correct, plan.averaging), plan.averaging)
        rounds.device.run("report", partial(bodies.report, slot.results), stream)
        last = {ALL_LEARNERS: self._round.name}
        corrected = rounds.mark(slot, ALL_LEARNERS)
        if not self._is_alone and sums:
            # On a stream of its own, after this round's corrections; the next that pull wait for it.
            rounds.device.wait(rounds.streams[AVERAGING_STREAM], corrected)
            with self._span("averaging", AVERAGING_STREAM, plan.index):
                average()
            rounds.mark(slot, AVERAGING_STREAM)
            last[AVERAGING_STREAM] = "averaging"
        rounds.end(plan.index, slot, last)

    def _before_corrections(self, plan: Round) -> list[tuple[Body, Program, Hashable]]:
        """Return what is done with all learners' gradients before they step: bodies, programs and variants."""
        found: list[tuple[Body, Program, Hashable]] = []
        if plan.compares and not self._one_row:  # whose gradients are compared while each has its own
            found.append((partial(compare_gradients, [self.bodies]), self._comparison, None))
        return found + [(body, self._gradient_mean, None) for body in self._average_gradients]

    def _launch(self, program: Program, body: Body, variant: Hashable) -> None:
        """Launch a program; if it cannot be captured, everything runs eagerly from this round on."""
        try:
            if program.launch_watched(body, variant):
                program.captures = False
                self._notes.append(not_used("CUDA graphs", _DRAWS))
        except CaptureError as error:
            self.rounds.stop_capturing(error.said)
            self._notes.append(not_used("CUDA graphs", error.said))
            program.launch(body, variant)

    def read(self, outcome: RoundOutcome) -> None:
        """Block the host until the learners' stream has passed the round, then read its results."""
        self.bodies.read(outcome, self.rounds.wait(outcome.plan.index))

    def close(self) -> None:
        """Wait until the device is idle, and free it; see `DeviceRounds.close`."""
        self.rounds.close(self.bodies.count_steps)
