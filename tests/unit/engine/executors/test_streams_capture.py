"""executor=streams without a GPU: what is captured into graphs, what is not, and captures that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.averaging import Crossbow
from crossbow_py.core.errors import LearnerError
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.device import graphs
from crossbow_py.engine.device.device_tasks import LearnerTasks
from crossbow_py.engine.device.graphs import CudaStreams
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.goodput import EVERY_ROUNDS
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.engine.update.optimizers import SGD, AdamW
from tests.recording_streams import OnlyLaunches, RecordingStreams
from tests.support import IMAGES, assert_equal, features, make_tasks, norm_model, norm_with_dropout, plan, run


def test_bodies_that_are_captured_ask_the_host_for_no_value():
    tasks = make_tasks(norm_model, data=IMAGES, optimizer=SGD(clip_norm=1.0))
    whole, learners = plan(tasks, 0), [LearnerTasks(tasks, learner) for learner in (0, 1)]
    for bodies in learners:
        bodies.load(whole, bank_changed=True, masks_ahead=False)
    with OnlyLaunches():
        for bodies in learners:
            bodies.learn(shared=False, masks_ahead=False)
            bodies.correct(whole.averaging)
        tasks.average(RoundOutcome(whole))
    with pytest.raises(AssertionError, match="the host asked"), OnlyLaunches():
        tasks.learn(0, RoundOutcome(whole))


def steady(device, tasks, num_rounds=1):
    """What is asked of a device in rounds after the captures."""
    runner = StreamsExecutor(tasks, device)
    for n in range(WARM_UP_ROUNDS + 1 + num_rounds):
        if n == WARM_UP_ROUNDS + 1:
            device.log.clear()
        runner.submit(plan(tasks, n))
    found = list(device.log)
    runner.close()
    return found


def test_round_of_a_learner_is_one_replay_that_waits_once_and_one_record():
    found = steady(RecordingStreams(), make_tasks(num_learners=3))
    for learner in range(3):
        own = [entry.removeprefix(f"s{learner} ") for entry in found if entry.startswith(f"s{learner} ")]
        assert own == [
            f"run load({learner})", f"replay step({learner})", "wait high#3", f"run report({learner})",
            f"record s{learner}#4",
        ]  # fmt: skip
    assert [entry.split()[1] for entry in found if entry.startswith("high")] == [*["wait"] * 3, "replay", "record"]


def test_learners_run_in_graphs_though_the_rule_changes_its_coefficients_in_every_round():
    tasks, device = make_tasks(rule=Crossbow(final_correction_rate=0.9)), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    for n in range(5):
        runner.submit(plan(tasks, n, factor=1 - n / 5))
    runner.close()
    assert [entry for entry in device.log if "capture" in entry] == [f"s{j} capture learning({j})" for j in range(2)]


def test_steps_are_captured_for_three_kinds_of_rounds_and_other_rounds_run_in_two_graphs():
    tasks, device = make_tasks(), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    for n in range(20):
        kind = dataclasses.replace(plan(tasks, n).together, correction=0.1 + 0.1 * (n // 4))
        runner.submit(dataclasses.replace(plan(tasks, n), together=kind))
    runner.close()
    captured = [entry.split()[2] for entry in device.log if entry.startswith("s0 capture")]
    assert captured == ["step(0)", "learning(0)", *["step(0)"] * 2, *["correction(0)"] * 2]


def test_graphs_of_before_a_capture_that_failed_elsewhere_are_replayed(monkeypatch):
    tasks, device = make_tasks(), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    for n in range(6):
        if n == WARM_UP_ROUNDS + 1:
            monkeypatch.setattr(graphs, "_FAILED_CAPTURES", ["elsewhere"])
        runner.submit(plan(tasks, n))
    assert device.log.count("s1 replay step(1)") == 6 - WARM_UP_ROUNDS
    runner.close()


def test_only_rounds_that_compare_gradients_run_in_two_graphs():
    tasks, device = make_tasks(compares=True), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    for n in range(2 * EVERY_ROUNDS):
        runner.submit(plan(tasks, n))
    runner.close()
    ran = [entry.split()[2].partition("(")[0] for entry in device.log if entry.startswith(("s0 run", "s0 replay"))]
    apart, as_one = ["learning", "correction"], ["step"]
    own = [apart if n in (0, 1, EVERY_ROUNDS) else as_one for n in range(2 * EVERY_ROUNDS)]
    assert [each for each in ran if each not in ("load", "report")] == [each for names in own for each in names]


def test_beside_replays_the_host_enqueues_one_operator_before_and_one_after_them():
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                eager.append(str(func))
            return func(*args, **(kwargs or {}))

    class Noting(RecordingStreams):
        def run(self, name, body, stream):
            with Operators():
                super().run(name, body, stream)

    images = torch.randint(0, 256, (64, 3, 6, 6), dtype=torch.uint8), torch.arange(64) % 3
    eager, tasks = [], make_tasks(norm_model, data=images)
    steady(Noting(), tasks, num_rounds=3)
    assert eager[-12:] == ["aten.cat.out", "aten.copy_.default"] * 2 * 3  # of two learners in three rounds


def test_model_with_dropout_learns_in_graphs_with_masks_drawn_ahead_of_them():
    tasks, device = make_tasks(norm_with_dropout, data=IMAGES), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    run(runner, tasks, 4)  # graphs of the recording device refuse to draw
    assert runner.notes == []
    captured = {entry.split()[2] for entry in device.log if "capture" in entry}
    assert captured == {"step(0)", "step(1)", "averaging"}


def test_masks_in_graphs_differ_between_rounds_and_learners():
    seen = {0: [], 1: []}

    class Noted(nn.Module):
        def forward(self, inputs):
            return inputs

    def model():
        return nn.Sequential(nn.Dropout(0.5), Noted(), nn.Linear(64, 3))

    tasks = make_tasks(model, data=(torch.ones(64, 64), features(64)[1]))
    for learner, own in seen.items():
        tasks.bank.module(learner)[1].register_forward_hook(
            lambda module, args, output, own=own: own.append(output.detach().clone())
        )
    run(StreamsExecutor(tasks, RecordingStreams()), tasks, 6)
    every = [mask.flatten().tolist() for own in seen.values() for mask in own]
    assert len(every) == len({tuple(mask) for mask in every}) == 12


def test_model_that_no_graph_can_hold_goes_on_without_graphs_and_says_so_once():
    class Widens(nn.Module):
        """Counts its passes, which a graph cannot."""

        def __init__(self):
            super().__init__()
            self.passes, self.dropout, self.linear = 0, nn.Dropout(0.5), nn.Linear(4, 3)

        def forward(self, inputs):
            self.passes += 1
            wide = inputs if self.passes <= WARM_UP_ROUNDS else inputs.repeat(2, 1)
            return self.linear(self.dropout(wide)[: len(inputs)])

    class Tries(RecordingStreams):
        def capture(self, name, body, stream, pool):
            body()
            return super().capture(name, body, stream, pool)

    tasks, device = make_tasks(Widens), Tries()
    runner = StreamsExecutor(tasks, device)
    run(runner, tasks, 5)
    assert runner.notes == [
        "CUDA graphs are not used: step(0) cannot be captured "
        "(RuntimeError: dropout takes masks of other shapes than in the rounds before)."
    ]
    assert not any("replay" in entry for entry in device.log)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random])
def test_model_that_draws_elsewhere_learns_without_graphs_and_says_so(draw):
    class Draws(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * (1 + draw())

    tasks, device = make_tasks(lambda: Draws(4, 3)), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    run(runner, tasks, 4)
    assert len(runner.notes) == 1
    assert "outside nn.Dropout" in runner.notes[0]
    captured = {entry.split()[2] for entry in device.log if "capture" in entry}
    assert captured == {"correction(0)", "correction(1)", "averaging"}


def test_averaging_over_several_devices_is_never_captured():
    class Two(Collective):
        num_devices = 2

    tasks, device = make_tasks(), RecordingStreams()
    tasks.collective = Two()
    run(StreamsExecutor(tasks, device), tasks, 4)
    assert "high capture averaging" not in device.log
    assert "s0 capture correction(0)" in device.log


@pytest.mark.parametrize("refused", ["step(0)", "step(1)", "averaging"])
def test_capture_that_fails_runs_everything_eagerly_as_serial_would(refused):
    class Refuses(RecordingStreams):
        def capture(self, name, body, stream, pool):
            if name == refused:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            return super().capture(name, body, stream, pool)

    ours, reference = (make_tasks(norm_with_dropout, data=IMAGES) for _ in range(2))
    device = Refuses()
    runner = StreamsExecutor(ours, device)
    found, expected = run(runner, ours, 6), run(SerialExecutor(reference), reference, 6)
    assert_equal(ours.bank, reference.bank, found, expected)
    assert runner.notes == [
        f"CUDA graphs are not used: {refused} cannot be captured "
        "(RuntimeError: operation not permitted when stream is capturing)."
    ]
    rounds_4_to_6 = device.log[len(device.log) - device.log[::-1].index("s0 run load(0)") :]
    assert not any("capture" in entry or "replay" in entry for entry in rounds_4_to_6)


def test_switch_runs_tasks_without_graphs_on_the_same_streams(monkeypatch):
    monkeypatch.setenv("CROSSBOW_GRAPHS", "0")
    ours, reference = (make_tasks(norm_with_dropout, data=IMAGES) for _ in range(2))
    device = RecordingStreams()
    runner = StreamsExecutor(ours, device)
    found, expected = run(runner, ours, 5), run(SerialExecutor(reference), reference, 5)
    assert_equal(ours.bank, reference.bank, found, expected)
    assert runner.notes == [
        "CUDA graphs are not used: CROSSBOW_GRAPHS is 0."
    ]
    assert device.log.count("s1 run learning(1)") == device.log.count("high run averaging") == 5


class Full(RecordingStreams):
    """Has no memory for the graph of one name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def capture(self, name, body, stream, pool):
        if name == self.name:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().capture(name, body, stream, pool)


