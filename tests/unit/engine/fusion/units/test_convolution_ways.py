"""Ways to convolve for all learners: all give the same, and the fastest that does is taken and remembered."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import DeviceLostError
from crossbow_py.core.measured import Remembered
from crossbow_py.core.triton_launch import KernelError
from crossbow_py.engine.device import graphs
from crossbow_py.engine.device.cudnn import searching_libraries
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.fusion.units import unit_step
from crossbow_py.engine.fusion.units.convolution import (
    GROUPED,
    GROUPED_NCHW,
    IMPLICIT,
    Convolution,
    ConvolutionChoices,
    Leaf,
    Operators,
    choices_on,
    key_of,
    ways,
)
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.kernels.statistics import Statistics
from crossbow_py.engine.modules.precision import FP32, FP64
from crossbow_py.engine.trust import assumed
from tests.recording_streams import RecordingStreams
from tests.support import IMAGES, assert_equal, make_tasks, run
from tests.unit.engine.kernels.launches import counted_launches

CPU = torch.device("cpu")
GEOMETRY = Geometry(2, 3, 4, 5, 7, 6, (3, 3), stride=(2, 1), padding=(1, 0))
OPERATORS = (GROUPED, GROUPED_NCHW)


@pytest.fixture
def case():
    g = GEOMETRY
    inputs = torch.randn(g.batch, g.groups * g.in_channels, g.height, g.width, dtype=torch.float64)
    filters = torch.randn(g.groups * g.out_channels, g.in_channels, *g.kernel, dtype=torch.float64)
    bias = torch.randn(g.groups * g.out_channels, dtype=torch.float64)
    outputs = torch.randn(g.batch, g.groups * g.out_channels, *g.out_size, dtype=torch.float64)
    images = [each.contiguous(memory_format=torch.channels_last) for each in (inputs, filters, outputs)]
    return *images[:2], bias, images[2]


@pytest.mark.parametrize("way", OPERATORS)
def test_every_way_gives_what_each_learner_would_get_alone(case, way):
    inputs, filters, bias, given = case
    g, operators = GEOMETRY, Operators(GEOMETRY)
    alone = [
        nn.functional.conv2d(part.requires_grad_(), own.requires_grad_(), shift, g.stride, g.padding, g.dilation)
        for part, own, shift in zip(
            inputs.split(g.in_channels, 1), filters.split(g.out_channels), bias.split(g.out_channels), strict=True
        )
    ]
    expected = torch.cat(alone, 1)
    found = operators.forward(way, inputs, filters, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    leaves = [inputs.detach().requires_grad_(), filters.detach().requires_grad_()]
    out = nn.functional.conv2d(*leaves, bias, g.stride, g.padding, g.dilation, g.groups)
    gradients = torch.autograd.grad(out, leaves, given)
    for of_inputs, gradient in ((True, gradients[0]), (False, gradients[1])):
        mine = operators.gradient(way, given, inputs, filters, of_inputs)
        torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)


def test_kernel_is_a_way_for_its_formats_alone():
    assert ways(torch.float32, CPU) == ways(torch.bfloat16, CPU) == [*OPERATORS, IMPLICIT]
    assert ways(torch.float64, CPU) == [*OPERATORS]


def candidates(*values):
    return {name: lambda value=value: torch.tensor(value) for name, value in zip("abcd", values, strict=False)}


def by_first_value(times):
    """Milliseconds by what a way returns first."""
    return lambda run: times[round(run()[0].item(), 3)]


def test_fastest_way_is_taken_and_remembered_by_what_it_depends_on(tmp_path):
    remembered = Remembered("x", tmp_path / "ways.json")
    given = candidates([0.0, 5.0], [0.001, 5.0], [0.002, 5.0])
    times = by_first_value({0.0: 3.0, 0.001: 1.0, 0.002: 2.0})
    assert ConvolutionChoices(CPU, times, remembered).choose("key", given, "a") == "b"
    assert ConvolutionChoices(CPU, by_first_value({}), remembered).choose("key", given, "a") == "b"  # times nothing
    choices = ConvolutionChoices(CPU, lambda _: 1.0, remembered)
    assert choices.choose("key", candidates([0.0]), "a") == "a"  # what is gone is not taken


def test_remembered_way_that_gives_other_numbers_now_is_not_taken(tmp_path):
    remembered = Remembered("x", tmp_path / "ways.json")
    remembered.remember("key", "b")
    choices = ConvolutionChoices(CPU, lambda _: 1.0, remembered)
    assert choices.choose("key", candidates([1.0], [1.5], [1.0]), "a") == "a"
    assert choices.notes == ["Convolutions never run as b, which gave other numbers than the others."]
    assert remembered.recall("key") == "a"


def test_way_that_gives_other_numbers_or_fails_is_never_taken_and_said_once(tmp_path):
    def fails():
        raise ValueError("CompilationError: at 12:4\n no such type")

    given = {**candidates([1.0], [1.5], [float("nan")]), "d": fails}
    remembered = Remembered("x", tmp_path / "ways.json")
    choices = ConvolutionChoices(CPU, lambda run: 1.0 if run()[0] == 1.0 else 0.1, remembered)
    assert [choices.choose(key, given, "a") for key in ("one", "two")] == ["a", "a"]
    assert choices.notes == [
        "Convolutions never run as b, which gave other numbers than the others.",
        "Convolutions never run as c, which gave other numbers than the others.",
        "Convolutions never run as d, which failed: CompilationError: at 12:4 no such type.",
    ]


def test_way_that_cannot_be_timed_is_not_taken(tmp_path):
    def milliseconds(run):
        if run()[0] != 1.0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 1.0

    choices = ConvolutionChoices(CPU, milliseconds, Remembered("x", tmp_path / "ways.json"))
    assert choices.choose("key", candidates([1.0], [1.001]), "a") == "a"
    assert "operation not permitted" in choices.notes[0]


@pytest.mark.parametrize(("default", "taken"), [("c", "c"), ("d", "a")])
def test_once_a_capture_has_failed_ways_are_fixed_and_nothing_is_timed_or_remembered(
    default, taken, tmp_path, monkeypatch
):
    failed, asked, remembered = [], [], Remembered("x", tmp_path / "ways.json")
    monkeypatch.setattr(graphs, "_FAILED_CAPTURES", failed)

    def milliseconds(run):
        asked.append(run()[0].item())
        failed.append("RuntimeError: by b")
        raise RuntimeError("by b")

    choices = ConvolutionChoices(CPU, milliseconds, remembered)
    given = candidates([1.0], [1.0], [1.0], [1.5])
    assert choices.choose("one", given, default) == taken  # d gives other numbers
    assert choices.choose("two", given, default) == taken
    assert asked == [1.0]
    assert [remembered.recall(key) for key in ("one", "two")] == [None, None]
    assert choices.notes[-1] == (
        "Convolutions run by fixed ways where they were not measured yet, because a capture failed in this process "
        "(RuntimeError: by b)."
    )
    assert [note for note in choices.notes if "which failed" in note] == []


def test_where_nothing_is_timed_the_fixed_way_is_taken_only_if_it_is_right(tmp_path):
    choices = ConvolutionChoices(CPU, None, Remembered("x", tmp_path / "ways.json"))
    given = {**candidates([1.0], [1.0], [1.5]), "unused": fails_with(AssertionError("it is run"))}
    assert [choices.choose(key, given, key) for key in ("a", "b", "c")] == ["a", "b", "a"]
    assert choices.notes == ["Convolutions never run as c, which gave other numbers than the others."]


class OneKernelWrong(ConvolutionChoices):
    """Takes the kernel for every direction, and finds one of its further comparisons wrong, or failing."""

    def __init__(self, wrong, path):
        super().__init__(CPU, None, Remembered("x", path))
        self._wrong, self.compared = wrong, []

    def choose(self, key, candidates, default):
        return IMPLICIT

    def is_right(self, name, run, expected):
        self.compared.append((name, run().dtype))
        return super().is_right(name, fails_with(RuntimeError("ptxas")) if name == self._wrong else run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "left"), [
    ("", (IMPLICIT, IMPLICIT, IMPLICIT)),
    (f"{IMPLICIT} of both gradients", (IMPLICIT, IMPLICIT, GROUPED)),
    (f"{IMPLICIT} with statistics", (GROUPED, IMPLICIT, IMPLICIT)),
], ids=["right", "gradients", "statistics"])  # fmt: skip
def test_kernels_that_a_round_launches_are_compared_with_the_formats_of_the_bank(wrong, left, tmp_path):
    choices = OneKernelWrong(wrong, tmp_path / "ways.json")
    rows = torch.randn(3, 5, 4, 3, 3).to(torch.bfloat16)
    layer = Convolution(Geometry(2, 3, 4, 5, 7, 6, (3, 3), padding=(1, 1)), Leaf(rows, rows.float()), None)
    running = [torch.zeros(15), torch.ones(15)]
    layer.measure(choices, Statistics(*running, 0.1, 1e-5), input_gradient=True)
    assert tuple(layer._ways[each] for each in ("forward", "inputs", "filters")) == left
    assert (f"{IMPLICIT} of both gradients", torch.float32) in choices.compared or wrong.endswith("gradients")
    assert (running[0] == 0).all() and (running[1] == 1).all()
    assert len(choices.notes) == bool(wrong)


def test_first_layer_counts_two_directions_by_kernel(tmp_path):
    rows = torch.randn(3, 5, 4, 3, 3)
    layer = Convolution(Geometry(2, 3, 4, 5, 7, 6, (3, 3), padding=(1, 1)), Leaf(rows, rows.clone()), None)
    layer.measure(OneKernelWrong("", tmp_path / "ways.json"), None, input_gradient=False)
    assert layer.by_kernel == 2


@pytest.mark.parametrize("refused", ["a", "b"])
def test_choice_is_not_remembered_unless_the_first_way_and_another_were_timed(refused, tmp_path):
    remembered, given = Remembered("x", tmp_path / "ways.json"), candidates([1.0], [1.001])

    def milliseconds(run):
        if run is given[refused]:
            raise RuntimeError("not this time")
        return 1.0

    taken = {"a": "b", "b": "a"}[refused]
    assert ConvolutionChoices(CPU, milliseconds, remembered).choose("key", given, "a") == taken
    assert remembered.recall("key") is None
    assert ConvolutionChoices(CPU, lambda _: 1.0, remembered).choose("key", given, "a") == "a"
    assert remembered.recall("key") == "a"


def fails_with(error):
    def fails():
        raise error

    return fails


def failing_first(error, **others):
    return {"first": fails_with(error), "second": lambda: torch.tensor([1.0]), **others}


def test_where_the_first_way_fails_the_kernel_runs_unmeasured_and_is_not_blamed(tmp_path):
    remembered = Remembered("x", tmp_path / "ways.json")
    choices = ConvolutionChoices(CPU, lambda _: 1.0, remembered)
    given = failing_first(RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\n at plan"))
    assert [choices.choose(key, given, "second") for key in ("one", "two")] == ["second"] * 2
    assert choices.notes == [
        "Convolutions that cannot be measured run as second: first, which others are compared with, failed: "
        "CUDNN_STATUS_NOT_SUPPORTED at plan."
    ]
    assert remembered.recall("one") is None


def test_first_way_that_gives_nan_is_named_itself(tmp_path):
    choices = ConvolutionChoices(CPU, lambda _: 1.0, Remembered("x", tmp_path / "ways.json"))
    assert choices.choose("key", candidates([float("nan")], [1.0]), "b") == "b"
    (note,) = choices.notes
    assert "a, which others are compared with, failed: it gave values that are not finite" in note


def test_first_way_that_fails_with_nothing_known_to_be_right_is_an_error_of_kernels(tmp_path):
    choices = ConvolutionChoices(CPU, lambda _: 1.0, Remembered("x", tmp_path / "ways.json"))
    with pytest.raises(KernelError, match="cannot be measured: first, which others are compared with, failed: cuDNN"):
        choices.choose("key", failing_first(RuntimeError("cuDNN")), "first")


@pytest.mark.parametrize("place", ["first", "third"])
def test_want_of_memory_and_a_lost_device_are_no_fault_of_a_way(place, tmp_path):
    choices = ConvolutionChoices(torch.device("cuda"), lambda _: 1.0, Remembered("x", tmp_path / "ways.json"))
    for error, kind in (
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLostError),
    ):
        ways = {"first": lambda: torch.tensor([1.0]), "second": lambda: torch.tensor([1.0]), place: fails_with(error)}
        with pytest.raises(kind):
            choices.choose("key", ways, "second")
    assert choices.notes == []


def test_ways_are_fixed_where_results_must_repeat_and_libraries_then_try_nothing(monkeypatch):
    monkeypatch.setenv("CROSSBOW_KERNELS", "layers,convolutions")
    cuda, cudnn = torch.device("cuda"), torch.backends.cudnn

    def times():
        return choices_on(cuda)._milliseconds is not None

    assert not times()  # without graphs, which ways are measured in
    monkeypatch.setenv("CROSSBOW_GRAPHS", "1")
    assert times()
    assert choices_on(CPU) is None
    with searching_libraries():
        assert cudnn.benchmark
    monkeypatch.setattr(cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "deterministic", True)
    assert not times()
    with searching_libraries():
        assert not cudnn.benchmark
    assert cudnn.benchmark
    monkeypatch.setattr(cudnn, "deterministic", False)
    torch.use_deterministic_algorithms(True)
    try:
        assert not times()
        with searching_libraries():
            assert not cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


class Measured:
    """The choices of every fused pass that is made, by times of ways: notes where and how each way was timed."""

    def __init__(self, monkeypatch, path, milliseconds=lambda run: 1.0):
        self.seen, self._milliseconds = [], milliseconds
        monkeypatch.setattr(
            unit_step, "choices_on", lambda device: ConvolutionChoices(device, self.time, Remembered("x", path))
        )

    def time(self, run):
        self.seen.append((threading.current_thread(), torch.is_grad_enabled(), torch._C._current_graph_task_id()))
        run()
        return self._milliseconds(run)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def executor_of(precision):
    tasks = make_tasks(two_layers, data=IMAGES, order="blocks", precision=precision)
    return FusedExecutor(tasks, RecordingStreams(), kernels=True), tasks


@pytest.mark.slow
def test_ways_are_measured_before_the_first_round_by_the_caller_outside_autograd(monkeypatch, tmp_path):
    def grouped_first(run):
        return 1.0 if run.args[-1] == GROUPED else 2.0

    measured = Measured(monkeypatch, tmp_path / "ways.json", grouped_first)
    runner, tasks = executor_of(FP32)
    # Forward and gradient of the filters of both layers, gradient of the inputs of the second, three ways each.
    assert measured.seen == [(threading.current_thread(), False, -1)] * 5 * 3
    with counted_launches() as launches:
        run(runner, tasks, 1)
    assert len(measured.seen) == 15
    assert (launches["_forward"], launches["_backward"]) == (0, 0)
    assert (launches["convolution"], launches["convolution_backward"]) == (2, 3)


@pytest.mark.slow
def test_grouped_ways_are_timed_with_the_pass_for_statistics_that_follows_them(monkeypatch, tmp_path):
    def forward_launches(run):
        direction, way = run.args
        if direction == "forward":
            with counted_launches() as launches:
                run()
            seen.append((way, launches["_forward"], launches["_statistics_kernel"]))
        return 1.0

    seen = []
    Measured(monkeypatch, tmp_path / "ways.json", forward_launches)
    executor_of(FP32)[0].close()
    with_norm, without = seen[:3], seen[3:]  # of the first layer, and of the second
    assert with_norm == [(GROUPED, 0, 1), (GROUPED_NCHW, 0, 1), (IMPLICIT, 1, 0)]
    assert without == [(GROUPED, 0, 0), (GROUPED_NCHW, 0, 0), (IMPLICIT, 1, 0)]


@pytest.mark.slow
def test_measuring_leaves_the_bank_and_all_generators_as_they_were(monkeypatch, tmp_path):
    tasks = make_tasks(two_layers, data=IMAGES, order="blocks", precision=FP32)
    bank = tasks.bank

    def state():
        rows = [bank.weights, bank.gradients, bank.buffers]
        generators = [torch.get_rng_state(), *(each.get_state() for each in bank.generators)]
        return [each.clone() for each in (*(own.storage for own in rows), *generators)]

    before = state()
    measured = Measured(monkeypatch, tmp_path / "ways.json")
    FusedExecutor(tasks, RecordingStreams(), kernels=True).close()
    assert measured.seen
    assert all(map(torch.equal, before, state()))


@pytest.mark.slow
def test_layers_whose_convolutions_cannot_be_compared_run_by_operators_and_say_so(monkeypatch, tmp_path):
    Measured(monkeypatch, tmp_path / "ways.json")

    def fails(*arguments):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(Operators, "forward", fails)
    with assumed("fused graph", None):  # whose comparison would fail as well
        runner, ours = executor_of(FP64)
    reference = make_tasks(two_layers, data=IMAGES, order="blocks")
    found = run(runner, ours, 3)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 3))
    assert runner.notes == [
        "Kernels for layers are not used: convolutions cannot be measured: grouped_nhwc, which others "
        "are compared with, failed: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED."
    ]


def test_key_depends_on_sizes_direction_format_bias_and_statistics():
    facts = [
        (GEOMETRY, "forward", torch.float32),
        (GEOMETRY, "inputs", torch.float32),
        (GEOMETRY, "forward", torch.bfloat16),
        (Geometry(4, 3, 4, 5, 7, 6, (3, 3), stride=(2, 1), padding=(1, 0)), "forward", torch.float32),
    ]
    extras = [{"bias": True}, {"statistics": True}]
    keys = {key_of(*each, CPU) for each in facts} | {key_of(*facts[0], CPU, **each) for each in extras}
    assert len(keys) == 6


def test_numbers_of_groups_share_a_choice_up_to_each_power_of_two():
    keys = [key_of(replace(GEOMETRY, groups=k), "forward", torch.float32, CPU) for k in range(1, 9)]
    assert [keys.index(key) for key in keys] == [0, 1, 2, 2, 4, 4, 4, 4]


@pytest.mark.slow
def test_layers_that_differ_in_bias_or_norm_alone_are_measured_each_and_share_gradients_of_inputs(
    monkeypatch, tmp_path
):
    torch.manual_seed(0)

    def layers():
        return nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten(), nn.Linear(108, 3),
        )  # fmt: skip

    measured = Measured(monkeypatch, tmp_path / "ways.json")
    tasks = make_tasks(layers, data=IMAGES, order="blocks", precision=FP64)
    FusedExecutor(tasks, RecordingStreams(), kernels=True).close()
    # Two ways each of three forward, and of gradients of the filters and inputs that are the same for all.
    assert len(measured.seen) == 2 * (3 + 1 + 1)
