"""Learners that come as the learning rate falls: when, at which rate, and after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, AdamW, Trainer, UserError
from crossbow_py.averaging import SNOO, AveragingRule, SynchronousSGD
from crossbow_py.engine.update.optimizers import Optimizer, TorchOptimizer
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.train import build
from crossbow_py.train.schedules import Constant, Cosine, seesaw_learners
from tests.support import linear_model
from tests.trainers import Recorder, blobs, equal_states, image_trainer, make_trainer

EPOCHS, SAMPLES, SIZE = 6, 40, 2
BY_SGD = SGD(learning_rate=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("factor", "fewest", "most", "expected"),
    [
        (1.0, 1, 8, 1), (0.51, 1, 8, 1), (0.5, 1, 8, 2), (0.26, 1, 8, 2), (0.25, 1, 8, 4), (0.01, 1, 8, 8),
        (0.0, 1, 8, 8), (0.25, 3, 100, 12), (0.1, 3, 20, 20), (0.5, 4, 4, 4),
    ],
)  # fmt: skip
def test_learners_double_as_the_rate_halves(factor: float, fewest: int, most: int, expected: int) -> None:
    assert seesaw_learners(factor, fewest, most) == expected


def seesaw(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "train_data": blobs(SAMPLES), "batch_size": SIZE, "num_learners": "seesaw", "max_learners": 4,
        "schedule": Cosine(), "averaging": SynchronousSGD(), "optimizer": BY_SGD,
    }  # fmt: skip
    return make_trainer(**{**defaults, **options})


@pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])
@pytest.mark.parametrize(
    ("optimizer", "reference", "power", "rule"),
    [
        (BY_SGD, lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), 1.0, SynchronousSGD()),
        (BY_SGD, lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9), 1.0, SNOO(averaging_period=4)),
        (AdamW(learning_rate=0.01, weight_decay=0.0), lambda own: torch.optim.AdamW(own, lr=0.01, weight_decay=0), 0.5,
         SynchronousSGD()),
    ],
)  # fmt: skip
def test_run_is_that_of_one_model_whose_batch_grows_and_whose_rate_falls_less(
    optimizer: Optimizer, reference: Any, power: float, rule: AveragingRule, executor: str
) -> None:
    """Also between outer steps, after which alone learners come, so that none of a period is lost."""
    trainer, ends = seesaw(optimizer=optimizer, executor=executor, averaging=rule), list[RoundEnd]()
    # The order of samples is the run's own; all else here is PyTorch's.
    stream = [trainer.run.train_feed.batch(start) for start in range(0, EPOCHS * SAMPLES, SIZE)]
    inputs, targets = (torch.cat([getattr(each, name) for each in stream]).clone() for name in ("inputs", "targets"))
    model, seen, counts = linear_model().float(), 0, []
    plain, z = reference(model.parameters()), [own.detach().clone() for own in model.parameters()]
    momenta = [torch.zeros_like(own) for own in z]
    while seen < EPOCHS * SAMPLES:
        factor = trainer.run.schedule.factor(seen, SAMPLES, EPOCHS * SAMPLES)
        due = next(k for k, least in ((1, 0.5), (2, 0.25), (4, 0.0)) if factor > 1.0005 * least)
        counts.append(counts[-1] if len(counts) % rule.averaging_period else due)
        own = slice(seen, seen + counts[-1] * SIZE)
        plain.param_groups[0]["lr"] = optimizer.learning_rate * factor * counts[-1] ** power
        plain.zero_grad()
        nn.functional.cross_entropy(model(inputs[own]), targets[own]).backward()
        plain.step()
        seen += counts[-1] * SIZE
        if isinstance(rule, SNOO) and len(counts) % rule.averaging_period == 0:
            for w, mean, momentum in zip(model.parameters(), z, momenta, strict=True):
                delta = mean - w.detach()
                momentum.mul_(rule.outer_momentum).add_(delta)
                mean.sub_(rule.outer_learning_rate * (delta + rule.outer_momentum * momentum))
                w.data.copy_(mean)
    result = trainer.fit(max_epochs=EPOCHS, after_round=ends.append)
    assert [end.images // SIZE for end in ends] == counts
    assert {1, 2, 4} == set(counts)
    for found, wanted in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("chosen", "alone"), [("fused_threads", "fused"), ("threads", "serial")])
def test_few_learners_do_not_leave_cores_idle_by_the_executor_that_is_fastest_for_many(
    chosen: str, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only executor=auto changes it; what it would choose is given here, as measuring takes seconds."""
    used, threads = set[tuple[int, str]](), torch.get_num_threads()
    monkeypatch.setattr(build, "choose_executor", lambda *own: (dataclasses.replace(own[2], executor=chosen), []))

    def note(end: RoundEnd) -> None:
        assert trainer._loop is not None
        used.add((end.num_learners, trainer._loop.learners.executor.NAME))

    monkeypatch.setattr("crossbow_py.train.tuning.busy_cores.usable_core_ids", lambda: set(range(4)))
    torch.set_num_threads(4)
    try:
        for asked, few in (("auto", alone), (chosen, chosen)):
            trainer = seesaw(executor=asked)
            assert (trainer.run.busy_cores is not None) == (asked == "auto")  # whose threads wait for each other
            trainer.fit(max_epochs=EPOCHS, after_round=note)
            assert used == {(1, few), (2, few), (4, chosen)}
            used.clear()
    finally:
        torch.set_num_threads(threads)


