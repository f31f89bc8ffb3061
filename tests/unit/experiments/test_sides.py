"""The sides do the work they are timed for, and count it right."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import CrossbowError
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.train.trainer import Trainer
from experiments.bench import workloads
from experiments.bench.gate import FinishedError, Paced, Settling
from experiments.bench.sides import tuned
from experiments.bench.sides.captured import SEED, DeviceFeed, few_ahead, model_step
from experiments.bench.sides.side import Side
from experiments.bench.sides.tuned import Form
from experiments.bench.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Effort, Workload
from experiments.throughput import run, sides
from tests.unit.experiments.samples import BATCH, DEFAULT, TUNED, WITH, WITHOUT, CountingGate

NO_EFFORT = Effort(trial_s=0.0, trials=1, tuning_s=0.0)


def quick(workload: Workload) -> Workload:
    return replace(workload, model="mlp")


@pytest.mark.parametrize("side", [DEFAULT, TUNED, Side("tuned_single", 1, "none", "bf16")])
def test_single_side_ticks_once_a_batch(side: Side, workload: Workload) -> None:
    gate = CountingGate(10 * BATCH)
    with pytest.raises(FinishedError):
        sides.run_side(side, quick(workload), gate, NO_EFFORT)  # type: ignore[arg-type]
    assert gate.images == 10 * BATCH
    assert gate.prepared.threads >= 1


@pytest.mark.parametrize("side", [Side("serial", 1, "sma", "fp32"), WITH, WITHOUT])
def test_executor_side_counts_the_batches_of_all_learners(
    side: Side, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Trainer] = []

    class Recorded(Trainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            built.append(self)

    monkeypatch.setattr(sides, "Trainer", Recorded)
    gate = CountingGate(20 * BATCH)
    with pytest.raises(FinishedError):
        sides.run_side(side, quick(workload), gate, NO_EFFORT)  # type: ignore[arg-type]
    assert gate.images == built[0].state.round_index * BATCH * side.num_learners
    assert gate.prepared.threads == 1


@pytest.mark.parametrize(("sgd", "arithmetic", "tolerance"), [
    ("foreach", "fp32", 1e-5), ("fused", "fp32", 1e-5), ("fused", "autocast", 0.3), ("foreach", "bf16 weights", 0.3),
])  # fmt: skip
def test_tuned_step_moves_weights_as_a_plain_sgd_loop_does(
    sgd: str, arithmetic: str, tolerance: float, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    start, trained, reference = (workload.make_model() for _ in range(3))
    for model in (trained, reference):
        model.load_state_dict(start.state_dict())
    monkeypatch.setattr(Workload, "make_model", lambda _: trained)
    step = tuned.make_step(Form(arithmetic, sgd), workload)
    feed = tuned.make_feed(workload.tensors(), BATCH, 0, "cpu", Augmentation(), workload.mean, workload.std)
    batches = [feed.batch(number * BATCH) for number in range(5)]
    assert_moves_as_a_plain_loop(
        step, trained, reference, start, [(each.inputs, each.targets) for each in batches], tolerance
    )


def assert_moves_as_a_plain_loop(
    step: Any, trained: nn.Module, reference: nn.Module, start: nn.Module, batches: list[tuple[Tensor, Tensor]],
    tolerance: float,
) -> None:  # fmt: skip
    optimizer = torch.optim.SGD(reference.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for inputs, labels in batches:
        step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    weights = (torch.cat([each.detach().double().flatten() for each in model.parameters()])
               for model in (trained, reference, start))  # fmt: skip
    got, expected, before = weights
    assert (got - expected).norm() < tolerance * (expected - before).norm()


def test_device_feed_gives_the_batches_of_the_feed_and_goes_round_its_epochs(workload: Workload) -> None:
    ours = DeviceFeed(replace(workload, augmentation=Augmentation(2, True), batch_size=24), torch.float32)
    theirs = tuned.make_feed(
        workload.tensors(), 24, SEED, "cpu", Augmentation(2, True), workload.mean, workload.std, channels_last=True
    )  # fmt: skip
    first = ours.next()
    for number in range(1, 22):  # 64 images of 8 epochs are 512: the last batch is the first 8 of them again
        images, labels = ours.next()
        if number < 21:
            expected = theirs.batch(24 * number)
            assert torch.equal(images, expected.inputs)
            assert torch.equal(labels, expected.targets)
    assert torch.equal(images[8:], first[0][:16])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.3)])
def test_captured_step_moves_weights_as_a_plain_loop_does(
    precision: str, tolerance: float, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = workload.make_model()
    trained, reference = copy.deepcopy(start), copy.deepcopy(start)
    monkeypatch.setattr(Workload, "make_model", lambda _: trained)
    step, feed = model_step(precision, workload), DeviceFeed(workload, torch.float32)
    assert_moves_as_a_plain_loop(step, trained, reference, start, [feed.next() for _ in range(6)], tolerance)


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


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 12]), (64, [*range(1, 9), 16, 32, 64])]
)
def test_thread_counts_cover_few_cores_all_and_many_by_doubling(cores: int, counts: list[int]) -> None:
    assert tuned.thread_counts(cores) == counts


def test_fastest_takes_the_choice_with_the_best_window(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Form("fp32", "foreach"), Form("fp32", "fused")
    rates = iter([5.0, 6.0, 7.0, 1.0, 5.0, 6.0, 7.0, 9.0, 5.0, 6.0, 7.0, 1.0])
    monkeypatch.setattr(tuned, "_steps_per_s", lambda step, seconds: next(rates))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert tuned.fastest({slow: print, fast: print}, [1, 2], Effort(trials=3)) == (fast, 2)


def test_workload_without_the_data_set_is_synthetic_of_its_shape(workload: Workload) -> None:
    images, labels = workload.tensors()
    assert (workload.data, tuple(images.shape), images.dtype) == ("synthetic", (64, 1, 28, 28), torch.uint8)
    assert len(labels) == 64


def test_workload_of_resnet50_is_a_few_large_synthetic_images_beside_those_of_others(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "LARGE", replace(workloads.LARGE, num_classes=3))
    monkeypatch.setattr(workloads, "NUM_LARGE_IMAGES", 4)
    folder = tmp_path / "both"
    folder.mkdir()
    found = workloads.prepare_all(["resnet50", "mlp"], 2, "cpu", folder)
    large = found["resnet50"]
    assert (large.data, large.image_shape, large.num_classes) == ("synthetic 224 px", (3, 224, 224), 3)
    assert (len(large.tensors()[1]), large.augmentation) == (4, Augmentation(0, True))
    assert found["mlp"].image_shape == (1, 28, 28)
    assert workloads.LARGE.shape == (3, 224, 224)


def test_throughput_command_line_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = ["--device", "cpu", "--sides", "streams"]
    for arguments in (["--num-learners", "0"], ["--seconds", "-1"], ["--model", "nothing"], on_cpu):
        with pytest.raises(SystemExit) as ended:
            run.main(arguments)
        assert ended.value.code == 2
        assert arguments[-2] in capsys.readouterr().err


class Wanting(CountingGate):
    """Wants so many learners in one window after another."""

    def __init__(self, *wanted: int | None) -> None:
        super().__init__(10**9)
        self.wanted = list(wanted)

    @property
    def num_learners(self) -> int | None:
        return self.wanted.pop(0)


def end(num_learners: int, elapsed_s: float = 0.0, is_settled: bool = True) -> RoundEnd:
    return RoundEnd(4 * num_learners, elapsed_s, 0.0, num_learners, is_settled)


def test_pace_asks_for_the_learners_of_a_window_and_fails_where_memory_does_not_hold_them() -> None:
    gate = Wanting(None, 4, None)
    paced = Paced(gate)
    assert [paced(end(2)), paced(end(2)), paced(end(4))] == [2, 4, 4]
    assert gate.images == 8 + 8 + 16
    with pytest.raises(CrossbowError, match="memory does not hold 4 learners"):
        paced(end(3))


@pytest.mark.parametrize(("ends", "settled_at"), [
    ([end(1, 1.0, False), end(2, 2.0, True)], 2.0), ([end(1, 1.0, False), end(1, 9.0, False)], 9.0),
])  # fmt: skip
def test_auto_side_is_left_alone_until_it_has_settled_or_its_time_is_over(
    ends: list[RoundEnd], settled_at: float
) -> None:
    told: list[float] = []
    settling = Settling(Wanting(None), 5.0, lambda end: told.append(end.elapsed_s))
    assert [settling(each) for each in ends] == [None, ends[-1].num_learners]
    assert told == [settled_at]
    assert settling(ends[-1]) == ends[-1].num_learners
