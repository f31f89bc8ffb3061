"""What holds on CPU holds on CUDA: the serial executor, the feed, precision and whole runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from crossbow_py import SGD, Augmentation, CheckpointSettings
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from crossbow_py.engine.update.optimizers import AdamW
from crossbow_py.telemetry.timeline import Timeline
from tests.event_files import read_events
from tests.gpu.support import needs_gpu, tasks_on_cuda
from tests.support import plan, run_rounds
from tests.trainers import equal_states, image_model, images, make_trainer

pytestmark = pytest.mark.gpu


def state_after(device, optimizer, precision, rounds):
    tasks = tasks_on_cuda(optimizer=optimizer, precision=precision, device=device)
    run_rounds(tasks, "serial", rounds, learning_rate=0.05)
    return torch.cat([value.double().flatten().cpu() for value in tasks.bank.z.shaped().values()])


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=1e-3), AdamW()])
def test_serial_on_cuda_after_twenty_rounds_in_float64_equals_cpu(optimizer):
    ours, reference = (state_after(device, optimizer, FP64, 20) for device in ("cuda", "cpu"))
    assert (ours - reference).norm() / reference.norm() <= 1e-8


def test_serial_on_cuda_after_one_round_in_float32_equals_cpu():
    ours, reference = (state_after(device, SGD(), FP32, 1) for device in ("cuda", "cpu"))
    assert (ours - reference).norm() / reference.norm() <= 1e-5


def test_bf16_on_cuda_follows_float32():
    ours, reference = (state_after("cuda", SGD(momentum=0.0), precision, 3) for precision in (BF16, FP32))
    assert 0 < (ours - reference).norm() / reference.norm() < 0.01


def test_serial_on_cuda_traced_has_spans_of_its_stream_one_after_another():
    tasks, timeline = tasks_on_cuda(precision=FP32), Timeline()
    begin_ns = timeline.clock()
    runner = EXECUTORS["serial"](tasks)
    runner.trace(timeline)
    for n in range(5):
        runner.submit(plan(tasks, n))
    runner.drain()
    end_ns = timeline.clock()
    spans = timeline._spans
    assert [span.name for span in spans[:7]] == ["learning"] * 3 + ["correction"] * 3 + ["averaging"]
    assert len(spans) == 5 * 7
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))
    assert all(span.start_ns < span.end_ns for span in spans)
    assert begin_ns <= spans[0].start_ns
    assert spans[-1].end_ns <= end_ns + 1_000_000  # two clocks, and one of them told in steps


@needs_gpu
def test_run_on_cuda_is_watched_by_nvml_and_its_scalars_are_recorded(tmp_path):
    make_trainer(device="cuda", output_dir=tmp_path).fit(max_epochs=2)
    tags = read_events(tmp_path / "tensorboard").Tags()["scalars"]
    assert {"system/process_memory_gib", "gpu/0/memory_gib"} <= set(tags)


def test_bank_on_cuda_is_in_blocks_and_its_prefix_is_a_grouped_weight_without_a_copy():
    bank = tasks_on_cuda(precision=FP32).bank
    grouped = bank.stacked()["0.weight"].flatten(0, 1)
    assert (bank.order, grouped.data_ptr()) == ("blocks", bank.weights.storage.data_ptr())
    assert grouped.is_contiguous(memory_format=torch.channels_last)


def plain_model():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    return nn.Sequential(*layers)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_run_on_cuda_with_augmentation_learns_what_it_learns_on_a_cpu(precision, tolerance):
    def trained(device, precision):
        trainer = make_trainer(
            model=plain_model, train_data=images(60), test_data=images(60), augmentation=Augmentation(2, flip=True),
            mean=(0.4,), std=(0.2,), precision=precision, device=device, executor="auto",
        )  # fmt: skip
        model = trainer.fit(max_epochs=3).model
        return torch.cat([value.detach().double().flatten().cpu() for value in model.parameters()])

    ours, reference = trained("cuda", precision), trained("cpu", "fp32")
    assert (ours - reference).norm() / reference.norm() <= tolerance


def test_run_on_cuda_stopped_and_resumed_goes_on_from_the_same_state(tmp_path):
    options = {
        "model": image_model, "train_data": images(60), "device": "cuda", "output_dir": tmp_path,
        "checkpoint": CheckpointSettings(every_epochs=1),
    }  # fmt: skip
    stopped = make_trainer(**options).fit(max_samples=32)
    resumed = make_trainer(**options, resume=tmp_path)
    assert equal_states(resumed.fit(max_samples=32).model, stopped.model)
