"""Fused rounds on CUDA: a whole round is one graph, captured once and replayed on a stream of its own.

    load(n)  round(n): forward, backward, gate, corrections  averaging(n): z  report(n)  record

If Triton kernels update, the round also moves z, and there is no averaging(n) unless there are several devices. With
several devices a round is two graphs, and averaging has a stream of its own, beside the next round's learning:

    load(n)  learning(n)  [wait averaging(n−1)]  correction(n)  report(n)  record
                                                 averaging(n): all-reduce, z

The host is a round ahead: it reads losses, and which learners were gated, once the next round is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from crossbow_py.engine.device.device_tasks import NUM_RESULTS
from crossbow_py.engine.device.fused_device_tasks import FusedDeviceTasks
from crossbow_py.engine.device.graphs import Body, DeviceStreams, Event
from crossbow_py.engine.executors.on_device import CaptureError, DeviceRounds, Program, Slot
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM
from crossbow_py.engine.update.kernel_update import choose_kernel_update

ALL_LEARNERS = "all learners"

_EAGER = "executor=fused runs rounds without CUDA graphs, which is slower, because {}."
_DRAWS = "the model or the loss draws random numbers outside nn.Dropout modules"


class FusedRounds:
    """Issues fused rounds to a device. None has run on a GPU yet.

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
        device: DeviceStreams,
        notes: list[str],
        kernels: bool,
        span: Callable[[str, str, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> None:
        self._notes, self._span, update = notes, span, None
        if kernels:
            alone, optimizer = tasks.collective.is_alone, tasks.update.optimizer
            moves, rule = alone and not tasks.update.rule.scales_sum, tasks.update.rule
            update, note = choose_kernel_update(tasks.bank, optimizer, rule, moves=moves)
            notes += [note] if note else []
        self._bodies = FusedDeviceTasks(tasks, fused, update, gathers=kernels)
        self._is_alone = tasks.collective.is_alone
        averages_on = ALL_LEARNERS if self._is_alone else AVERAGING_STREAM
        names = list(dict.fromkeys([ALL_LEARNERS, averages_on]))
        results, awaiting = (tasks.bank.num_learners, NUM_RESULTS), tasks.collective.awaiting
        self.rounds = DeviceRounds(device, "fused", names, results, awaiting)
        program, pool = self.rounds.program, device.new_pool()
        self._round = program("round" if self._is_alone else "learning", ALL_LEARNERS, pool)
        self._correction = program("correction", ALL_LEARNERS, pool)
        self._averaging = program("averaging", averages_on, pool)
        self._averages_gradients = tasks.gradient_mean is not None
        self._gradient_mean = program("gradient mean", ALL_LEARNERS, pool)
        # Sums by NCCL are not captured.
        self._averaging.captures = self._gradient_mean.captures = self._is_alone

    def issue(self, outcome: RoundOutcome, slot: Slot) -> None:
        """Enqueue a round that has begun. Blocks the host only if a graph is captured or if the feed does."""
        rounds, bodies, plan = self.rounds, self._bodies, outcome.plan
        stream, shared = rounds.streams[ALL_LEARNERS], bodies.shares(plan)
        variant = (plan.averaging, shared) if self._is_alone else shared
        ahead = self._round.runs_graph(variant)
        load = partial(bodies.load, plan, bank_changed=rounds.bank_changed, masks_ahead=ahead)
        rounds.device.run("load", load, stream)

        def learn() -> None:
            bodies.learn(shared, masks_ahead=ahead)
            if self._is_alone:
                if self._averages_gradients:
                    bodies.average_gradients()
                bodies.correct(plan.averaging)

        self._launch(self._round, learn, variant)
        if self._is_alone:
            if plan.averaging is not None and not bodies.moves_z:
                self._launch(self._averaging, partial(bodies.average, outcome), plan.averaging)
        else:
            if self._averages_gradients:
                self._launch(self._gradient_mean, bodies.average_gradients, None)
            if plan.averaging is not None:
                rounds.wait_for_average(ALL_LEARNERS)
            self._launch(self._correction, partial(bodies.correct, plan.averaging), plan.averaging)
        rounds.device.run("report", partial(bodies.report, slot.results), stream)
        last = {ALL_LEARNERS: self._round.name}
        corrected = rounds.mark(slot, ALL_LEARNERS)
        if not self._is_alone and plan.averaging is not None:
            self._average_beside(outcome, slot, corrected)
            last[AVERAGING_STREAM] = "averaging"
        rounds.end(plan.index, slot, last)

    def _average_beside(self, outcome: RoundOutcome, slot: Slot, corrected: Event) -> None:
        """Average on a stream of its own, after this round's corrections; the next that pull wait for it."""
        device = self.rounds.device
        device.wait(self.rounds.streams[AVERAGING_STREAM], corrected)
        with self._span("averaging", AVERAGING_STREAM, outcome.plan.index):
            self._launch(self._averaging, partial(self._bodies.average, outcome), outcome.plan.averaging)
        self.rounds.mark(slot, AVERAGING_STREAM)

    def _launch(self, program: Program, body: Body, variant: Hashable) -> None:
        """Launch a program; if it cannot be captured, it runs eagerly from this round on."""
        try:
            if program.launch_watched(body, variant):
                self._run_eagerly(program, _DRAWS)
        except CaptureError as error:
            self._run_eagerly(program, f"one cannot be captured ({error.reason})")
            program.launch(body, variant)

    def _run_eagerly(self, program: Program, reason: str) -> None:
        program.captures = False
        self._notes.append(_EAGER.format(reason))

    def read(self, outcome: RoundOutcome) -> None:
        """Block the host until the learners' stream has passed the round, then read its results."""
        self._bodies.read(outcome, self.rounds.wait(outcome.plan.index))

    def close(self) -> None:
        """See `DeviceRounds.close`."""
        self.rounds.close(self._bodies.count_steps)
