"""The learning-rate range test: its losses are those of a loop with these rates, and nothing else changes."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, AdamW, Independent, Muon, UserError
from crossbow_py.averaging import PAPA, DiLoCo, Elastic, GroupedSMA, LocalSGD, SlowMo, SynchronousSGD
from crossbow_py.estimate.__main__ import main
from crossbow_py.train.tuning.range_test import exponential_rates, has_diverged, smoothed, steepest
from tests import rank_jobs
from tests.rank_jobs import results
from tests.support import linear_model
from tests.trainers import deeper_image_model, equal_states, image_trainer, make_trainer

RANGE: dict[str, Any] = {"num_rounds": 30, "lowest": 1e-3, "highest": 0.1}
RULES = [
    SMA(), SynchronousSGD(), Independent(), Elastic(averaging_period=2), LocalSGD(averaging_period=3),
    DiLoCo(averaging_period=3), SlowMo(averaging_period=3), PAPA(averaging_period=2), GroupedSMA(group_size=1),
]  # fmt: skip


def test_rates_rise_by_one_factor_from_the_lowest_to_the_highest() -> None:
    assert exponential_rates(0.001, 10.0, 5) == pytest.approx([0.001, 0.01, 0.1, 1.0, 10.0])


def test_losses_of_one_learner_are_those_of_a_plain_torch_loop() -> None:
    trainer = make_trainer(num_learners=1, optimizer=SGD(learning_rate=0.3, momentum=0.9, weight_decay=0.01))
    found = trainer.find_learning_rate(num_rounds=40, lowest=1e-4, highest=1.0)
    model = linear_model()
    decayed, rest = [model.weight], [model.bias]
    reference = torch.optim.SGD([{"params": decayed, "weight_decay": 0.01}, {"params": rest}], lr=1.0, momentum=0.9)
    for n, (rate, loss) in enumerate(zip(found.learning_rates, found.losses, strict=True)):
        assert rate == pytest.approx(10 ** (-4 + 4 * n / 39))
        batch = trainer.run.train_feed.batch(4 * n)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.zero_grad()
        expected = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        expected.backward()
        reference.step()
        assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert found.optimizer.learning_rate == pytest.approx(found.suggested)


def test_losses_of_two_learners_are_those_of_the_equations() -> None:
    trainer = make_trainer(optimizer=SGD(learning_rate=0.05, momentum=0.5), averaging=SMA(correction_rate=0.5))
    found = trainer.find_learning_rate(**RANGE)
    models = [linear_model(), linear_model()]
    velocity = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    z = [p.detach().clone() for p in linear_model().parameters()]
    for n, given in enumerate(found.learning_rates):
        rate, losses = given * math.sqrt(2), []
        for j, model in enumerate(models):
            batch = trainer.run.train_feed.batch((2 * n + j) * 4)
            parameters = list(model.parameters())
            loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
            losses.append(loss.item())
            for i, (w, g) in enumerate(zip(parameters, torch.autograd.grad(loss, parameters), strict=True)):
                velocity[j][i] = 0.5 * velocity[j][i] + g
                w.data -= rate * velocity[j][i] + 0.5 * (w.detach() - z[i])
        z = [(a.detach() + b.detach()) / 2 for a, b in zip(*(model.parameters() for model in models), strict=True)]
        assert found.losses[n] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
@pytest.mark.parametrize("before", [0, 5])
def test_trainer_and_generators_are_untouched(executor: str, before: int) -> None:
    tested, plain = (image_trainer(executor=executor) for _ in range(2))
    for trainer in (tested, plain) if before else ():
        trainer.fit(max_rounds=before)
    state = tested.state.to_plain()
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    tested.find_learning_rate(**RANGE)
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == kept[1:]
    assert tested.state.to_plain() == state
    assert equal_states(tested.model, plain.model)
    assert equal_states(tested.fit(max_epochs=3).model, plain.fit(max_epochs=3).model)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.NAME)
def test_every_rule_trains_and_the_first_loss_is_that_of_the_initial_model(rule: Any) -> None:
    trainer = make_trainer(averaging=rule)
    first = [trainer.run.train_feed.batch(0 if rule == Independent() else 4 * j) for j in (0, 1)]
    models = [trainer.run.bank.module(j) for j in (0, 1)]
    both = zip(models, first, strict=True)
    expected = [nn.functional.cross_entropy(model(batch.inputs), batch.targets).item() for model, batch in both]
    found = trainer.find_learning_rate(**RANGE)
    assert found.losses[0] == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert len(found.losses) == 30 and found.losses[-1] < 0.5 * found.losses[0]
    assert found.suggested is not None and 1e-3 < found.suggested < 0.1


@pytest.mark.parametrize("optimizer", [AdamW(), Muon(), Muon(other_optimizer="adamw")])
def test_other_rates_of_an_optimizer_rise_in_proportion(optimizer: Any) -> None:
    found = image_trainer(optimizer=optimizer, model=deeper_image_model).find_learning_rate(**RANGE)
    assert found.suggested is not None
    factor = found.suggested / optimizer.learning_rate
    assert found.optimizer.learning_rate == pytest.approx(found.suggested)
    if isinstance(optimizer, Muon):
        other = found.optimizer.other_learning_rate  # type: ignore[attr-defined]
        assert other == pytest.approx(factor * optimizer.other_learning_rate)


@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_losses_are_the_same_on_every_executor(executor: str) -> None:
    reference = make_trainer().find_learning_rate(**RANGE).losses
    assert make_trainer(executor=executor).find_learning_rate(**RANGE).losses == pytest.approx(reference, rel=1e-4)


@pytest.mark.slow
def test_two_ranks_of_a_learner_find_what_one_of_two_finds() -> None:
    options = {"model": linear_model, "test_data": None, "augmentation": None, "train_data": trained_on()}
    ours, theirs = results(rank_jobs.find_learning_rate, 2, {**options, "num_learners": 1, "executor": "threads"})
    assert ours == theirs
    (alone,) = results(rank_jobs.find_learning_rate, 1, {**options, "num_learners": 2, "executor": "threads"})
    assert ours == pytest.approx(alone, rel=1e-4)


def trained_on() -> Any:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(60, 4, generator=generator), torch.arange(60) % 3


def test_test_ends_where_training_diverges() -> None:
    found = make_trainer(train_data=trained_on()).find_learning_rate(num_rounds=100, lowest=1e-3, highest=1e6)
    assert found.diverged and len(found.losses) < 100
    assert found.suggested is None or found.suggested < found.learning_rates[-1]


def test_smoothing_is_an_average_of_weights_that_sum_to_one() -> None:
    losses = [3.0, 1.0, 2.0]
    expected = [3.0, (0.9 * 3 + 1) / 1.9, (0.81 * 3 + 0.9 * 1 + 2) / 2.71]
    assert smoothed(losses).tolist() == pytest.approx(expected)


def test_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = exponential_rates(1e-5, 1.0, 101)  # 20 rounds a decade
    slopes = [0.0] * 40 + [-0.02] * 20 + [-0.002] * 20 + [0.5] * 20
    losses = [3.0, *(3.0 + np.cumsum(slopes)).tolist()]
    found = steepest(rates, losses)
    # The average lags behind by some rounds: it is steepest at the end of what falls fast, from 1e-3 to 1e-2.
    assert found is not None and 2e-3 < found < 2e-2
    assert steepest(rates, [3.0] * 101) is None
    assert steepest(rates, np.linspace(1.0, 9.0, 101).tolist()) is None


def test_divergence_is_four_times_the_lowest_loss_or_not_finite() -> None:
    assert has_diverged([1.0, math.nan]) and has_diverged([1.0, math.inf])
    assert not has_diverged([1.0] * 20 + [5.0])
    assert has_diverged([1.0] * 20 + [9.0] * 20)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"num_rounds": 5}, "num_rounds must be a whole number from 10 on, got 5"),
        ({}, {"num_rounds": 20.0}, "num_rounds must be a whole number from 10 on, got 20.0"),
        ({}, {"lowest": 1.0, "highest": 0.1}, "rates with 0 < lowest < highest, got 1.0 and 0.1"),
        ({}, {"lowest": 0.0}, "rates with 0 < lowest < highest, got 0.0"),
        ({"optimizer": SGD(learning_rate=0.0)}, {}, "tries multiples of optimizer.learning_rate, got 0"),
    ],
)
def test_what_makes_no_test_is_refused(options: Any, arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(**options).find_learning_rate(**arguments)


@pytest.mark.slow
def test_command_says_and_writes_what_it_found(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=digits", "find_learning_rate=true", "num_learners=2", "executor=serial", "device=cpu"]
    assert main([*words, f"output_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "learning_rate.json").read_text())
    assert f"The loss fell fastest with optimizer.learning_rate={found['suggested']:.3g} (" in said
    assert found["suggested"] in found["learning_rates"]
    assert found["optimizer"]["learning_rate"] == pytest.approx(found["suggested"])
    assert {path.name for path in tmp_path.iterdir()} == {"learning_rate.json", "learning_rate.png"}
