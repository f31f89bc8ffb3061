"""What the order of work on streams and the life of memory rest on: a small program for each thing to be forgotten.

On a simulated device (tests/simulated_cuda) these are what mutations of the package are caught by.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from crossbow_py import Ensemble, Trainer
from crossbow_py.averaging import SMA, Crossbow, GroupedSMA, SynchronousSGD
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.mixing import Mixing
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import CudaStreams, failed_capture, graph_milliseconds
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.train.ladder.child import _by_waits
from tests.gpu.support import Counting, Twins, slow_if_simulated
from tests.support import assert_equal, features, plan
from tests.thinned import thinned
from tests.unit.data.streams import Images, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]

IMAGES = features(48, (3, 6, 6))  # with four learners and batches of three, an epoch is four rounds
of_both = pytest.mark.parametrize("executor", [FusedExecutor, StreamsExecutor], ids=["fused", "streams"])
RULES = [SMA(), SMA(averaging_period=3), SynchronousSGD(), GroupedSMA(group_size=2)]


def of_rules(quick, slow=()):
    """Each rule, and each executor; all of both together in `make test-all`."""
    cases = itertools.product(RULES, [FusedExecutor, StreamsExecutor])
    return pytest.mark.parametrize(("rule", "executor"), thinned(cases, quick, slow))


def dense():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 3))


def dropping():
    model = dense()
    model.insert(3, nn.Dropout(0.3))
    return model


def make_tasks(make_model=dense, optimizer=SGD(), rule=SMA(), num_learners=4, collective=None, data=IMAGES):
    device = torch.device("cuda", torch.cuda.current_device())
    bank = ReplicaBank(
        make_model().to(device), num_learners, device=device, precision=FP64, state_names=optimizer.state_names,
        has_velocity=rule.has_velocity, gradient_mean=rule.gradient_mean,
    )  # fmt: skip
    return RoundTasks(
        bank,
        update=TorchUpdate(optimizer, rule),
        feed=make_feed(data, 3, 0, device, channels_last=True, dtype=torch.float64),
        loss=nn.functional.cross_entropy,
        seed=0,
        collective=collective or Collective(),
    )


def rounds_of(runner, tasks, rounds, rate=lambda n: 0.05, change=None):
    """The outcomes of rounds, each submitted while the one before is in flight; `change` has the bank every 5."""
    found = []
    for n in rounds:
        if n % 5 == 4:
            found += runner.drain()
            if change:
                change(tasks.bank)
        found += runner.submit(plan(tasks, n, rate(n)))
    return found + runner.drain()


def assert_as_serial(executor, num_rounds=10, rate=lambda n: 0.05, change=None, **options):
    """Outcomes and banks of rounds are those of `serial`. Returns the device."""
    found, banks = [], []
    for kind in (executor, SerialExecutor):
        own = {**options, "collective": options["collective"]()} if "collective" in options else options
        tasks = make_tasks(**own)
        if kind is executor:
            device = Counting(tasks.bank.device)
            runner = kind(tasks, device)
        else:
            runner = kind(tasks)
        try:
            found.append(rounds_of(runner, tasks, range(num_rounds), rate, change))
        finally:
            runner.close()
        banks.append(tasks.bank)
    assert_equal(*banks, *found)
    return device


def late(value, stream):
    """A tensor that a stream is a while about to write."""
    kept = torch.full((4096,), value, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            kept.add_(1)
    return kept


# ---- rounds


@of_rules(quick=[0, 3, 5, 6])
def test_rounds_one_after_another_equal_serial(executor, rule):
    device = assert_as_serial(executor, rule=rule)
    assert device.captured


@of_rules(quick=[1, 4], slow=[3, 6])
def test_rounds_that_sum_with_another_device_equal_serial_and_capture_no_sum(executor, rule):
    device = assert_as_serial(executor, rule=rule, collective=Twins)
    assert device.captured
    assert not {"averaging", "gradient mean"} & set(device.captured), "a sum is captured"


@of_both
def test_rounds_after_the_callers_own_work_equal_serial(executor):
    def change(bank):
        for _ in range(20):
            bank.weights.storage.mul_(0.99)
            bank.z.storage.mul_(0.99)

    assert_as_serial(executor, 15, change=change)


@of_both
def test_step_counts_changed_by_the_caller_are_those_of_the_next_round(executor):
    def change(bank):
        bank.step_counts[:2] = [0, 0]

    assert_as_serial(executor, 15, optimizer=AdamW(clip_norm=0.1), change=change)


@pytest.mark.parametrize(
    ("rule", "executor"),
    thinned(
        itertools.product([SMA(), Crossbow(averaging_period=3)], [FusedExecutor, StreamsExecutor]),
        quick=[0, 3],
    ),
)
def test_masks_and_rates_of_every_round_reach_its_graph(executor, rule):
    device = assert_as_serial(
        executor, 14, make_model=dropping, rule=rule, optimizer=SGD(clip_norm=0.5), rate=lambda n: 0.1 / (n + 1)
    )
    last = "step(3)" if executor is StreamsExecutor else "round"
    assert last in device.captured and failed_capture() is None, "what could be captured is not"


def test_graph_that_waits_midway_sees_what_another_stream_wrote_before_its_replay():
    assert _by_waits(torch.device("cuda", torch.cuda.current_device())) == ""


@of_both
def test_closing_in_the_middle_leaves_the_step_counts_of_the_rounds_issued(executor):
    tasks = make_tasks()
    runner = executor(tasks)
    for n in range(WARM_UP_ROUNDS + 3):
        runner.submit(plan(tasks, n))
    runner.close()
    assert tasks.bank.step_counts[:4] == [WARM_UP_ROUNDS + 3] * 4


@of_both
def test_settled_rounds_are_over_and_the_caller_may_read_z(executor):
    tasks = make_tasks(collective=Twins())
    runner = executor(tasks)
    for n in range(4):
        runner.submit(plan(tasks, n))
    runner.settle()
    seen = tasks.bank.z.storage.clone()
    runner.drain()
    runner.close()
    assert torch.equal(seen, tasks.bank.z.storage)


@of_both
def test_streams_of_a_closed_executor_are_those_of_the_next(executor):
    used = []
    for _ in range(3):
        runner = executor(make_tasks(collective=Twins()))
        rounds = runner._rounds if executor is StreamsExecutor else runner._on_device.rounds
        used.append({name: stream.stream_id for name, stream in rounds.streams.items()})
        runner.close()
    assert used[0].keys() == used[1].keys()
    assert set(used[0].values()) == set(used[1].values()) == set(used[2].values())
    assert len(set(used[0].values())) == len(used[0])
    assert used[0]["averaging"] == used[1]["averaging"] == used[2]["averaging"]


@of_both
def test_closed_executor_keeps_no_memory_of_graphs(executor):
    tasks = make_tasks()
    runner = executor(tasks)
    for n in range(WARM_UP_ROUNDS + 2):
        runner.submit(plan(tasks, n))
    runner.drain()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    runner.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@of_both
def test_replayed_rounds_wait_for_nothing_but_the_round_before(executor):
    tasks = make_tasks(dropping, AdamW(clip_norm=1.0), data=features(480, (3, 6, 6)))  # within an epoch
    runner = executor(tasks)
    for n in range(WARM_UP_ROUNDS + 2):
        runner.submit(plan(tasks, n))
    torch.cuda.set_sync_debug_mode("error")  # every implicit synchronisation raises
    try:
        for n in range(WARM_UP_ROUNDS + 2, WARM_UP_ROUNDS + 5):
            runner.submit(plan(tasks, n, 0.1 / n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()


def test_backward_passes_stay_on_the_thread_that_launches():
    threads = set()

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, outputs):
            return outputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.add(threading.get_ident())
            return gradient

    tasks = make_tasks()
    tasks.loss = lambda outputs, targets: nn.functional.cross_entropy(Told.apply(outputs), targets)
    runner = StreamsExecutor(tasks)
    rounds_of(runner, tasks, range(WARM_UP_ROUNDS + 1))
    runner.close()
    assert threads == {threading.get_ident()}


# ---- captures

FAILS = """
import torch
from torch import nn
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.train.ladder.child import _by_waits
from tests.gpu.support import Counting, slow_if_simulated
from tests.gpu.test_order import make_tasks
from tests.support import plan