def test_capture_that_memory_does_not_hold_is_the_learners_error_and_leaves_no_graph():
    tasks, device = make_tasks(), Full("step(1)")
    runner = StreamsExecutor(tasks, device)
    with pytest.raises(LearnerError, match=r"learning\(1\) failed in round 2 on learner 1: OutOfMemory") as caught:
        run(runner, tasks, 3)
    assert is_out_of_memory(caught.value.__cause__)
    assert device.log[-2:] == ["host wait all", "release step(0)"]


@pytest.mark.parametrize("name", ["step(2)", "step(1)", "averaging"])
def test_learners_fewer_than_memory_held_go_on_with_the_steps_their_rows_have_taken(name):
    tasks = make_tasks(num_learners=3, optimizer=AdamW())
    runner = StreamsExecutor(tasks, Full(name))
    with pytest.raises(LearnerError):
        run(runner, tasks, 3)
    steps = [3, 3, 3] if name == "averaging" else [2, 2, 2]  # none has stepped if one cannot
    assert tasks.bank.step_counts == steps
    tasks.bank.resize(2)
    run(StreamsExecutor(tasks, RecordingStreams()), tasks, 4)
    assert tasks.bank.step_counts[:2] == [steps[0] + 4, steps[1] + 4]


class Stand:
    """Stands in for torch.cuda: `current` is the stack of current streams. A capture may survive its body's error."""

    def __init__(self, monkeypatch, survives=False):
        self.current, self.asked, self.survives = ["caller"], [], survives
        self.signature = inspect.signature(torch.cuda.graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextlib.contextmanager
    def stream(self, stream):
        before = list(self.current)
        self.current.append(stream)
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, *args, **options):
        self.signature.bind(*args, **options)  # of the installed torch
        self.asked.append(options)
        self.current.append(options["stream"])
        try:
            yield
        except Exception:
            if self.survives:
                self.current.pop()
                raise
            raise RuntimeError("capture was invalidated")  # noqa: B904 - as torch does, its stream left in place
        self.current.pop()