def test_batches_of_learners_that_come_are_asked_for_before_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else workers would load them while a round waits, and bad data would fail in its midst."""
    trainer, ends, asked = seesaw(), list[RoundEnd](), set[int]()
    feed = trainer.run.train_feed
    announce = feed.announce
    monkeypatch.setattr(feed, "announce", lambda starts: (asked.update(starts), announce(starts))[1])
    trainer.fit(max_epochs=EPOCHS, after_round=ends.append)
    assert ends[-1].num_learners == 4
    assert asked == set(range(0, sum(end.images for end in ends), SIZE))


def test_learners_of_models_that_are_averaged_begin_from_the_average() -> None:
    trainer = seesaw(averaging=SMA(rate_scaling="none"), max_learners=3, min_learners=2)
    trainer.fit(max_epochs=EPOCHS)
    assert trainer.run.bank.num_learners == 3


def test_resumed_run_goes_on_with_its_learners_to_the_same_bits(tmp_path: Path) -> None:
    def run(name: str, **options: Any) -> Trainer:
        own = {"num_learners": "seesaw", "max_learners": 4, "schedule": Cosine(epochs=4)}
        return image_trainer(output_dir=tmp_path / name, averaging=SNOO(averaging_period=3), **own, **options)

    whole = run("whole").fit(max_epochs=4)
    run("parts").fit(max_epochs=3)
    resumed = run("parts", resume="auto")
    assert resumed.run.bank.num_learners > 1
    assert equal_states(resumed.fit(max_epochs=4).model, whole.model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_learners": 9, "max_learners": 8}, "goes from min_learners=9 up to max_learners=8; set a larger"),
        ({"num_learners": 2, "min_learners": 3}, "min_learners=3 is what num_learners=seesaw begins with, got num"),
        ({"optimizer": TorchOptimizer(target="torch.optim.SGD")}, "that of optimizer=torch is not known; set"),
        ({"averaging": SynchronousSGD(rate_scaling="adascale")}, "both say how the rate follows"),
        ({"averaging": "independent"}, "averaging=independent needs a fixed num_learners, got seesaw; set it"),
        ({"optimizer": SGD(learning_rate=[0.1, 0.2])}, "num_learners is seesaw; give one value for all"),
        ({"num_learners": "seasaw"}, "num_learners must be"),
    ],
)
def test_what_learners_that_come_do_not_go_with_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _ = seesaw(**options).run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": Constant()}, "stays at 1, as schedule=constant does not halve the rate in this run; take one"),
        ({"schedule": Cosine(final_factor=0.6)}, "stays at 1, as schedule=cosine does not halve the rate in this"),
        ({"max_learners": 1}, "stays at 1, as max_learners=1 allows no more"),
        ({"averaging": SMA(averaging_period=99)}, "stays at 1, as averaging.averaging_period=99 is longer than the"),
        ({"averaging": SMA(averaging_period=99, quadratic_period=0.1)}, "up to K = 4 per device"),
        ({"schedule": Cosine(final_factor=0.3), "max_learners": 9}, "up to K = 2 per device"),
    ],
)
def test_how_many_learners_come_is_said(options: dict[str, Any], said: str) -> None:
    recorder = Recorder()
    seesaw(callbacks=[recorder], **options).fit(max_epochs=1)
    assert any(said in message for message in recorder.of("message"))


@pytest.mark.parametrize("period", [5, 8])
def test_none_come_that_would_never_average(period: int) -> None:
    """Else z would stay where it was when they came, and with it the model that is saved."""
    trainer, ends = seesaw(averaging=SMA(averaging_period=period), max_learners=64), list[RoundEnd]()
    trainer.fit(max_epochs=EPOCHS, after_round=ends.append)
    counts = [end.num_learners for end in ends]
    growths = [index for index in range(1, len(counts)) if counts[index] > counts[index - 1]]
    assert len(growths) > 1 and growths[-1] < len(counts) // period * period


def test_extended_run_goes_on_with_the_learners_of_its_rate(tmp_path: Path) -> None:
    """No learners come after the last round either, where the rate is 0: they might not fit in memory, for nothing."""
    ends: list[RoundEnd] = []
    first = seesaw(output_dir=tmp_path, max_learners=1000)
    first.fit(max_epochs=2, after_round=ends.append)
    assert first.run.bank.num_learners == ends[-1].num_learners < 1000
    ends.clear()
    recorder = Recorder()
    more = seesaw(output_dir=tmp_path, resume="auto", max_learners=2, callbacks=[recorder])  # a new bound, as of memory
    more.fit(max_epochs=20, after_round=ends.append)
    assert ends[0].num_learners == 1 and {1, 2} == {end.num_learners for end in ends}
    with pytest.raises(UserError, match=r"is of another run \(min_learners: 1 → 2\)"):
        _ = seesaw(output_dir=tmp_path, resume="auto", min_learners=2).run
