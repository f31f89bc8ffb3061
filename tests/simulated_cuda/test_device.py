"""What a simulated device does as a GPU does: it is late, in any allowed order, and refuses what CUDA refuses.

python -m tests.simulated_cuda pytest -m gpu tests/simulated_cuda
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.simulated_cuda.__main__ import refusal
from tests.simulated_cuda.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMULATED_CUDA_LIBRARY" not in os.environ, reason="run by python -m tests.simulated_cuda"),
]


@pytest.fixture
def scheduler():
    """The scheduler, doing nothing by itself until the host waits; what raced is forgotten afterwards."""
    from tests.simulated_cuda.torch_cuda import simulation  # noqa: PLC0415  there alone

    found = simulation().scheduler
    torch.cuda.synchronize()
    before, found.order = found.order, "latest"
    yield found
    found.order = before
    torch.cuda.synchronize()
    found.races.take()


def ones(*size):
    return torch.ones(*size, device="cuda")


def run(program, **settings):
    """In a process of its own, whose device has other settings."""
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip


# Has imported torch, and forks for each line: a program in JSON. Answers with its exit code and output.
FORKS = """
import json, os, sys, tempfile
import torch
import tests.simulated_cuda.operators
for line in sys.stdin:
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            exec(json.loads(line), {"__name__": "__main__"})
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read().decode()]), flush=True)
"""


@pytest.fixture(scope="module")
def forked():
    """Runs programs each in a process of its own, as nothing can be captured, or nothing can run, after them."""
    command, settings = [sys.executable, "-c", FORKS], {**os.environ, "SIMULATED_CUDA_STRICT": "0"}
    with subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run_forked(program):
            print(json.dumps(program), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run_forked
        process.stdin.close()


def late(value, stream):
    """A tensor that gets its values on a stream, from memory that was written before."""
    made = torch.full((4,), value, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        return made.mul_(2)


def test_work_is_done_only_when_the_host_waits_for_it(scheduler):
    kept = ones(3)
    torch.cuda.synchronize()
    done = scheduler.num_done
    kept.add_(1)
    assert scheduler.num_done == done
    assert kept.tolist() == [2.0] * 3


def test_stream_that_waits_for_another_reads_what_that_wrote(scheduler):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    written = late(3.0, first)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        assert (written + 1).tolist() == [7.0] * 4
    assert scheduler.races.take() == []


def test_stream_that_does_not_wait_reads_too_early_and_is_found(scheduler):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    written = late(3.0, first)
    with torch.cuda.stream(second):
        assert (written + 1).tolist() == [4.0] * 4
    (sentence,) = scheduler.races.take()
    assert "aten::add on stream" in sentence and "is not ordered after aten::mul" in sentence


def test_race_is_found_though_the_order_happens_to_be_right(scheduler):
    scheduler.order = "earliest"
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    written = late(3.0, first)
    with torch.cuda.stream(second):
        assert (written + 1).tolist() == [7.0] * 4
    assert len(scheduler.races.take()) == 1


def test_host_that_has_waited_orders_what_it_enqueues_next(scheduler):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    written = late(3.0, first)
    first.synchronize()
    with torch.cuda.stream(second):
        written.add_(1)
    assert scheduler.races.take() == []


def test_event_waited_for_is_the_record_before_the_wait(scheduler):
    first, second, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    early = late(1.0, first)
    event.record(first)
    second.wait_event(event)
    with torch.cuda.stream(first):
        later = late(5.0, first)
    event.record(first)
    with torch.cuda.stream(second):
        assert early.tolist() == [2.0] * 4
    assert not event.query()
    assert later.tolist() == [10.0] * 4


def test_stream_that_is_asked_whether_it_is_done_goes_on(scheduler):
    stream = torch.cuda.Stream()
    written = late(1.0, stream)
    assert not stream.query()
    assert any(stream.query() for _ in range(10))
    assert written.tolist() == [2.0] * 4
    assert scheduler.races.take() == []


def test_thirty_third_stream_is_the_first_again():
    ids = [torch.cuda.Stream().stream_id for _ in range(64)]
    assert ids[:32] == ids[32:]
    assert torch.cuda.Stream(priority=-1).stream_id not in ids


def test_pinned_buffer_changed_before_its_copy_ran_spoils_the_copy(scheduler):
    host = torch.zeros(4).pin_memory()
    assert host.is_pinned()
    copy = host.to("cuda", non_blocking=True)
    host.fill_(7)
    assert copy.tolist() == [7.0] * 4


def test_pageable_memory_is_staged_when_the_call_is_made(scheduler):
    host = torch.zeros(4)
    copy = host.to("cuda", non_blocking=True)
    host.fill_(7)
    assert copy.tolist() == [0.0] * 4


def pinned(dtype=torch.float32, memory_format=torch.contiguous_format):
    return torch.full((2, 3, 4, 5), 3, dtype=dtype).to(memory_format=memory_format).pin_memory()


# What is copied from pinned memory, and to which dtype: all but the last take the pinned memory as it is.
UPWARDS = {
    "same": (pinned, torch.float32),
    "channels_last": (lambda: pinned(torch.uint8, torch.channels_last), torch.uint8),
    "another dtype": (lambda: pinned(torch.float64), torch.float32),
    "slice": (lambda: pinned()[1:], torch.float32),
    "columns": (lambda: pinned()[..., :2], torch.float32),
}


@pytest.mark.parametrize("name", UPWARDS)
def test_asynchronous_copy_from_pinned_memory_reads_it_late_unless_the_host_gathers_it(scheduler, name):
    make, dtype = UPWARDS[name]
    host = make()
    torch.cuda.set_sync_debug_mode("error")
    copy = host.to("cuda", dtype, non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
    assert (copy.dtype, copy.stride()) == (dtype, torch.empty_like(host).stride())
    host.fill_(7)
    assert copy.cpu().unique().tolist() == [3 if name == "columns" else 7]


def test_asynchronous_copy_to_pinned_memory_is_written_late_unless_the_host_spreads_it(scheduler):
    source, last = ones(2, 3, 4, 5), torch.channels_last
    targets = [pinned(torch.float64), pinned(), pinned(memory_format=last)]
    sources = [source, source.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), source.to(memory_format=last)]
    for target, own in zip(targets, sources, strict=True):
        target.copy_(own, non_blocking=True)
        assert target.unique().tolist() == [3]
    torch.cuda.synchronize()
    assert [target.unique().tolist() for target in targets] == [[1]] * 3
    spread = pinned()[..., :2]
    spread.copy_(source[..., :2], non_blocking=True)
    assert spread.unique().tolist() == [1]


def test_pinned_memory_changed_before_the_host_waits_is_found_though_it_was_read_in_time(scheduler):
    scheduler.order = "earliest"
    host, written = torch.full((4,), 3.0).pin_memory(), torch.zeros(4).pin_memory()
    copy = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(7)
    assert scheduler.races.take() == []
    copy = host.to("cuda", non_blocking=True)
    written.copy_(copy, non_blocking=True)
    copy.copy_(written, non_blocking=True)  # which a device changes meanwhile, in order
    host.fill_(8)
    assert copy.tolist() == [7.0] * 4
    (sentence,) = scheduler.races.take()
    assert "by the host is not ordered after copy to the device" in sentence


def test_pinned_results_are_there_only_after_the_event(scheduler):
    host = torch.zeros(3, dtype=torch.float64).pin_memory()
    host.copy_(ones(3).double(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert host.tolist() == [0.0] * 3
    event.synchronize()
    assert host.tolist() == [1.0] * 3


PINNED_FIRST = [
    "torch.ones(3).pin_memory()",
    "torch.empty(3, pin_memory=True)",
    "list(torch.utils.data.DataLoader(torch.arange(3), pin_memory=True))[0]",
]


@pytest.mark.parametrize("program", PINNED_FIRST)
def test_memory_is_pinned_though_nothing_has_initialised_cuda(forked, program):
    assert forked(f"import torch; print(({program}).is_pinned())") == [0, "True\n"]


def test_memory_freed_under_another_stream_is_overwritten_unless_it_was_recorded(scheduler):
    other, found = torch.cuda.Stream(), {}
    for records in (True, False):
        kept = ones(1024)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            result = kept * 3
            if records:
                kept.record_stream(other)
        del kept
        again = torch.empty(1024, device="cuda").fill_(5)  # on the first stream
        torch.cuda.current_stream().synchronize()
        other.synchronize()
        found[records] = result.sum().item()
        assert bool(scheduler.races.take()) is not records
        del again
    assert found == {True: 3 * 1024, False: 15 * 1024}


@pytest.mark.parametrize("waits", [None, "before", "after"])
def test_memory_freed_while_another_stream_uses_it_is_found_whatever_is_allocated_next(scheduler, waits):
    home, other, kept = torch.cuda.current_stream(), torch.cuda.Stream(), ones(1024)
    other.wait_stream(home)
    with torch.cuda.stream(other):
        kept.mul_(3)
    if waits == "before":
        home.wait_stream(other)
    del kept
    if waits == "after":  # which is as good, as nothing was allocated in between
        home.wait_stream(other)
    ones(1)
    torch.cuda.synchronize()
    found = [each.split(" on ")[0] for each in scheduler.races.take()]
    assert found == ([] if waits else ["reuse of memory"])


HOST_READS = {
    "item": lambda values: values[0].item(),
    "bool": lambda values: bool(values[0]),
    "equal": lambda values: torch.equal(values, values),
    "nonzero": lambda values: values.nonzero(),
    "unique": lambda values: values.unique(),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_value_for_the_host_is_read_on_the_current_stream(scheduler, name):
    scheduler.order = "earliest"
    other, kept = torch.cuda.Stream(), ones(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        kept.mul_(2)
    HOST_READS[name](kept)
    assert any("is not ordered after aten::mul" in sentence for sentence in scheduler.races.take())
    torch.cuda.synchronize()
    HOST_READS[name](kept)
    with torch.cuda.stream(other):
        kept.mul_(2)  # the host has waited for what it read
    assert scheduler.races.take() == []


def test_memory_that_nobody_wrote_is_nan():
    assert math.isnan(torch.empty(100, device="cuda").sum().item())
    assert torch.empty(2, dtype=torch.int64, device="cuda").tolist() == [-1, -1]


def test_conjugate_and_negative_views_are_resolved_by_copies():
    values = torch.tensor([1 + 2j, 3 - 1j])
    there, expected = values.cuda(), [1 - 2j, 3 + 1j]
    copied = torch.empty_like(there).copy_(there.conj())
    for each in (copied, there.conj().cpu(), values.conj().cuda(), there.conj().clone()):
        assert each.resolve_conj().tolist() == expected
    assert values.pin_memory().conj().to("cuda", non_blocking=True).tolist() == expected
    assert there.conj().imag.clone().tolist() == [-2.0, 1.0]
    assert (there @ there.conj()).item() == 15


def test_operators_that_return_nothing_are_done(scheduler):
    weight, tested = torch.nn.Parameter(ones(3)), torch.zeros((), device="cuda")
    weight.grad = ones(3) * 2
    torch._amp_foreach_non_finite_check_and_unscale_([weight.grad], tested, torch.full((), 0.5, device="cuda"))
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    assert (weight.tolist(), tested.item()) == ([0.5] * 3, 0.0)
    values, places = torch.cummax(torch.tensor([2.0, 1.0, 3.0], device="cuda"), 0)
    assert (values.tolist(), places.tolist()) == ([2.0, 2.0, 3.0], [0, 0, 2])


DEPENDING_ON_VALUES = {
    "nonzero": (lambda x: x.nonzero().flatten(), [0, 2]),
    "argwhere": (lambda x: torch.argwhere(x).flatten(), [0, 2]),
    "masked_select": (lambda x: x.masked_select(x > 0), [1, 1]),
    "mask": (lambda x: x[x > 0], [1, 1]),
    "unique": (lambda x: x.unique(return_counts=True)[1], [1, 2]),
    "bincount": (lambda x: x.bincount(), [1, 2]),
    "repeat_interleave": (lambda x: x.repeat_interleave(x), [1, 1]),
    "nonzero(out=)": (lambda x: torch.nonzero(x, out=ones(0, 1).long())[:, 0], [0, 2]),
}


@pytest.mark.parametrize("name", DEPENDING_ON_VALUES)
def test_results_whose_shape_depends_on_values_keep_them_in_reused_memory(scheduler, name):
    operator, expected = DEPENDING_ON_VALUES[name]
    values = torch.tensor([1, 0, 1], device="cuda")
    for _ in range(3):
        found = operator(values)
        assert (found + 0).tolist() == expected
        del found


def test_numbers_that_stand_for_tensors_are_promoted_as_numbers():
    whole, half = torch.tensor([3, 4], device="cuda"), torch.tensor(3.0, dtype=torch.float16, device="cuda")
    assert (whole % 2).tolist() == [1, 0]
    assert (whole % 2.5).dtype == torch.float32
    assert (half % 2.5).dtype == torch.float16
    assert torch.bitwise_left_shift(1, whole).tolist() == [8, 16]
    picked = torch.take_along_dim(whole[None], torch.tensor([[1]], device="cuda"), 1)
    assert picked.tolist() == [[4]]


def test_operators_that_a_cpu_has_not_are_refused_and_leave_the_device_as_it_is():
    with pytest.raises(NotImplementedError, match="no kernel of the simulated device for aten::_thnn_fused_lstm_cell"):
        torch.ops.aten._thnn_fused_lstm_cell(ones(2, 16), ones(2, 16), ones(2, 4))
    assert ones(2).tolist() == [1.0, 1.0]


def test_outer_products_need_no_kernel_of_triton():
    assert torch.bmm(ones(2, 3, 1), ones(2, 1, 4)).sum().item() == 24


def test_copies_of_another_shape_are_refused_and_those_of_nothing_done():
    with pytest.raises(RuntimeError, match="must match the existing size"):
        ones(3).copy_(ones(2))
    with pytest.raises(RuntimeError, match="must match the existing size"):
        ones(0).copy_(torch.ones(2))
    assert ones(0, 3).copy_(ones(3)).shape == (0, 3)
    assert ones(2, 3).copy_(torch.arange(3)).tolist() == [[0.0, 1.0, 2.0]] * 2


def test_tensor_that_grows_keeps_its_values(scheduler):
    kept = torch.arange(4.0, device="cuda")
    kept.resize_(400)
    assert kept[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_out_of_memory_is_torchs_own_error_and_passes(scheduler):
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 2**20
    del kept
    assert torch.cuda.memory_allocated() == before


def test_memory_summary_counts_what_tensors_hold(scheduler):
    before = torch.cuda.memory_stats()["allocation.all.current"]
    kept = [ones(1), ones(1)]
    assert torch.cuda.memory_stats()["allocation.all.current"] - before == len(kept)
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_random_numbers_follow_from_seed_and_offset(scheduler):
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(5, device="cuda")
    second = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), first) and not torch.equal(first, second)
    own = torch.Generator("cuda").manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda", generator=own), first)


# ---- graphs


def captured(body, stream=None, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"):
        body()
    return graph


def test_graph_runs_only_when_replayed_and_reads_addresses(scheduler):
    inputs, result = ones(3), torch.zeros(3, device="cuda")
    graph = captured(lambda: result.add_(inputs * 2))
    assert result.tolist() == [0.0] * 3
    inputs.fill_(5)
    graph.replay()
    graph.replay()
    assert result.tolist() == [20.0] * 3


def test_graph_draws_new_numbers_at_every_replay(scheduler):
    result = torch.zeros(3, device="cuda")
    graph = captured(lambda: result.copy_(torch.rand(3, device="cuda")))
    graph.replay()
    first = result.tolist()
    graph.replay()
    assert result.tolist() != first


def test_graph_that_reads_what_was_freed_since_is_found(scheduler):
    kept, result = [ones(3)], torch.zeros(3, device="cuda")
    graph = captured(lambda: result.copy_(kept[0]))
    graph.replay()
    assert scheduler.races.take() == []
    kept.clear()
    graph.replay()
    (sentence,) = scheduler.races.take()
    assert "uses memory that was freed" in sentence


def test_graph_with_pinned_memory_that_was_freed_since_is_found(scheduler):
    for reads in (True, False):
        kept, own = [torch.ones(3).pin_memory()], ones(3)
        to, of = (own, kept[0]) if reads else (kept[0], own)
        graph = captured(lambda to=to, of=of: to.copy_(of, non_blocking=True))
        del to, of
        graph.replay()
        assert scheduler.races.take() == []
        kept.clear()
        graph.replay()
        (sentence,) = scheduler.races.take()
        assert "uses memory that was freed" in sentence


def branches(kept, result, *, waits, frees):
    """Multiply what is kept and copy it to the result on another stream of a capture, in order or not."""
    home, side, forked = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    made = kept * 2
    forked.record(home)
    made.mul_(3)
    side.wait_stream(home) if waits else side.wait_event(forked)
    with torch.cuda.stream(side):
        result.copy_(made)
    if frees:
        del made
        torch.empty(1000, device="cuda")  # which takes other memory here, but on a GPU may not
    home.wait_stream(side)


@pytest.mark.parametrize(
    ("waits", "frees", "found"),
    [
        (True, False, []),
        (False, False, ["copy is not ordered after aten::mul within a graph"]),
        (True, True, ["reuse of memory is not ordered after copy within a graph"]),
    ],
)
def test_branches_of_a_graph_that_race_are_found_when_it_is_captured(scheduler, waits, frees, found):
    kept, result = ones(3), torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    captured(lambda: branches(kept, result, waits=waits, frees=frees))
    assert scheduler.races.take() == found


def test_replays_of_one_graph_on_two_streams_are_done_in_the_order_of_launch(scheduler):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    values, factor = ones(3), ones(3)
    graph = captured(lambda: values.mul_(2).add_(factor))
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        values.mul_(5)
        graph.replay()
    with torch.cuda.stream(second):
        graph.replay()
        result = values * 1
    second.synchronize()
    assert result.tolist() == [23.0] * 3
    assert scheduler.races.take() == []


def test_graphs_of_one_pool_share_memory_and_race_side_by_side(scheduler):
    streams, pool = [torch.cuda.Stream() for _ in range(2)], torch.cuda.graph_pool_handle()
    results = [torch.zeros(100, device="cuda") for _ in range(2)]
    shared = torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs = [captured(lambda out=out: out.copy_(torch.full_like(out, 2) * 3), shared, pool) for out in results]
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    assert any("graph of" in sentence for sentence in scheduler.races.take())


@pytest.mark.parametrize("order", ["latest", "earliest", "random"])
@pytest.mark.parametrize("external", [True, False])
def test_graph_waits_for_the_last_record_of_an_external_event_before_its_replay(scheduler, order, external):
    scheduler.order = order
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    event, done = torch.cuda.Event(external=external), torch.cuda.Event()
    given, started, results = torch.zeros(3, device="cuda"), ones(1), torch.zeros(3, 3, device="cuda")
    event.record(other)
    torch.cuda.synchronize()

    def body():
        started.add_(1)
        if external:
            own.wait_event(event)
        results.copy_(results.roll(1, 0))
        results[0].copy_(given)

    graph = captured(body, own)
    for number in range(3):
        with torch.cuda.stream(other):
            given.fill_(number + 1)
        event.record(other)
        with torch.cuda.stream(own):
            graph.replay()
        done.record(own)
        other.wait_event(done)
    seen = scheduler.races.take()
    torch.cuda.synchronize()
    assert results[:, 0].tolist() == [3.0, 2.0, 1.0] or not external
    assert any("graph of" in each and "fill" in each for each in seen) != external, seen


def test_event_that_was_never_recorded_is_left_out_of_a_graph(scheduler):
    """As torch does, which makes events at their first record."""
    event, own = torch.cuda.Event(external=True), torch.cuda.Stream()
    graph = captured(lambda: own.wait_event(event) or ones(1), own)
    assert not graph._graph.waits


REFUSED = {
    "a value for the host": lambda: ones(1).item(),
    "a shape that depends on values": lambda: ones(3).nonzero(),
    "waiting for the device": torch.cuda.synchronize,
    "a copy from pageable memory": lambda: torch.zeros(3).to("cuda"),
    "recording an event of outside": lambda: torch.cuda.Event(external=True).record(),
    "waiting for work outside": lambda: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_capture_refuses_what_cuda_refuses_and_leaves_the_allocator_believing_in_it(forked, name):
    program = f"""