def loss(output, targets):
    found = nn.functional.cross_entropy(output, targets)
    return found * (2 if found.item() > 0 else 1)

def made(loss):
    tasks = make_tasks()
    tasks.loss = loss
    device = Counting(tasks.bank.device)
    return tasks, device, StreamsExecutor(tasks, device)

def run(tasks, device, runner):
    for n in range(5):
        runner.submit(plan(tasks, n))
    runner.drain()
    runner.close()
    assert tasks.bank.step_counts[:4] == [5] * 4
    return device.captured, len(runner.notes)

before, early = torch.cuda.current_stream(), made(nn.functional.cross_entropy)
said = [run(*made(loss)), run(*early), run(*made(loss))]
assert torch.cuda.current_stream() == before, "the caller's stream is another one"
print(said)
"""


@slow_if_simulated
def test_after_a_capture_that_failed_nothing_is_captured_and_the_callers_stream_is_as_before(request):
    done = subprocess.run(
        [sys.executable, "-c", FAILS], cwd=request.config.rootpath, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(['step(0)'], 1), ([], 0), ([], 1)]"


def test_after_a_capture_whose_body_raised_others_follow_and_the_cache_is_emptied():
    streams, result = CudaStreams(torch.device("cuda", torch.cuda.current_device())), torch.zeros(3, device="cuda")
    stream, pool = streams.new_stream(), streams.new_pool()
    torch.cuda.synchronize()

    def full():
        result.mul_(torch.ones(3, device="cuda"))
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        streams.capture("a product", full, stream, pool)
    assert failed_capture() is None
    torch.cuda.empty_cache()  # which the allocator refuses while it believes that a capture is under way
    graph = streams.capture("a sum", lambda: result.add_(1), stream, streams.new_pool())
    streams.replay(graph, stream)
    streams.synchronize()
    assert result.tolist() == [1.0] * 3
    streams.release(graph)
    streams.give_back(stream)


def test_graph_is_captured_on_the_stream_it_is_replayed_on_while_other_threads_go_on():
    streams, result = CudaStreams(torch.device("cuda", torch.cuda.current_device())), torch.zeros(3, device="cuda")
    stream, seen, event = streams.new_stream(), [], torch.cuda.Event()
    torch.cuda.synchronize()

    def beside():
        torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
        event.record()
        event.synchronize()
        seen.append("passed")

    def body():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        seen.append(torch.cuda.current_stream().stream_id)
        result.add_(1)

    graph = streams.capture("a sum", body, stream, streams.new_pool())
    streams.replay(graph, stream)
    streams.synchronize()
    assert (seen, result.tolist()) == (["passed", stream.stream_id], [1.0] * 3)
    streams.release(graph)
    streams.give_back(stream)


def test_idle_device_has_passed_every_stream():
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    other = torch.cuda.Stream()
    late(0.0, other)
    streams.synchronize()
    assert other.query()


def test_timed_work_follows_what_the_caller_has_enqueued_and_takes_one_stream():
    device, seen = torch.device("cuda", torch.cuda.current_device()), []
    given = late(1.0, torch.cuda.current_stream())
    milliseconds = graph_milliseconds(device)

    def run():
        seen.append(torch.cuda.current_stream().stream_id)
        return given * 2

    assert all(milliseconds(run) >= 0 for _ in range(2))
    assert len(set(seen)) == 1 and torch.cuda.current_stream().stream_id not in seen


# ---- feeds


def batches_of(feed, streams, num_rounds=40):
    """Batches of many rounds, used on each stream in turn, and dropped by the feed while it is behind."""
    found = []
    for n in range(num_rounds):
        starts = [4 * (2 * n + index) for index in range(2)]
        if not feed.announce(starts):
            feed.wait(starts)
        for start, stream in zip(starts, streams, strict=True):
            with torch.cuda.stream(stream):
                batch = feed.batch(start)
                found.append(batch._replace(inputs=batch.inputs * 2, targets=batch.targets * 2))
    torch.cuda.synchronize()
    return [type(each)(*(part.cpu() for part in each)) for each in found]


@pytest.mark.parametrize("workers", thinned([0, 1], quick=[1], slow=[0]))
def test_streamed_batches_on_two_streams_are_those_of_a_cpu(workers):
    augmentation = Augmentation(crop_padding=1, flip=True, random_erasing=0.5)
    ours, reference = (
        make_feed(Images(), 4, 7, device, augmentation=augmentation, num_workers=workers) for device in ("cuda", "cpu")
    )
    streams = [torch.cuda.Stream() for _ in range(2)]
    try:
        found = batches_of(ours, streams)
        expected = [reference.batch(4 * n) for n in range(len(found))]
        for mine, theirs in zip(found, expected, strict=True):
            assert same(mine, type(mine)(theirs.inputs * 2, theirs.targets * 2))
    finally:
        ours.close()
        reference.close()


def test_mixed_batches_on_two_streams_are_those_of_a_cpu():
    held, found = (torch.stack([Images()[n][0] for n in range(20)]), torch.arange(20) % 4), []
    for device in ("cuda", "cpu"):
        feed = make_feed(held, 4, 7, device, augmentation=Augmentation(flip=True))
        feed.mixing = Mixing(0.4, 1.0, 7, 4)
        found.append([feed.batch(4 * n) for n in range(80)] if device == "cpu" else batches_of(
            feed, [torch.cuda.Stream() for _ in range(2)]))  # fmt: skip
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine.inputs, theirs.inputs * 2)
        torch.testing.assert_close(mine.targets, theirs.targets * 2)


@pytest.mark.slow
@of_both
def test_runs_on_mixed_batches_end_as_those_of_a_cpu(executor):
    ends = []
    for device, name in (("cuda", executor.NAME), ("cpu", "serial")):
        trainer = Trainer(
            model=dense, train_data=IMAGES, batch_size=3, num_learners=2, seed=3, executor=name, device=device,
            precision="fp32", optimizer=SGD(learning_rate=0.1), augmentation=Augmentation(mixup=0.4, cutmix=1.0),
        )  # fmt: skip
        ends.append({key: own.cpu() for key, own in trainer.fit(max_rounds=12).model.state_dict().items()})
    for key, own in ends[0].items():
        torch.testing.assert_close(own, ends[1][key], rtol=1e-4, atol=1e-6)


def test_streamed_masks_are_flipped_before_they_are_used():
    class Masks(Images):
        def fetch(self, keys, **options):
            loaded = super().fetch(keys, **options)
            return loaded._replace(targets=loaded.inputs[:, 0].long())

    flip = Augmentation(flip=True)
    ours, reference = (make_feed(Masks(), 4, 7, device, augmentation=flip) for device in ("cuda", "cpu"))
    found = batches_of(ours, [torch.cuda.Stream() for _ in range(2)], num_rounds=5)
    for n, mine in enumerate(found):
        assert torch.equal(mine.targets, reference.batch(4 * n).targets * 2)
    ours.close()
    reference.close()


def test_streamed_batches_are_copied_on_a_stream_that_no_learner_gets():
    feed = make_feed(Images(), 4, 7, "cuda")
    assert feed._copies.stream_id not in {torch.cuda.Stream().stream_id for _ in range(64)}
    feed.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_streamed_batches_are_made_without_waiting_from_pinned_memory():
    feed = make_feed(Images(), 4, 7, "cuda", augmentation=Augmentation(flip=True))
    feed.wait([0])
    feed.batch(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        feed.wait([4])
        feed.batch(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        feed.close()
    assert next(feed._new_loader([feed._keys(0)], 0, training=True)).inputs.is_pinned()


def test_resident_batches_on_several_streams_over_many_epochs_are_those_of_a_cpu():
    ours, reference = (make_feed(IMAGES, 4, 7, device) for device in ("cuda", "cpu"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = batches_of(ours, streams, num_rounds=60)
    for n, mine in enumerate(found):
        theirs = reference.batch(4 * n)
        assert torch.equal(mine.inputs, theirs.inputs * 2)
        assert torch.equal(mine.targets, theirs.targets * 2)


# ---- prediction


@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_captured_ensemble_leaves_the_batch_of_its_first_call_as_it_is(executor):
    """Batches are in the memory order that models take them in, so that nothing copies them on the way to a graph."""
    ordered = torch.channels_last
    first, second = (each.contiguous(memory_format=ordered) for each in torch.randn(2, 8, 3, 6, 6, device="cuda"))
    before = first.clone()
    with Ensemble([dense(), dense()], executor=executor, device="cuda") as ensemble:
        ensemble.predict(first)
        ensemble.predict(second)
    assert torch.equal(first, before)
