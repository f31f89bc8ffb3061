"""The roofline: what is counted, against sums worked out by hand; limits and the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import BF16, FP32
from experiments.bench.rounds import Setup
from experiments.throughput import roofline
from experiments.throughput.roofline import (
    OperatorCounter,
    Peaks,
    StepCounts,
    Work,
    batch_bytes,
    count_step,
    count_step_of,
    fused_kernels,
    known_peaks,
    limits,
    peaks,
    roofline_of,
    roofline_text,
    update_bytes,
)

CPU = torch.device("cpu")


def test_counter_of_a_product_a_sum_and_a_view_counts_reads_and_writes() -> None:
    left, right = torch.ones(4, 8), torch.ones(8, 2)
    with OperatorCounter() as counter:
        out = left.mm(right).view(8).relu_()
        torch.empty(100)
    assert float(out.sum()) == 64
    assert counter.num_kernels == 2
    assert counter.fused_bytes == 4 * (32 + 16 + 8)  # the product
    assert counter.operator_bytes == counter.fused_bytes + 4 * (8 + 8)  # and relu, in place


def test_counter_of_a_copy_and_an_expanded_tensor_counts_values_there_are() -> None:
    target, row = torch.zeros(5, 8), torch.ones(1, 8)
    with OperatorCounter() as counter:
        target.copy_(row.expand(5, 8))
    assert (counter.num_kernels, counter.operator_bytes, counter.fused_bytes) == (1, 4 * (8 + 40), 0)


def test_step_of_a_linear_model_has_the_flops_of_its_products() -> None:
    counts = count_step_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2), 7, FP32)
    assert counts.num_parameters == 65
    assert counts.flops == 2 * (2 * 7 * 12 * 5)  # forward and the weights' gradient; the input needs none


def test_convolutions_backward_is_a_kernel_for_each_gradient_that_reads_the_gradient_it_is_given() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.Conv2d(3, 4, 1, bias=False))
    images, given = torch.ones(5, 2, 6, 6), torch.ones(5, 4, 6, 6)
    with OperatorCounter() as counter:
        torch.autograd.grad(module(images), list(module.parameters()), given)
    forward = (360 + 6 + 540) + (540 + 12 + 720)  # values read and written, the first convolution's and the second's
    backward = (2 * 720 + 540 + 12 + 540 + 12) + (2 * 540 + 360 + 6 + 6)
    assert counter.fused_bytes == counter.operator_bytes == 4 * (forward + backward)
    assert counter.num_kernels == 2 + 2 + 1  # the images' own gradient is not asked for


def test_step_of_resnet32_has_412_mflop_an_image_and_half_the_bytes_in_bf16() -> None:
    counts = count_step("resnet32", 16, "bf16")
    assert counts.flops / 16 == pytest.approx(412e6, rel=2e-3)
    assert counts.num_parameters == 464_154
    assert 290 <= counts.num_kernels <= 310
    full = count_step("resnet32", 16, "fp32")
    assert full.flops == counts.flops
    assert full.operator_bytes / counts.operator_bytes == pytest.approx(2, rel=0.01)
    assert 0.55 < full.fused_bytes / full.operator_bytes < 0.7


def test_step_counts_grow_with_the_batch_but_for_the_weights() -> None:
    one, two = (count_step_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 4)), (2, 2, 2), size, BF16)
                for size in (3, 6))  # fmt: skip
    assert two.flops == 2 * one.flops
    assert one.operator_bytes < two.operator_bytes < 2 * one.operator_bytes


def test_bytes_of_updates_and_batches() -> None:
    assert update_bytes(8, 1000, "bf16") == (22 * 8 + 16) * 1000
    assert update_bytes(8, 1000, "fp32") == (20 * 8 + 16) * 1000
    assert batch_bytes("resnet32", 16, 2, "bf16") == 2 * 16 * 3072 * 3
    assert batch_bytes("lenet", 1, 1, "fp32") == 784 * 5


def test_fused_kernels_hang_on_learners_no_more_than_eagerly_and_not_beyond_two() -> None:
    counts = [fused_kernels(Setup("lenet", 16, learners, "fused", "cpu", "fp32")) for learners in (2, 3, 16)]
    assert counts[0] == counts[1] == counts[2]
    assert 20 < counts[0] < 2 * count_step("lenet", 16, "fp32").num_kernels


def test_fused_kernels_of_many_learners_follow_the_third_ones_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Setup] = []

    def round_of(setup: Setup) -> int:
        seen.append(setup)
        return 100 + 7 * setup.num_learners

    monkeypatch.setattr(roofline, "_kernels_of_round", round_of)
    assert fused_kernels(Setup("vgg16", 64, 16, "fused", "cpu", "fp32")) == 100 + 7 * 16
    assert [(setup.num_learners, setup.batch_size, setup.executor) for setup in seen] == [
        (2, 2, "fused"), (3, 2, "fused"),
    ]  # fmt: skip


def test_limit_is_where_flops_or_bytes_take_all_of_the_time() -> None:
    top = Peaks(bytes_per_s=100.0, flops_per_s=1000.0, known=())
    bytes_bind = limits(Work(num_images=8, flops=1000, fused_bytes=200, operator_bytes=400), top, 1.0)
    assert bytes_bind == {
        "round_s": 8.0, "limit_images_per_s": 4.0, "limited_by": "bytes", "share_of_limit": 0.25,
        "unfused_limit_images_per_s": 2.0, "share_of_unfused_limit": 0.5,
    }  # fmt: skip
    flops_bind = limits(Work(num_images=8, flops=4000, fused_bytes=200, operator_bytes=300), top, None)
    assert (flops_bind["limit_images_per_s"], flops_bind["limited_by"]) == (2.0, "FLOPs")
    assert (flops_bind["unfused_limit_images_per_s"], flops_bind["share_of_limit"]) == (2.0, None)


def test_peaks_of_known_devices_are_from_the_table_and_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_peaks("NVIDIA H200")["bytes_per_s"] == 4.3e12
    assert known_peaks("some other device") == {}
    monkeypatch.setattr(roofline, "_MEASURE_S", 0.01)
    monkeypatch.setattr(roofline, "_COPY_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(roofline, "_MATRIX_ROWS", {"cpu": 64})
    measured = peaks.__wrapped__(CPU, "fp32")
    assert measured.known == ()
    assert 1e8 < measured.bytes_per_s < 1e13
    assert 1e7 < measured.flops_per_s < 1e15
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peaks.__wrapped__(torch.device("cuda"), "bf16") == Peaks(4.3e12, 790e12, ("bytes_per_s", "bf16"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a thousand FLOPs, on a device that does ten thousand a second."""
    monkeypatch.setattr(roofline, "count_step", lambda *_: StepCounts(1000, 400, 300, 50, 10))
    monkeypatch.setattr(roofline, "peaks", lambda *_: Peaks(1e9, 10_000.0, ()))
    monkeypatch.setattr(roofline, "fused_kernels", lambda setup: 60)


