"""Executors against each other and against a plain PyTorch loop; gates and failures."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Crossbow, Independent
from crossbow_py.core.errors import LearnerError, UserError
from crossbow_py.engine.executors import EXECUTORS, SerialExecutor, candidates, check_executor
from crossbow_py.engine.executors.base import even_groups
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.engine.update.row_update import TorchUpdate
from tests import support
from tests.support import (
    IMAGES,
    assert_learners_equal,
    features,
    linear_model,
    make_tasks,
    norm_model,
    norm_with_dropout,
    plan,
    poison,
    run_rounds,
)

ON_THE_HOST = pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])


def plain_sgd(model, tasks, num_rounds, **options):
    """The model in float64 after a plain loop of torch over a lone learner's batches."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for n in range(num_rounds):
        batch = tasks.feed.batch(n * 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("executor", "order", "num_learners", "optimizer", "num_rounds"),
    [
        ("threads", "rows", 1, SGD(weight_decay=1e-3), 5),
        ("threads", "rows", 2, AdamW(), 5),
        ("threads", "rows", 3, SGD(weight_decay=1e-3), 20),  # long enough for learners to fall behind one another
        ("threads", "rows", 5, AdamW(), 5),
        ("fused_threads", "blocks", 1, AdamW(), 5),
        ("fused_threads", "blocks", 2, SGD(weight_decay=1e-3), 5),
        ("fused_threads", "blocks", 3, AdamW(), 5),
        ("fused_threads", "blocks", 5, SGD(weight_decay=1e-3), 5),
    ],
)
def test_threads_in_float64_equal_serial(executor, order, num_learners, optimizer, num_rounds, two_cores):
    serial, ours = (
        make_tasks(norm_with_dropout, num_learners=num_learners, optimizer=optimizer, data=IMAGES, order=own)
        for own in ("rows", order)
    )
    losses = [run_rounds(serial, "serial", num_rounds, 0.05), run_rounds(ours, executor, num_rounds, 0.05)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
    assert_learners_equal(ours.bank, serial.bank)


class Temperature(nn.Module):
    """A single value as a parameter, as CLIP's `logit_scale`, and as a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = linear_model(), nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        self.seen.mul_(0.9)
        return self.layer(x) * self.scale.exp() * self.seen


class SparseEmbedding(nn.Module):
    """Gradients of which most rows are zero, and not stored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.bag = nn.Embedding(11, 3, sparse=True, padding_idx=2), nn.EmbeddingBag(11, 3, sparse=True)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1) + self.bag(tokens)


TOKENS = torch.arange(48 * 5).view(48, 5) % 11, torch.arange(48) % 3


@pytest.mark.slow
@pytest.mark.parametrize(("network", "data"), [(Temperature, features(48)), (SparseEmbedding, TOKENS)])
@pytest.mark.parametrize("optimizer", [SGD(weight_decay=1e-3), AdamW()])
def test_single_values_and_sparse_gradients_train_as_in_a_plain_loop_on_every_executor(
    network, data, optimizer, two_cores
):
    serial = make_tasks(network, data=data, num_learners=1, rule=Independent(), order="rows")
    run_rounds(serial, "serial", 4)
    model, ours = plain_sgd(network(), serial, 4, lr=0.1, momentum=0.9), serial.bank.learner_state(0)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-12)
    banks = []
    for executor in ("serial", "threads", "fused", "fused_threads"):
        order = "blocks" if executor.startswith("fused") else "rows"
        tasks = make_tasks(network, data=data, optimizer=optimizer, order=order)
        run_rounds(tasks, executor, 4)
        banks.append(tasks.bank)
    for bank in banks[1:]:
        assert_learners_equal(bank, banks[0])


def norm_with_frozen_layer():
    model = norm_model()
    model.append(nn.Linear(model[-1].out_features, 3).requires_grad_(False))
    return model


def test_fused_threads_corrects_a_group_between_the_forward_and_the_backward_pass_of_another(monkeypatch, two_cores):
    # Native code writes past autograd, which would have nothing to refuse.
    monkeypatch.setattr(support, "choose_update", lambda optimizer, rule, *_: (TorchUpdate(optimizer, rule), None))
    serial, grouped = (
        make_tasks(norm_with_frozen_layer, num_learners=2, data=IMAGES, order=order) for order in ("rows", "blocks")
    )
    expected = run_rounds(serial, "serial", 1)
    runner, corrected = EXECUTORS["fused_threads"](grouped), threading.Event()
    losses_of, correct = runner._passes[0]._losses, grouped.correct

    def losses_once_the_other_is_corrected(outputs, targets):
        assert corrected.wait(10)
        return losses_of(outputs, targets)

    def say_corrected(learner, outcome):
        correct(learner, outcome)
        if learner == 1:
            corrected.set()

    monkeypatch.setattr(runner._passes[0], "_losses", losses_once_the_other_is_corrected)
    monkeypatch.setattr(grouped, "correct", say_corrected)
    runner.submit(plan(grouped, 0))
    (outcome,) = runner.drain()
    runner.close()
    assert outcome.losses == pytest.approx(expected, rel=1e-8)
    assert_learners_equal(grouped.bank, serial.bank)


