"""All learners in one pass over one graph: operators run once for K learners, with all of the device's threads.

What small batches leave idle is filled by other learners' work in the same operator. On CPU the host gates, updates and
averages after each pass; on CUDA whole rounds are graphs (`fused_device.py`). Over several devices averaging(n), which
waits for the others, goes on beside the passes up to the next corrections that pull, as the scheduler says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from torch import Tensor

from crossbow_py.core.errors import CrossbowError, LearnerError, one_line
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.device.streams import CudaStreams, DeviceStreams
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
    "executor=fused updates learner by learner, which is slower, because it knows no update of this optimizer for all."
)


class FusedExecutor(Executor):
    """Runs a round as one forward and one backward pass of all learners.

    On CUDA, with a bank in `blocks` and SGD or AdamW, the host only issues rounds. Between a drain and the next submit
    the bank is the caller's; the caller's work on its current stream then comes before everything that is enqueued.

    Args:
        tasks: what to compute.
        device: for tests; by default CUDA for a bank that is there, and the calling thread for another.
        kernels: for tests; by default Triton kernels serve on CUDA, where they can.

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
        # With NCCL the host does not wait for a sum.
        blocks = bank.device.type == "cpu" and device is None and not tasks.collective.is_alone
        self._averaging = AveragingThread() if blocks else None
        self._build(kernels)
        # Until a round by kernels was whole: what a round that fails before its update may have changed.
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
        """Operators without a rule, run learner by learner; known after the first round."""
        return self._pass.graph.looped

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        """See Executor; on CUDA a round is one span between two events."""
        return on_callers_stream if self._on_device is None else self._on_device.rounds.spans(timeline)

    def drain(self) -> list[RoundOutcome]:
        """See Executor; on CUDA the next round waits for what the caller enqueued meanwhile."""
        outcomes = super().drain()
        if self._on_device is not None:
            self._on_device.rounds.bank_changed = True
        return outcomes

    def recheck(self) -> None:
        """See Executor; on CUDA a pass outside of the captured graph would disturb it."""
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
            # What others have summed with this device cannot be begun anew.
            summed = self.tasks.collective.num_sums > num_sums
            if not self._on_trial or summed or is_out_of_memory(error):
                raise LearnerError("round", outcome.plan.index, ALL_LEARNERS, error) from error
            self._give_up_kernels(error)
            self._issue(launches, outcome)
        self._on_trial, self._before = False, []

    def _buffers(self) -> list[Tensor]:
        """What a forward pass may write."""
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
        """The first round by kernels failed, before it updated anything: begin it anew by operators."""
        if self._on_device is not None:
            self._on_device.rounds.device.synchronize()  # host–device synchronisation: what was queued still writes
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
        """Say once what the pass has to say."""
        self._pass_notes.read(self._pass)
        self.notes += self._pass_notes.take()

    def _update(self, gradients: Sequence[Tensor | None], outcome: RoundOutcome) -> None:
        """Corrections of all learners and the step of z: in one pass where there is native code for it."""
        tasks, update, averaging = self.tasks, self.tasks.update, outcome.plan.averaging
        learners = range(tasks.bank.num_learners)
        if isinstance(update, NativeUpdate) and self._rows is not None:
            steps = self._steps(update, self._rows, gradients, outcome)
            moves = tasks.collective.is_alone and (averaging is None or averaging.share == 1)
            update.correct_all(self._rows, averaging, steps, moves=moves)
            self._rows.gradients = tasks.bank.stacked_gradients()  # lets go of autograd's
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
        """The learners' steps, by gradients that lie where `rows` says afterwards."""
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
        """The step of z: now, or begun on a thread where it waits for other devices."""
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
        """Gradients where autograd left them, if their values lie as the bank's do; else copied to the bank's."""
        found: list[Tensor] = []
        for view, gradient in zip(self.tasks.bank.stacked_gradients(), gradients, strict=True):
            if gradient is None:
                found.append(view.zero_())
            else:
                found.append(gradient if _lies_as(gradient, view) else view.copy_(gradient))
        return found

    def _learn(self, outcome: RoundOutcome) -> Sequence[Tensor | None]:
        """Gradients `[K, *shape]` of all learners; losses and correct predictions to the outcome."""
        bank, plan = self.tasks.bank, outcome.plan
        for learner in range(bank.num_learners) if self._pass.graph.draws else ():
            self.tasks.seed_dropout(learner, plan)
        learned = self._pass.learn(self._pass.batch(plan), self._pass.shares(plan))
        outcome.losses = learned.losses.tolist()  # host–device synchronisation on CUDA
        if learned.num_correct is not None:
            outcome.num_correct = [float(count) for count in learned.num_correct.tolist()]
        return learned.gradients

    def _wait(self, outcome: RoundOutcome) -> None:
        """On CPU the round was over when it was issued, but for averaging."""
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


def _lies_as(tensor: Tensor, other: Tensor) -> bool:
    return tensor.stride() == other.stride() and tensor.dtype == other.dtype


class AveragingThread:
    """One averaging at a time, on a thread that starts with the first. Used from one thread.

    What an averaging raises is kept, and raised once by whoever waits for it next.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "crossbow averaging")
        self._last: Future[None] | None = None

    def begin(self, body: Callable[[], None]) -> None:
        """Call `body` on the thread. The one before has been waited for."""
        assert self._last is None, "an averaging reads what the one before wrote"
        self._last = self._pool.submit(body)

    def finish(self) -> None:
        """Block until what was begun is over."""
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        finally:
            del last  # lets go of what an error's frames hold

    def check(self) -> None:
        """As `finish`, where that does not block."""
        if self._last is not None and self._last.done():
            self.finish()

    def settle(self) -> None:
        """Block until what was begun is over; raises nothing."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Let what was begun end, as other ranks wait for its sum, and join the thread. Does not raise."""
        self._pool.shutdown()
        self._last = None