@pytest.mark.usefixtures("counted")
def test_roofline_of_a_cell_is_a_row_of_the_table() -> None:
    row = roofline_of("lenet", 4, 2, "fp32", 10.0, "cpu")
    batches, update = 2 * 4 * 784 * 5, (20 * 2 + 16) * 10
    assert row["bytes_per_round"] == {
        "step": 600, "update": update, "batches": batches,
        "all": 600 + update + batches, "all_unfused": 800 + update + batches,
    }  # fmt: skip
    assert (row["flops_per_image"], row["flops_per_round"]) == (250.0, 2000)
    assert (row["kernels_eager"], row["kernels_fused"]) == (100, 60)
    assert (row["round_s"], row["limit_images_per_s"], row["share_of_limit"]) == (0.8, 40.0, 0.25)
    lines = roofline_text([row]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:3]]
    assert dict(zip(cells[0], cells[2], strict=True)) == {
        "model": "lenet", "b": "4", "K": "2", "precision": "fp32", "MFLOP an image": "0.0", "MB a round": "0.0",
        "unfused": "0.0", "kernels a round, eager": "100", "fused": "60", "ms a round": "800.00", "images/s": "10",
        "limit": "40", "by": "FLOPs", "share": "25.0 %", "share unfused": "25.0 %",
    }  # fmt: skip
    assert "Limits of cpu, fp32: 1.0 GB/s of a copy (measured), 1e-08 TFLOP/s (measured)." in lines


@pytest.mark.usefixtures("counted")
def test_roofline_of_rounds_that_fail_keeps_what_needs_none_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(setup: Setup) -> int:
        raise UserError("executor=fused cannot run this model: it returns a list.")

    monkeypatch.setattr(roofline, "fused_kernels", fails)
    row = roofline_of("lenet", 4, 2, "fp32", None, "cpu")
    assert (row["kernels_eager"], row["kernels_fused"], row["share_of_limit"]) == (100, None, None)
    assert "lenet K=2: executor=fused cannot run this model: it returns a list." in roofline_text([row])