def test_fused_threads_has_a_group_for_every_intra_op_thread_and_gives_them_back(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        runner = EXECUTORS["fused_threads"](make_tasks(norm_with_dropout, num_learners=5, data=IMAGES, order="blocks"))
        assert [fused.learners for fused in runner._passes] == [range(2), range(2, 4), range(4, 5)]
        runner.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_after_one_round_in_float32_equal_serial():
    serial, threads = (make_tasks(norm_model, data=IMAGES, precision=FP32) for _ in range(2))
    run_rounds(serial, "serial", 1)
    run_rounds(threads, "threads", 1)
    assert_learners_equal(threads.bank, serial.bank, tolerance=1e-5)


@ON_THE_HOST
def test_executor_run_twice_is_bit_identical(executor):
    storages = []
    for _ in range(2):
        tasks = make_tasks(norm_with_dropout, data=IMAGES, precision=FP32, num_learners=3)
        run_rounds(tasks, executor, 6)
        storages.append(tasks.bank.weights.storage)
    assert torch.equal(*storages)


@ON_THE_HOST
def test_independent_learners_train_as_if_alone(executor):
    tasks = make_tasks(num_learners=2, rule=Independent(), optimizer=SGD(learning_rate=(0.1, 0.3), momentum=(0.9, 0.0)))
    runner = EXECUTORS[executor](tasks)
    for n in range(6):
        whole = plan(tasks, n)
        runner.submit(type(whole)(n, (n * 4, n * 4), (0.1, 0.3), None))
    runner.drain()
    runner.close()
    for learner, (rate, momentum) in enumerate([(0.1, 0.9), (0.3, 0.0)]):
        model = plain_sgd(linear_model(), tasks, 6, lr=rate, momentum=momentum)
        torch.testing.assert_close(tasks.bank.learner_state(learner)["weight"], model.weight.detach())


@ON_THE_HOST
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_learner_keeps_its_row_and_adds_nothing_to_z(executor, bad):
    inputs, targets = features(64)
    tasks = make_tasks(data=(inputs, targets), rule=SMA())
    run_rounds(tasks, executor, 2)
    bank = tasks.bank
    row, z = bank.weights.shaped(1)["weight"].clone(), bank.z.shaped()["weight"].clone()
    whole = plan(tasks, 2)
    poison(tasks, whole.starts[1], bad)
    runner = EXECUTORS[executor](tasks)
    outcomes = runner.submit(whole) + runner.drain()
    runner.close()
    assert outcomes[0].non_finite_learners == [1]
    assert torch.equal(bank.weights.shaped(1)["weight"], row)
    expected = z + 0.5 * (bank.weights.shaped(0)["weight"] - z)
    torch.testing.assert_close(bank.z.shaped()["weight"], expected, rtol=1e-12, atol=1e-12)


def test_threads_learning_overlaps_averaging_and_correction_waits_for_it():
    tasks, learned, log = make_tasks(), threading.Semaphore(0), []
    average, learn, correct = tasks.average, tasks.learn, tasks.correct

    def slow_average(outcome):
        if outcome.plan.index == 0:
            assert learned.acquire(timeout=10) and learned.acquire(timeout=10), "nothing was learned while averaging"
        average(outcome)
        log.append(("averaging", outcome.plan.index))

    def watched_learn(learner, outcome):
        learn(learner, outcome)
        if outcome.plan.index == 1:
            learned.release()

    def watched_correct(learner, outcome):
        log.append(("correction", outcome.plan.index))
        correct(learner, outcome)

    tasks.average, tasks.learn, tasks.correct = slow_average, watched_learn, watched_correct
    run_rounds(tasks, "threads", 2)
    assert log.index(("averaging", 0)) < log.index(("correction", 1))


def test_threads_with_a_period_go_on_beside_a_slow_average_until_the_next_round_that_averages():
    tasks = make_tasks(rule=Crossbow(averaging_period=3))
    hold, average = threading.Event(), tasks.average

    def slow_average(outcome):
        assert hold.wait(10), "nobody let the average end"
        average(outcome)

    tasks.average = slow_average
    runner = EXECUTORS["threads"](tasks)
    outcomes = [outcome for n in range(5) for outcome in runner.submit(plan(tasks, n))]
    assert [outcome.plan.index for outcome in outcomes] == [0, 1, 2, 3]  # round 2's average still waits
    z = tasks.bank.z.storage.clone()
    hold.set()
    runner.drain()
    assert not torch.equal(tasks.bank.z.storage, z)
    runner.close()
    reference = make_tasks(rule=Crossbow(averaging_period=3))
    run_rounds(reference, "serial", 5)
    torch.testing.assert_close(tasks.bank.z.storage, reference.bank.z.storage)


def test_threads_have_one_intra_op_thread_while_they_run_and_the_caller_all_of_them_in_between():
    tasks, seen = make_tasks(), set()
    learn = tasks.learn

    def watched(learner, outcome):
        seen.add(torch.get_num_threads())
        learn(learner, outcome)

    tasks.learn = watched
    torch.set_num_threads(2)
    try:
        runner = EXECUTORS["threads"](tasks)
        assert torch.get_num_threads() == 2
        runner.submit(plan(tasks, 0))
        # What the caller sets is what MKL goes by in every thread.
        assert torch.get_num_threads() == 1
        runner.drain()
        assert (torch.get_num_threads(), seen) == (2, {1})
        runner.submit(plan(tasks, 1))
        runner.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_threads_are_ready_once_the_round_before_the_last_is_over():
    tasks, may_learn = make_tasks(), threading.Event()
    learn = tasks.learn

    def held_up(learner, outcome):
        may_learn.wait()
        learn(learner, outcome)

    tasks.learn = held_up
    runner = EXECUTORS["threads"](tasks)
    for n in range(2):
        assert runner.is_ready()
        runner.submit(plan(tasks, n), wait=False)
    assert not runner.is_ready()
    may_learn.set()
    runner.settle()
    assert runner.is_ready() and [outcome.plan.index for outcome in runner.collect()] == [0]
    runner.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_threads_task_that_raises_even_system_exit_does_not_hang(error):
    def leave(output, target):
        raise error

    tasks = make_tasks()
    tasks.loss = leave
    runner = EXECUTORS["threads"](tasks)
    with pytest.raises(LearnerError):
        runner.submit(plan(tasks, 0))
        runner.drain()
    runner.close()


@ON_THE_HOST
def test_outcomes_come_one_round_late_and_in_order(executor):
    tasks = make_tasks()
    runner = EXECUTORS[executor](tasks)
    seen = [[outcome.plan.index for outcome in runner.submit(plan(tasks, n))] for n in range(3)]
    seen.append([outcome.plan.index for outcome in runner.drain()])
    runner.close()
    assert seen == [[], [0], [1], [2]]


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_failing_task_raises_with_task_round_and_stream_and_leaves_no_thread(executor):
    class Broken(Exception):
        pass

    def fail(output, target):
        raise Broken("boom")

    tasks = make_tasks()
    tasks.loss = fail
    runner = EXECUTORS[executor](tasks)
    with pytest.raises(LearnerError, match=r"learning\(\d\) failed in round 0 on learner \d: Broken: boom") as caught:
        runner.submit(plan(tasks, 0))
        runner.drain()
    assert isinstance(caught.value.__cause__, Broken)
    runner.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crossbow")]


@ON_THE_HOST
def test_bf16_learners_follow_float32_closely(executor):
    banks = {}
    for precision in (FP32, BF16):
        tasks = make_tasks(norm_model, data=IMAGES, precision=precision, optimizer=SGD(momentum=0.0))
        run_rounds(tasks, executor, 3, learning_rate=0.05)
        banks[precision.name] = tasks.bank.z.storage
    assert 0 < (banks["bf16"] - banks["fp32"]).norm() / banks["fp32"].norm() < 0.01


def test_auto_chooses_from_what_runs_on_the_device_and_is_not_experimental():
    assert candidates(torch.device("cpu")) == ["serial", "threads", "fused", "fused_threads"]


def test_executor_that_does_not_run_on_the_device_is_refused():
    with pytest.raises(UserError, match="executor=threads runs on cpu only, and device is cuda"):
        check_executor("threads", torch.device("cuda"))
    with pytest.raises(UserError, match="executor=streams runs on cuda only, and device is cpu"):
        check_executor("streams", torch.device("cpu"))


def test_groups_are_neighbours_as_even_as_they_go():
    assert even_groups(7, 4) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert even_groups(8, 2) == [range(4), range(4, 8)]
    assert even_groups(1, 4) == [range(1)]


@pytest.mark.parametrize(
    ("device", "repeats", "one_shape", "searches"),
    [
        ("cuda", False, True, True), ("cuda", True, True, False), ("cuda", False, False, False),
        ("cpu", False, True, False),
    ],
)  # fmt: skip
def test_cudnn_tries_its_algorithms_in_rounds_of_every_executor_on_cuda(
    device, repeats, one_shape, searches, monkeypatch
):
    class Rounds(SerialExecutor):
        def _start(self, outcome):
            found.append(torch.backends.cudnn.benchmark)

    found, tasks = [], make_tasks()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", repeats)
    runner = Rounds(tasks)
    bank, feed = SimpleNamespace(device=torch.device(device)), SimpleNamespace(one_shape=one_shape)
    runner.tasks = SimpleNamespace(bank=bank, feed=feed)
    runner.submit(plan(tasks, 0), wait=False)
    assert (found, torch.backends.cudnn.benchmark) == ([searches], False)
