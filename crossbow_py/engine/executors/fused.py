"""The executor `fused`: all learners in one pass over one graph, whose operators run once for K learners.

Work of other learners in the same operator uses what a small batch leaves idle. On CPU the host gates, updates and
averages after each pass; on CUDA whole rounds are graphs (`fused_device.py`). With several devices averaging(n), which
waits for the others, runs beside the passes up to the next corrections that pull, as in the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from torch import Tensor

from crossbow_py.core.errors import CrossbowError, LearnerError, one_line
from crossbow_py.engine.device.graphs import CudaStreams, DeviceStreams
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors.base import Executor, even_groups
from crossbow_py.engine.executors.fused_device import ALL_LEARNERS, FusedRounds
from crossbow_py.engine.executors.spans import TaskSpans
from crossbow_py.engine.fusion.fused_agreement import outdated, trusted_pass
from crossbow_py.engine.fusion.fused_pass import PassNotes
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch
from crossbow_py.engine.tasks import AveragingTask
from crossbow_py.engine.update.device_update import knows
from crossbow_py.engine.update.row_update import NativeUpdate, StackedRows, Step
from crossbow_py.telemetry.timeline import Timeline

_HOST_UPDATES = (
    "executor=fused updates learner by learner, which is slower, because this optimizer has no update for all at once."
)


class FusedExecutor(Executor):
    """Runs a round as one forward and one backward pass of all learners.

    On CUDA, with a bank in `blocks` and SGD or AdamW, the host only issues rounds. Between a drain and the next submit
    the bank is the caller's; everything enqueued afterwards waits for the caller's work on its current stream.

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

    def __init__(self, tasks: RoundTasks, device: DeviceStreams | None = None, kernels: bool | None = None) -> None:
        super().__init__(tasks)
        bank = tasks.bank
        kernels = bank.device.type == "cuda" if kernels is None else kernels
        if bank.device.type == "cpu":
            keep_freed_memory()
        elif not knows(tasks.update.optimizer):
            self.notes.append(_HOST_UPDATES)
        elif bank.order == "blocks":
            device = device or CudaStreams(bank.device)
        self._pass_notes = PassNotes()
        self._rows = StackedRows(bank) if bank.order == "blocks" else None
        self._device = device
        # On CPU a sum over devices blocks the thread that asks for it; with NCCL the host does not wait.
        blocks = bank.device.type == "cpu" and device is None and not tasks.collective.is_alone
        self._averaging = AveragingThread() if blocks else None
        self._build(kernels)
        # Until a first round with kernels has succeeded, buffers are kept to repeat a failed one without them.
        self._on_trial = kernels
        self._before: list[tuple[Tensor, Tensor]] = []

    def _build(self, kernels: bool) -> None:
        self._pass, device = trusted_pass(self.tasks, kernels), self._device
        self._on_device = (
            FusedRounds(self.tasks, self._pass, device, self.notes, kernels, self.span) if device else None
        )

    @classmethod
    def groups_of(cls, num_learners: int) -> list[range]:
        """Return one group of all learners."""
        return even_groups(num_learners, 1)

    @property
    def looped(self) -> list[str]:
        """The operators that run learner by learner, for want of a rule; known after the first round."""
        return self._pass.graph.looped

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        """See Executor; on CUDA a round is one span between two events."""
        return on_callers_stream if self._on_device is None else self._on_device.rounds.spans(timeline)

    def drain(self) -> list[RoundOutcome]:
        """See Executor; on CUDA the next round waits for what the caller enqueues until then."""
        outcomes = super().drain()
        if self._on_device is not None:
            self._on_device.rounds.bank_changed = True
        return outcomes

    def recheck(self) -> None:
        """See Executor; on CUDA it does nothing, as a pass outside of the captured graph would disturb it."""
        if self._on_device is None and (found := outdated(self.tasks, self._pass)):
            self.notes.append(found)

    def _issue(self, launches: tuple[Launch, ...], outcome: RoundOutcome) -> None:
        if self._on_trial and not self._before:
            self._before = [(buffer, buffer.clone()) for buffer in self._buffers()]
        num_sums = self.tasks.collective.num_sums
        try:
            self._issue_round(outcome)
        except CrossbowError:
            raise
        except Exception as error:
            # A round in which other devices have summed with this one cannot be repeated.
            summed = self.tasks.collective.num_sums > num_sums
            if not self._on_trial or summed or is_out_of_memory(error):
                raise LearnerError("round", outcome.plan.index, ALL_LEARNERS, error) from error
            self._give_up_kernels(error)
            self._issue(launches, outcome)
        self._on_trial, self._before = False, []

    def _buffers(self) -> list[Tensor]:
        """Return what a forward pass may write."""
        bank = self.tasks.bank
        modules = (bank.module(learner) for learner in range(bank.num_learners))
        return [buffer for module in modules for buffer in module.buffers()]

    def _issue_round(self, outcome: RoundOutcome) -> None:
        if self._on_device is None:
            self._run(outcome)
            return
        slot = self._on_device.rounds.begin()
        with self.span("round", ALL_LEARNERS, outcome.plan.index):
            self._on_device.issue(outcome, slot)

    def _give_up_kernels(self, error: Exception) -> None:
        """Prepare to repeat with operators a first round that failed with kernels, before it updated anything."""
        if self._on_device is not None:
            self._on_device.rounds.device.synchronize()  # host–device synchronisation: queued work still writes
        for buffer, before in self._before:
            buffer.copy_(before)
        self._on_trial = False
        self.notes.append(f"Fused rounds run as torch operators, which is slower: kernels failed ({one_line(error)}).")
        self._build(kernels=False)
        if self._timeline is not None:
            self.trace(self._timeline)  # on the new stream

    def _run(self, outcome: RoundOutcome) -> None:
        with self.span("pass", ALL_LEARNERS, outcome.plan.index):
            gradients = self._learn(outcome)
        if outcome.plan.averaging is not None:
            self._wait_for_z()
        with self.span("update", ALL_LEARNERS, outcome.plan.index):
            self._update(gradients, outcome)
        self._note_pass()

    def _note_pass(self) -> None:
        """Pass on the notes of the pass, each once."""
        self._pass_notes.read(self._pass)
        self.notes += self._pass_notes.take()

    def _update(self, gradients: Sequence[Tensor | None], outcome: RoundOutcome) -> None:
        """Correct all learners and move z, in one pass if there is native code for it."""
        tasks, update, averaging = self.tasks, self.tasks.update, outcome.plan.averaging
        learners = range(tasks.bank.num_learners)
        if isinstance(update, NativeUpdate) and self._rows is not None:
            steps = self._steps(update, self._rows, gradients, outcome)
            moves = tasks.collective.is_alone and (averaging is None or averaging.share == 1)
            update.correct_all(self._rows, averaging, steps, moves=moves)
            self._rows.gradients = tasks.bank.stacked_gradients()  # frees those of autograd
            if averaging is not None and not moves:
                self._average(tasks.move, outcome)
            return
        tasks.bank.store_stacked_gradients(gradients)
        if tasks.gradient_mean is not None:
            tasks.average_gradients(outcome)
        for learner in learners:
            tasks.correct(learner, outcome)
        if averaging is not None:
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

    def _average(self, body: Callable[[RoundOutcome], None], outcome: RoundOutcome) -> None:
        """Move z: now, or on a thread if this waits for other devices."""
        if self._averaging is None:
            body(outcome)
        else:
            self._averaging.begin(partial(self._average_beside, body, outcome))

    def _average_beside(self, body: Callable[[RoundOutcome], None], outcome: RoundOutcome) -> None:
        task = AveragingTask(outcome.plan.index)
        try:
            self.run_task(Launch(task, AVERAGING_STREAM), outcome, body)
        except CrossbowError:
            raise
        except Exception as error:
            raise LearnerError(str(task), task.round_index, AVERAGING_STREAM, error) from error

    def _in_place(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return gradients where autograd left them, if they have the bank's strides and dtype; else in the bank."""
        found: list[Tensor] = []
        for view, gradient in zip(self.tasks.bank.stacked_gradients(), gradients, strict=True):
            if gradient is None:
                found.append(view.zero_())
            else:
                found.append(gradient if _has_layout_of(gradient, view) else view.copy_(gradient))
        return found

    def _learn(self, outcome: RoundOutcome) -> Sequence[Tensor | None]:
        """Return gradients `[K, *shape]` of all learners; losses and right predictions go to the outcome."""
        bank, plan = self.tasks.bank, outcome.plan
        for learner in range(bank.num_learners) if self._pass.graph.draws else ():
            self.tasks.seed_dropout(learner, plan)
        learned = self._pass.learn(self._pass.batch(plan), self._pass.shares(plan))
        outcome.losses = learned.losses.tolist()  # host–device synchronisation on CUDA
        if learned.num_correct is not None:
            outcome.num_correct = [float(count) for count in learned.num_correct.tolist()]
        return learned.gradients

    def _wait(self, outcome: RoundOutcome) -> None:
        # On CPU the round was over when it was issued, except for averaging.
        if self._on_device is not None:
            self._on_device.read(outcome)
            self._note_pass()
        if self._averaging is not None:
            self._averaging.check()

    def _is_over(self, outcome: RoundOutcome) -> bool:
        return self._on_device is None or self._on_device.rounds.is_over(outcome.plan.index)

    def _wait_for_z(self) -> None:
        if self._on_device is not None:
            self._on_device.rounds.finish_average()
        if self._averaging is not None:
            self._averaging.finish()

    def _settle(self) -> None:
        if self._on_device is not None:
            self._on_device.rounds.settle()
        if self._averaging is not None:
            self._averaging.settle()

    def close(self) -> None:
        """See Executor."""
        if self._on_device is not None:
            self._on_device.close()
        if self._averaging is not None:
            self._averaging.close()


def _has_layout_of(tensor: Tensor, other: Tensor) -> bool:
    return tensor.stride() == other.stride() and tensor.dtype == other.dtype


class AveragingThread:
    """Runs one averaging at a time on a thread, which starts with the first. Used from one thread.

    An exception is kept, and raised once by the next method that waits.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "crossbow averaging")
        self._last: Future[None] | None = None

    def begin(self, body: Callable[[], None]) -> None:
        """Call `body` on the thread. The averaging before must be finished."""
        assert self._last is None, "an averaging reads what the one before wrote"
        self._last = self._pool.submit(body)

    def finish(self) -> None:
        """Block until the averaging is over."""
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        finally:
            del last  # frees what an error's frames hold

    def check(self) -> None:
        """Do as `finish` if that does not block."""
        if self._last is not None and self._last.done():
            self.finish()

    def settle(self) -> None:
        """Block until the averaging is over. Does not raise."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Let the averaging end, because other ranks wait for its sum, and join the thread. Does not raise."""
        self._pool.shutdown()
        self._last = None
