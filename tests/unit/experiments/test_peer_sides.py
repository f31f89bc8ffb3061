"""The peers do the training they are timed for: against plain loops of torch, on a CPU and without CUDA graphs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import CrossbowError
from crossbow_py.data.augmentation import Augmentation
from experiments.bench.gate import FinishedError
from experiments.bench.sides import tuned
from experiments.bench.sides.captured import SEED, DeviceFeed, captured, few_ahead, model_step
from experiments.bench.sides.side import Side
from experiments.bench.workers import process_context
from experiments.bench.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Effort, Workload
from experiments.throughput import compiled, sides, vmapped
from tests.unit.experiments.samples import BATCH, CountingGate

Batch = tuple[Tensor, Tensor]


def train(model: nn.Module, batches: list[Batch]) -> None:
    """The plain loop."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def assert_moved_alike(got: nn.Module, expected: nn.Module, start: nn.Module, tolerance: float) -> None:
    models = (got, expected, start)
    vectors = [torch.cat([value.detach().double().flatten() for value in model.parameters()]) for model in models]
    got_moved, expected_moved = (vector - vectors[2] for vector in vectors[:2])
    assert (got_moved - expected_moved).norm() < tolerance * expected_moved.norm()


def test_device_feed_gives_the_batches_of_the_feed_and_goes_round_its_epochs(workload: Workload) -> None:
    ours = DeviceFeed(replace(workload, augmentation=Augmentation(2, True)), 24, torch.float32, channels_last=True)
    theirs = tuned.make_feed(
        workload.tensors(), 24, SEED, "cpu", Augmentation(2, True), workload.mean, workload.std, channels_last=True
    )  # fmt: skip
    first = ours.take(ours.next_picks())
    for number in range(1, 22):  # 64 images of 8 epochs are 512: the last batch is the first 8 of them again
        images, labels = ours.take(ours.next_picks())
        if number < 21:
            expected = theirs.batch(24 * number)
            assert torch.equal(images, expected.inputs)
            assert torch.equal(labels, expected.targets)
    assert torch.equal(images[8:], first[0][:16])


@pytest.mark.parametrize("compiler", [None, "eager"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.3)])
def test_step_of_one_model_moves_weights_as_a_plain_loop_does(
    compiler: str | None, precision: str, tolerance: float, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = workload.make_model()
    trained, expected = copy.deepcopy(start), copy.deepcopy(start)
    monkeypatch.setattr(Workload, "make_model", lambda _: trained)
    step = model_step(precision, 16, workload, compiler)
    feed = DeviceFeed(workload, 16, torch.float32, channels_last=True)
    train(expected, [feed.take(feed.next_picks()) for _ in range(6)])
    for _ in range(6):
        step()
    assert_moved_alike(trained, expected, start, tolerance)


def test_step_on_a_cpu_is_not_captured() -> None:
    assert captured(print, "cpu") is print


def test_step_a_few_ahead_waits_for_the_one_four_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        number = ""

        def synchronize(self) -> None:
            done.append(f"wait{self.number}")

        def record(self) -> None:
            self.number = str(done.count("step"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    step = few_ahead(lambda: done.append("step"))
    for _ in range(6):
        step()
    assert done == [*["wait", "step"] * 4, "wait1", "step", "wait2", "step"]


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILER", "eager")


@pytest.mark.parametrize("side", [Side("compiled", 4, "none", "fp32"), Side("vmap", 3, "none", "bf16")])
def test_peer_ticks_the_images_of_all_learners(side: Side, workload: Workload, without_a_compiler: None) -> None:
    gate = CountingGate(2 * side.num_learners * BATCH)
    with pytest.raises(FinishedError):
        sides.run_side(side, replace(workload, model="mlp"), gate, Effort())  # type: ignore[arg-type]
    assert gate.images == 2 * side.num_learners * BATCH
    assert gate.prepared.detail in {"eager, no CUDA graph", "bf16 weights, eager"}


def test_peer_whose_compiler_fails_says_so_in_one_line(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(compiled, "model_step", fail)
    with pytest.raises(CrossbowError, match=r"^RuntimeError: no such kernel$"):
        sides.run_side(Side("compiled", 1, "none", "fp32"), workload, CountingGate(1), Effort())  # type: ignore[arg-type]


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("make", [perceptron, normed])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_vmap_step_moves_every_model_as_a_plain_loop_does(
    make: Callable[[], nn.Module], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    models = [make().to(dtype) for _ in range(3)]
    stacked: list[tuple[dict[str, Tensor], dict[str, Tensor], Any]] = []
    make_stacked = vmapped._stacked
    monkeypatch.setattr(vmapped, "_stacked", lambda *given: stacked.append(make_stacked(*given)) or stacked[0])
    batches = [(torch.randn(3, 6, 1, 4, 4, dtype=dtype), torch.randint(0, 3, (3, 6))) for _ in range(4)]
    coming = iter(batches)
    step = vmapped.vmap_step(models, lambda: next(coming), "fp32")
    for _ in batches:
        step()
    parameters, buffers, _ = stacked[0]
    for place, start in enumerate(models):
        expected, got = copy.deepcopy(start), copy.deepcopy(start)
        train(expected, [(inputs[place], labels[place]) for inputs, labels in batches])
        got.load_state_dict({name: value[place] for name, value in (parameters | buffers).items()})
        assert_moved_alike(got, expected, start, tolerance)
        for found, wanted in zip(got.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)


def test_vmap_step_on_bf16_weights_keeps_float32_masters() -> None:
    models, inputs = [normed() for _ in range(2)], torch.randn(2, 6, 1, 4, 4, dtype=torch.bfloat16)
    parameters, buffers, _ = vmapped._stacked(models, "bf16 weights")
    assert {value.dtype for value in [*parameters.values(), buffers["1.running_mean"]]} == {torch.bfloat16}
    assert buffers["1.num_batches_tracked"].dtype == torch.int64
    step = vmapped.vmap_step(models, lambda: (inputs, torch.zeros(2, 6, dtype=torch.int64)), "bf16 weights")
    step()
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.float32}


def test_first_form_that_runs_is_taken_and_none_is_an_error() -> None:
    def make(name: str) -> Callable[[], None]:
        def step() -> None:
            if name != "good":
                raise RuntimeError(name)

        return step

    assert vmapped.first_that_runs(("bad", "good"), make)[0] == "good"
    with pytest.raises(RuntimeError, match="worse"):
        vmapped.first_that_runs(("bad", "worse"), make)


def test_compiling_ahead_counts_what_is_done_and_ends_the_rest_with_the_time(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(precision: str, workload: Workload, seconds: int) -> Any:
        process = process_context(__name__).Process(target=time.sleep, args=(seconds,), daemon=True)  # type: ignore[attr-defined]
        process.start()
        started.append(process)
        return process

    monkeypatch.setattr(compiled, "_start", start)
    monkeypatch.setattr(compiled, "usable_cores", lambda: 4)
    start("fp32", workload, 0).join()  # that takes longest: the server starts
    assert compiled.compile_ahead("fp32", [(workload, 0), (workload, 100), (workload, 0), (workload, 100)], 2.0) == 2
    assert compiled.compile_ahead("fp32", [], 2.0) == 0
    assert [process.exitcode for process in started] == [0, 0, -15, 0, -15]
