"""Kernels compiled for the GPU: each against float64, whole rounds against serial and operators, launches counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from crossbow_py.averaging import SMA
from crossbow_py.averaging.rule import LinearRound
from crossbow_py.engine.device.graphs import graph_milliseconds
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.fusion.units import unit_step
from crossbow_py.engine.fusion.units.convolution import ConvolutionChoices
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.kernel_update import choose_kernel_update
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.models import MODELS
from tests.gpu.support import Counting, assert_as_serial, needs_kernels, run, tasks_on_cuda
from tests.support import features, norm_model, plan

pytestmark = [pytest.mark.gpu, needs_kernels]

FORMATS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def images(count=256):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8), torch.arange(count) % 10


def model(name):
    def make():
        torch.manual_seed(1)
        return MODELS[name]().build((3, 32, 32), 10)

    return make


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["layers", "loss", "batches"])
def test_kernels_compile_and_agree_with_operators(family, dtype):
    assert serves(family, torch.device("cuda", torch.cuda.current_device()), dtype) is None


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", [(16, 8, 16, 16, 32, 32), (16, 3, 3, 16, 32, 32), (5, 2, 33, 70, 9, 7)])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_and_gradients_equal_float64(sizes, stride, dtype):
    from crossbow_py.engine.kernels import convolution as kernels  # noqa: PLC0415  Triton is there with CUDA
    from crossbow_py.engine.kernels.geometry import Geometry  # noqa: PLC0415

    g = Geometry(*sizes, kernel=(3, 3), stride=(stride, stride), padding=(1, 1))
    make = {"device": "cuda", "dtype": dtype}
    inputs, given = (
        torch.randn(shape, **make).contiguous(memory_format=torch.channels_last)
        for shape in (
            (g.batch, g.groups * g.in_channels, g.height, g.width),
            (g.batch, g.groups * g.out_channels, *g.out_size),
        )
    )
    filters = torch.randn(g.groups * g.out_channels, g.in_channels, 3, 3, **make) * (9 * g.in_channels) ** -0.5
    filters = filters.contiguous(memory_format=torch.channels_last)
    leaves = [inputs.double().requires_grad_(), filters.double().requires_grad_()]
    out = nn.functional.conv2d(*leaves, None, g.stride, g.padding, g.dilation, g.groups)
    expected = torch.autograd.grad(out, leaves, given.double())
    d_filters = torch.empty_like(filters, dtype=torch.float32)
    workspace = kernels.backward_workspace(g, inputs.device)
    for _ in range(2):  # the second time on counters that set themselves back
        found, _ = kernels.forward(inputs, filters, None, g)
        d_inputs = kernels.backward(
            given, inputs, filters, g, input_gradient=True, filter_gradient=d_filters,
            workspace=workspace,
        )  # fmt: skip
        for ours, theirs in ((found, out), (d_inputs, expected[0]), (d_filters, expected[1])):
            assert (ours - theirs).abs().max() <= FORMATS[dtype] * theirs.abs().max()


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=1e-3, clip_norm=0.5), AdamW()])
def test_update_kernels_are_chosen(optimizer):
    tasks = tasks_on_cuda(norm_model, optimizer, precision=BF16, order="blocks")
    update, note = choose_kernel_update(tasks.bank, optimizer, tasks.update.rule, moves=True)
    assert (update is not None, note) == (True, None)


@pytest.mark.parametrize("num_learners", [1, 3, 8])
def test_rounds_by_kernels_in_float64_equal_serial(num_learners):
    assert_as_serial(FusedExecutor, 12, num_learners=num_learners)


def test_round_of_resnet20_in_float32_equals_serial():
    own = {"make_model": model("resnet20"), "precision": FP32, "data": features(64, (3, 32, 32), 10)}
    assert_as_serial(FusedExecutor, 1, tolerance=1e-4, **own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.9, 1 / 3, 0.0])
def test_move_of_z_by_the_kernel_equals_the_rules_to_the_bit(momentum, dtype):
    from crossbow_py.engine.kernels import update as kernels  # noqa: PLC0415  Triton is there with CUDA

    torch.manual_seed(4)
    z, z_prev, total = (torch.randn(100_003, dtype=dtype, device="cuda") for _ in range(3))
    expected, expected_prev = z.clone(), z_prev.clone()
    kernels.move(z, z_prev, total, momentum)
    SMA().average([expected], [expected_prev], [total], LinearRound(0.3, momentum))
    assert torch.equal(z, expected)
    assert torch.equal(z_prev, expected_prev)


def test_rounds_by_kernels_repeat_to_the_bit_where_libraries_must(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else the fastest algorithms may use atomics
    banks, data = [], images()  # which are drawn
    for _ in range(2):
        tasks = tasks_on_cuda(model("resnet20"), precision=BF16, order="blocks", data=data, batch_size=16)
        run(FusedExecutor, tasks, 8)
        banks.append(tasks.bank)
    assert torch.equal(banks[0].z.storage, banks[1].z.storage)


@pytest.mark.parametrize("num_learners", [1, 8])
def test_replayed_round_of_resnet32_is_at_most_200_launches(num_learners, monkeypatch):
    """With the kernel for every convolution; libraries, where they are faster, take what they take."""
    monkeypatch.setattr(unit_step, "choices_on", lambda device: None)
    tasks = tasks_on_cuda(
        model("resnet32"), precision=BF16, order="blocks", data=images(), batch_size=16, num_learners=num_learners
    )
    device = Counting(tasks.bank.device)
    runner = FusedExecutor(tasks, device)
    for n in range(WARM_UP_ROUNDS + 2):
        runner.submit(plan(tasks, n))
    runner.drain()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        runner.submit(plan(tasks, n + 1))
        runner.drain()
    runner.close()
    on_device = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert runner.notes == []
    assert sum("_forward" in event.name for event in on_device) == 31
    assert len(on_device) <= 200


def test_ways_of_a_convolution_are_timed_in_graphs(tmp_path):
    from crossbow_py.core.measured import Remembered  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    small, large = (torch.randn(size, size, device=device) for size in (64, 4096))
    choices = ConvolutionChoices(device, graph_milliseconds(device), Remembered("x", tmp_path / "ways.json"))
    ways = {"slow": lambda: (large @ large).new_ones(1), "fast": lambda: (small @ small).new_ones(1)}
    assert choices.choose("key", ways, "slow") == "fast"


def test_run_by_kernels_learns(tmp_path):
    from tests.trainers import Recorder, image_model, make_trainer  # noqa: PLC0415
    from tests.trainers import images as shapes  # noqa: PLC0415

    trainer = make_trainer(
        model=image_model, train_data=shapes(60), test_data=shapes(60), mean=(0.4,), std=(0.2,), precision="bf16",
        device="cuda", executor="fused", num_learners=3, callbacks=[recorder := Recorder()],
    )  # fmt: skip
    trainer.fit(max_epochs=14)
    # The best of the last epochs: z of so few samples may lose a class for an epoch, on a CPU too.
    assert max(record.test_accuracy for record in recorder.of("epoch")[-5:]) > 0.9