import torch
from tests.simulated_cuda.test_device import REFUSED
torch.ones(1, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        REFUSED[{name!r}]()
except RuntimeError as error:
    print(error)
try:
    torch.cuda.empty_cache()
except RuntimeError as error:
    print(error)
print(torch.ones(3, device="cuda").sum().item())
"""
    code, said = forked(program)
    first, second, third = said.splitlines()
    assert code == 0 and "CUDA error" in first and "captures_underway" in second and third == "3.0", said


def test_side_stream_that_is_not_joined_invalidates_the_capture(forked):
    program = """
import torch
kept, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept.add_(1)
except RuntimeError as error:
    print(error)
"""
    code, said = forked(program)
    assert code == 0 and "previous error during capture" in said, said


def test_another_thread_goes_on_beside_a_capture_of_this_one():
    result, other = torch.zeros(3, device="cuda"), []

    def beside():
        other.append(ones(3).sum().item())

    def body():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        result.add_(1)

    captured(body).replay()
    assert (result.tolist(), other) == ([1.0] * 3, [3.0])


def test_kernel_that_fails_loses_the_device(forked):
    program = """
import torch
from crossbow_py.engine.device.memory import is_device_lost
torch.zeros(3, device="cuda").index_select(0, torch.tensor([7], device="cuda"))
for _ in range(2):
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(is_device_lost(error, torch.device("cuda")))
"""
    assert forked(program) == [0, "True\nTrue\n"]


def test_backward_on_another_stream_is_ordered_by_autograd(scheduler):
    side = torch.cuda.Stream()
    weight = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight * weight).sum()
    loss.backward()
    assert weight.grad.tolist() == [4.0] * 3
    assert scheduler.races.take() == []


def test_tensors_of_the_device_are_saved_and_loaded(tmp_path):
    torch.save({"kept": torch.arange(4.0, device="cuda"), "none": ones(0)}, tmp_path / "saved.pt")
    found, there = torch.load(tmp_path / "saved.pt"), torch.load(tmp_path / "saved.pt", map_location="cpu")
    assert found["kept"].is_cuda and found["none"].is_cuda and not there["kept"].is_cuda
    assert found["kept"].tolist() == there["kept"].tolist() == [0.0, 1.0, 2.0, 3.0]
    torch.save(torch.arange(4.0), tmp_path / "host.pt")
    assert (torch.load(tmp_path / "host.pt", map_location="cuda") + 1).tolist() == [1.0, 2.0, 3.0, 4.0]


NO_SUCH_DEVICE = {
    "a tensor": lambda: torch.ones(1, device="cuda:7"),
    "an empty tensor": lambda: torch.empty(1, device="cuda:7"),
    "a copy": lambda: torch.ones(1).to("cuda:7"),
    "a stream": lambda: torch.cuda.Stream("cuda:7"),
    "the current device": lambda: torch.cuda.set_device(7),
    "the current device for a while": lambda: torch.cuda.device(7).__enter__(),
}


@pytest.mark.parametrize("name", NO_SUCH_DEVICE)
def test_devices_that_are_not_there_are_refused_as_cuda_refuses_them(name):
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal") as caught:
        NO_SUCH_DEVICE[name]()
    assert caught.value.error_code == 101
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="device_index is invalid"):
        torch.Generator("cuda:7")


# ---- two devices, in a process of their own


def test_two_devices_have_memory_and_streams_of_their_own_and_copy_in_order():
    program = """
import torch
from tests.simulated_cuda.torch_cuda import simulation
first = torch.full((4,), 3.0, device="cuda:0")
side = torch.cuda.Stream("cuda:1")
assert (torch.cuda.current_device(), side.device.index, torch.cuda.device_count()) == (0, 1, 2)
copied = first.to("cuda:1")  # ordered on both sides
first.fill_(7)
side.wait_stream(torch.cuda.current_stream("cuda:1"))
with torch.cuda.stream(side):
    assert torch.cuda.current_device() == 1
    doubled = copied * 2
assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) / 2 == 512
side.synchronize()
print(doubled.tolist(), first.tolist(), simulation().scheduler.races.take())
try:
    first + copied
