"""Gradients of micro-batches, added: those of the whole batch, in every executor, and of a plain loop of torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent, SynchronousSGD
from crossbow_py.core.measured import Remembered
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.losses import num_averaged
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.engine.sizing.bound import learners_that_fit
from crossbow_py.engine.sizing.memory import Activations, Job, Line, Sample
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.optimizers import SGD, AdamW
from tests.support import (
    IMAGES,
    ON_ALL,
    ON_CPU,
    assert_learners_equal,
    features,
    linear_model,
    make_tasks,
    norm_model,
    norm_with_dropout,
    plan,
    run_rounds,
)


def convolutions():
    """No statistics over a batch."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


class Tagger(nn.Module):
    """Scores [B, T, 3] of tokens [B, T]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


def tagged(ignored):
    """48 sequences of 5 tokens, of which few count, and none in the first micro-batches of two and some others."""
    generator = torch.Generator().manual_seed(7)
    tokens, tags = (torch.randint(0, most, (48, 5), generator=generator) for most in (11, 3))
    tags[torch.rand(48, 5, generator=generator) < 0.6] = ignored
    tags[torch.arange(48) % 8 < 2] = ignored
    return tokens, tags


def two_runs(executor, order, **options):
    """Tasks after four rounds of `serial` with batches of 8, and with four micro-batches of 2, and their losses."""
    whole = make_tasks(order="rows", batch_size=8, **options)
    ours = make_tasks(order=order, batch_size=2, accumulate=4, **options)
    return (whole, run_rounds(whole, "serial", 4, 0.05)), (ours, run_rounds(ours, executor, 4, 0.05))


@pytest.mark.parametrize(
    ("executor", "order", "optimizer"),
    [
        ("serial", "rows", SGD(weight_decay=1e-3)),
        ("serial", "rows", AdamW()),
        ("threads", "rows", SGD(weight_decay=1e-3)),
        ("fused", "blocks", AdamW()),
        ("fused_threads", "blocks", SGD(weight_decay=1e-3)),
    ],
)
def test_micro_batches_give_the_run_of_the_whole_batch_in_float64(executor, order, optimizer, two_cores):
    (whole, losses), (ours, own) = two_runs(
        executor, order, make_model=convolutions, num_learners=3, optimizer=optimizer, data=IMAGES
    )
    assert own == pytest.approx(losses, rel=1e-9)
    assert_learners_equal(ours.bank, whole.bank)


@ON_ALL
def test_micro_batches_that_all_learners_share_give_the_run_of_the_whole_batch(executor, order, two_cores):
    (whole, losses), (ours, own) = two_runs(executor, order, rule=Independent())
    assert own == pytest.approx(losses, rel=1e-9)
    assert_learners_equal(ours.bank, whole.bank)


LOSSES = {
    "plain": (nn.functional.cross_entropy, -100),
    "weights": (nn.CrossEntropyLoss(ignore_index=0, weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)), 0),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), -100),
    "partial": (partial(nn.functional.cross_entropy, ignore_index=7), 7),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "order", "loss"),
    [
        *(("serial", "rows", loss) for loss in LOSSES),
        *(("fused", "blocks", loss) for loss in LOSSES),
        ("threads", "rows", "weights"),
        ("fused_threads", "blocks", "smoothing"),
    ],
)
def test_tokens_that_count_weigh_alike_wherever_they_are(executor, order, loss, two_cores):
    loss, ignored = LOSSES[loss]
    (whole, losses), (ours, own) = two_runs(executor, order, make_model=Tagger, data=tagged(ignored), loss=loss)
    assert own == pytest.approx(losses, rel=1e-9)
    assert_learners_equal(ours.bank, whole.bank)


@ON_ALL
def test_label_smoothing_of_few_counted_samples_is_that_of_the_whole_batch(executor, order, two_cores):
    inputs, targets = features(64)
    targets[torch.arange(64) % 8 < 3] = -100
    (whole, losses), (ours, own) = two_runs(executor, order, data=(inputs, targets), smoothing=0.2)
    assert own == pytest.approx(losses, rel=1e-9)
    assert_learners_equal(ours.bank, whole.bank)


@ON_ALL
def test_right_predictions_are_counted_over_the_whole_batch(executor, order, two_cores):
    counts = []
    for name, own, batch_size, accumulate in (("serial", "rows", 8, 1), (executor, order, 2, 4)):
        tasks = make_tasks(
            Tagger, order=own, batch_size=batch_size, accumulate=accumulate, data=tagged(-100), num_learners=2
        )
        runner = EXECUTORS[name](tasks)
        outcomes = [*runner.submit(plan(tasks, 0)), *runner.drain()]
        runner.close()
        counts.append([outcome.num_correct for outcome in outcomes])
    assert counts[0] == counts[1]
    assert all(count > 0 for count in counts[0][0])


@pytest.mark.parametrize("order", ["rows", "blocks"])
def test_batch_norm_learns_from_micro_batches_as_in_a_plain_loop(order):
    tasks = make_tasks(
        norm_model, num_learners=1, rule=Independent(), data=IMAGES, batch_size=4, accumulate=3, order=order
    )
    run_rounds(tasks, "serial" if order == "rows" else "fused", 4)
    model = norm_model().double()
    optimizer = torch.optim.SGD([own for own in model.parameters() if own.requires_grad], lr=0.1, momentum=0.9)
    for n in range(4):
        inputs, targets = tasks.feed.batch(n * 12)
        optimizer.zero_grad()
        for first in range(0, 12, 4):
            part = slice(first, first + 4)
            (nn.functional.cross_entropy(model(inputs[part]), targets[part]) / 3).backward()
        optimizer.step()
    ours = tasks.bank.learner_state(0)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("executor", "order"), ON_CPU[1:])
def test_dropout_and_batch_norm_of_micro_batches_are_those_of_serial(executor, order, two_cores):
    serial, ours = (
        make_tasks(norm_with_dropout, num_learners=3, data=IMAGES, batch_size=4, accumulate=3, order=own)
        for own in ("rows", order)
    )
    losses = [run_rounds(serial, "serial", 4, 0.05), run_rounds(ours, executor, 4, 0.05)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
    assert_learners_equal(ours.bank, serial.bank)


def test_native_code_in_float32_takes_the_same_steps():
    (whole, losses), (ours, own) = two_runs("serial", "rows", data=features(64), precision=FP32)
    assert (whole.update.NAME, own) == ("native", pytest.approx(losses, rel=1e-5))
    assert_learners_equal(ours.bank, whole.bank, 1e-5)


@pytest.mark.parametrize(
    ("executor", "order", "rule", "precision", "tolerance"),
    [
        ("threads", "rows", SMA(), FP32, 1e-5),
        ("threads", "rows", SynchronousSGD(), BF16, 0.02),
        ("fused", "blocks", SMA(), BF16, 0.02),
        ("fused", "blocks", SynchronousSGD(), FP32, 1e-5),
    ],
)
def test_averaged_learners_of_native_code_step_alike(executor, order, rule, precision, tolerance, two_cores):
    (whole, _), (ours, _) = two_runs(
        executor, order, make_model=convolutions, num_learners=3, rule=rule, data=IMAGES, precision=precision
    )
    assert_learners_equal(ours.bank, whole.bank, tolerance)


def test_gradients_of_bfloat16_are_added_in_float32():
    tasks = make_tasks(batch_size=1, accumulate=64, num_learners=1, precision=BF16)
    tasks.learn(0, RoundOutcome(plan(tasks, 0)))
    inputs, targets = tasks.feed.batch(0)
    weights = [own.detach() for own in tasks.bank.module(0).parameters()]
    expected = torch.zeros(3, 4)
    for x, target in zip(inputs, targets, strict=True):  # of one sample: (p - 1[class]) xᵀ, whose factors are bfloat16
        scores = nn.functional.linear(x[None], *weights).float().requires_grad_()
        (given,) = torch.autograd.grad(nn.functional.cross_entropy(scores, target[None]) / 64, scores)
        expected += (given.bfloat16().t() @ x[None]).float()
    found = tasks.bank.gradients.shaped(0)["weight"]
    assert (found - expected).norm() < 1e-4 * expected.norm()  # one sum in bfloat16 would be off by 4e-3


def test_learners_pass_over_a_micro_batch_at_a_time():
    tasks = make_tasks(batch_size=4, accumulate=3, num_learners=1)
    seen = list[int]()
    tasks.bank.module(0).register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    tasks.learn(0, RoundOutcome(plan(tasks, 0)))
    assert seen == [4, 4, 4]


def test_halves_of_an_accumulated_batch_compare_as_those_of_a_whole_one():
    whole, ours = (make_tasks(num_learners=1, batch_size=12 // n, accumulate=n) for n in (1, 3))
    found = [tasks.compare_halves(0, tasks.feed.batch(0)) for tasks in (whole, ours)]
    assert found[0] is not None
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_means_are_over_counted_targets_class_weights_or_samples():
    targets = torch.tensor([[0, 1, -100, 2], [2, 2, -100, -100]])
    assert num_averaged(nn.functional.cross_entropy, targets, 1).tolist() == [3, 2]
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    assert num_averaged(weighted, targets, 1).tolist() == [8.0, 10.0]
    assert int(num_averaged(weighted, targets)) == 18
    assert num_averaged(nn.MSELoss(), targets, 1).tolist() == [4, 4]
    assert int(num_averaged(nn.functional.cross_entropy, torch.rand(6, 3))) == 6  # probabilities


def test_memory_of_a_step_is_one_pass_and_the_waiting_micro_batches():
    # Two inputs of float32 and a target of int64 a sample: 16 bytes; three more samples wait for each of the first.
    assert Sample((2,)).nbytes == 16
    lines = Activations((Line(100, 40), Line(20, 60)))
    assert [lines.in_batches_of(4, 16).at(b) for b in (1, 10)] == [100 + 88, 20 + 1080]
    job = Job(nn.functional.cross_entropy, SGD(), Independent(), FP32)
    once, more = (
        estimate_learner(linear_model, Sample((4,)), own, staged_sample_bytes=24)
        for own in (job, replace(job, accumulate=4))
    )
    assert more.activations.at(64) - once.activations.at(64) == 3 * 64 * 24
    assert (once.staged_sample_bytes, more.staged_sample_bytes) == (24, 96)


def test_number_of_learners_is_bounded_by_the_memory_of_micro_batches(tmp_path):
    inputs, targets = features(2, (3, 32, 32))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))

    def fitting(batch_size, accumulate):
        job = Job(nn.functional.cross_entropy, SGD(), Independent(), FP32, accumulate=accumulate)
        return learners_that_fit(
            model, inputs, targets, job, batch_size=batch_size, max_learners=32, in_turn=False, limit_bytes=2**27,
            known=Remembered(tmp_path / "activations.json"),
        )  # fmt: skip

    whole, parts, alone = fitting(64, 1), fitting(8, 8), fitting(8, 1)
    assert whole < parts <= alone
