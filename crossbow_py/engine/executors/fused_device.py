"""Fused rounds on CUDA: a whole round is one graph, captured once and replayed on a stream of its own.

    load(n)  round(n): forward, backward, gate, corrections  averaging(n): z  report(n)  record

Where the update is Triton kernels, the round moves z as well, and averaging(n) is there for several devices alone.

The host is a round ahead: it learns of losses and of learners that were gated when the next round is on its way.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from crossbow_py.engine.device_tasks import NUM_RESULTS
from crossbow_py.engine.executors.device_streams import Body, DeviceStreams
from crossbow_py.engine.executors.on_device import CaptureError, DeviceRounds, Program, Slot
from crossbow_py.engine.fused_device_tasks import FusedDeviceTasks
from crossbow_py.engine.fused_pass import FusedPass
from crossbow_py.engine.kernel_update import choose_kernel_update
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks

ALL_LEARNERS = "all learners"

_EAGER = "executor=fused runs rounds without CUDA graphs, which is slower, because {}."
_DRAWS = "the model or the loss draws random numbers outside nn.Dropout modules"


class FusedRounds:
    """Issues fused rounds to a device. Not one of them has run on a GPU yet.

    Args:
        tasks: over a bank in `blocks`, with an optimizer that has a device update.
        fused: forward and backward of all learners.
        device: where to.
        notes: gets a sentence where rounds cannot be captured; they run eagerly then.
        kernels: whether Triton kernels are to be used where they serve.
    """

    def __init__(
        self, tasks: RoundTasks, fused: FusedPass, device: DeviceStreams, notes: list[str], kernels: bool
    ) -> None:
        self._notes, update = notes, None
        if kernels:
            alone, optimizer = tasks.collective.is_alone, tasks.update.optimizer
            update, note = choose_kernel_update(tasks.bank, optimizer, tasks.update.rule, moves=alone)
            notes += [note] if note else []
        self._bodies = FusedDeviceTasks(tasks, fused, update, gathers=kernels)
        self.rounds = DeviceRounds(device, "fused", [ALL_LEARNERS], (tasks.bank.num_learners, NUM_RESULTS))
        program, pool = self.rounds.program, device.new_pool()
        self._round, self._averaging = (program(name, ALL_LEARNERS, pool) for name in ("round", "averaging"))
        # NCCL stays out of graphs.
        self._averaging.captures = tasks.collective.is_alone

    def issue(self, outcome: RoundOutcome, slot: Slot) -> None:
        """Enqueue a round that has begun. Blocks the host only where a graph is captured or the feed blocks it."""
        rounds, bodies, plan = self.rounds, self._bodies, outcome.plan
        stream, shared = rounds.streams[ALL_LEARNERS], bodies.shares(plan)
        variant = (plan.averaging, shared)
        ahead = self._round.runs_graph(variant)
        load = partial(bodies.load, plan, bank_changed=rounds.bank_changed, masks_ahead=ahead)
        rounds.device.run("load", load, stream)

        def whole_round() -> None:
            bodies.learn(shared, masks_ahead=ahead)
            bodies.correct(plan.averaging)

        self._launch(self._round, whole_round, variant)
        if plan.averaging is not None and not bodies.moves_z:
            self._launch(self._averaging, partial(bodies.average, outcome), plan.averaging)
        rounds.device.run("report", partial(bodies.report, slot.results), stream)
        rounds.mark(slot, ALL_LEARNERS)
        rounds.end(plan.index, slot, {ALL_LEARNERS: "round"})

    def _launch(self, program: Program, body: Body, variant: Hashable) -> None:
        """Launch; what cannot be captured runs eagerly from now on, beginning with this round."""
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
        """Block the host until the device is past the round, then read its results."""
        self._bodies.read(outcome, self.rounds.wait(outcome.plan.index))

    def close(self) -> None:
        """See `DeviceRounds.close`."""
        self.rounds.close(self._bodies.count_steps)