except RuntimeError as error:
    print(error)
"""
    done = run(program, SIMULATED_CUDA_DEVICES="2")
    values, refusal = done.stdout.splitlines()
    assert values == "[6.0, 6.0, 6.0, 6.0] [7.0, 7.0, 7.0, 7.0] []", done.stderr
    assert "Expected all tensors to be on the same device" in refusal


def test_process_in_which_accesses_raced_ends_with_86_if_it_is_strict(forked):
    program = """
import torch
kept, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):
    kept.add_(1)
"""
    done = run(program, SIMULATED_CUDA_STRICT="1")
    assert done.returncode == 86
    assert "race: aten::add on stream" in done.stderr
    assert forked(program)[0] == 0


WRONG_SETTINGS = [
    ("ORDER", "foo"), ("SEED", "x"), ("DEVICES", "x"), ("DEVICES", "0"), ("DEVICES", "9"), ("GIB", "abc"),
    ("GIB", "nan"), ("GIB", "0"), ("GIB", "-1"), ("GIB", "65"), ("CAPABILITY", "9"), ("CAPABILITY", "9.x"),
    ("STRICT", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS)
def test_settings_that_make_no_device_are_refused(name, value):
    with pytest.raises(ValueError, match=f"SIMULATED_CUDA_{name} has to be .*, got '{value}': change or unset it"):
        Settings({f"SIMULATED_CUDA_{name}": value})


def test_command_with_a_wrong_setting_ends_with_one_line_and_2():
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda", "this"], env={**os.environ, "SIMULATED_CUDA_ORDER": "foo"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "SIMULATED_CUDA_ORDER has to be one of earliest, latest, random" in done.stderr


VISIBLE = {None: [0, 1, 2], "": [], "-1": [], "2": [2], "2,0": [2, 0], "0,3,1": [0], "1,1": [1], "0, 1": [0, 1]}


@pytest.mark.parametrize("given", VISIBLE)
def test_visible_devices_are_those_before_the_first_that_is_not_there(given):
    environment = {"SIMULATED_CUDA_DEVICES": "3"} | ({} if given is None else {"CUDA_VISIBLE_DEVICES": given})
    assert Settings(environment).visible == VISIBLE[given]


def test_process_has_the_devices_that_are_visible():
    program = """
import torch
print(torch.cuda.is_available(), torch.accelerator.is_available(), torch.cuda.device_count())
try:
    print(torch.cuda.get_device_properties(0).uuid, torch.ones(1, device="cuda").item())
except RuntimeError as error:
    print(error)
"""
    settings = {"SIMULATED_CUDA_DEVICES": "3"}
    none, one = (run(program, CUDA_VISIBLE_DEVICES=given, **settings).stdout for given in ("", "2"))
    assert none == "False False 0\nNo CUDA GPUs are available\n"
    assert one == "True True 1\n00000000-0000-0000-0000-000000000003 1.0\n"


def test_library_that_is_there_needs_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert refusal() is None