def test_capture_on_cuda_uses_the_stream_of_the_replays_its_pool_and_thread_local_errors(monkeypatch):
    stand, seen = Stand(monkeypatch), []
    CudaStreams(torch.device("cuda")).capture("learning(0)", lambda: seen.append(stand.current[-1]), "s0", "pool")
    assert stand.asked == [{"pool": "pool", "stream": "s0", "capture_error_mode": "thread_local"}]
    assert (seen, stand.current) == (["s0"], ["caller"])


def test_capture_on_cuda_that_fails_raises_what_the_body_raised_and_puts_the_stream_back(monkeypatch):
    def body():
        raise ValueError("the host waits")

    monkeypatch.setattr(graphs, "_FAILED_CAPTURES", [])
    stand = Stand(monkeypatch)
    with pytest.raises(ValueError, match="the host waits"):
        CudaStreams(torch.device("cuda")).capture("learning(0)", body, "s0", "pool")
    assert stand.current == ["caller"]
    assert graphs.failed_capture() == "a capture failed in this process (ValueError: the host waits)"


def test_capture_whose_body_alone_raised_has_ended_and_others_may_follow(monkeypatch):
    def body():
        raise torch.OutOfMemoryError("full")

    stand = Stand(monkeypatch, survives=True)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        CudaStreams(torch.device("cuda")).capture("learning(0)", body, "s0", "pool")
    assert stand.current == ["caller"]
    assert graphs.failed_capture() is None
