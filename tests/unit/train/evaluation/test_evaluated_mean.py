"""Rules by which learners train apart for several rounds: their mean is evaluated, saved and restarted from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crossbow_py import SGD, SMA, Independent, Trainer
from crossbow_py.averaging import PAPA, SNOO, DiLoCo, Elastic, GroupedSMA, LocalSGD, OuterStep, SlowMo, Stage
from crossbow_py.core.errors import UserError
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.update.outer_step import mean_of_learners, take_outer_step
from crossbow_py.schedules import Constant, Cosine, MultiStep
from crossbow_py.train.checks.remarks import remarks_on_length
from crossbow_py.train.loop.average_model import spread
from crossbow_py.train.run_folder.reporter import Result
from tests.trainers import Recorder, blobs, make_trainer


def trained(rounds: int, **options: Any) -> tuple[Trainer, Result]:
    trainer = make_trainer(num_learners=3, **options)
    return trainer, trainer.fit(max_rounds=rounds)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    bank = trainer.run.bank
    return [bank.learner_state(j)["weight"].clone() for j in range(bank.num_learners)]


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo, SlowMo, PAPA])
def test_model_of_a_run_shorter_than_the_period_is_the_mean_of_its_learners(rule: type) -> None:
    trainer, result = trained(7, averaging=rule(averaging_period=1000), test_data=blobs(30))
    rows = weights(trainer)
    assert not torch.equal(rows[0], rows[1])
    torch.testing.assert_close(result.model.state_dict()["weight"], torch.stack(rows).mean(0))
    z = trainer.run.bank.z.shaped()["weight"]
    assert torch.equal(z, make_trainer().run.bank.z.shaped()["weight"])  # a look at the mean has not moved it


@pytest.mark.parametrize("rule", [LocalSGD, PAPA])
def test_spread_is_around_the_mean_that_is_evaluated(rule: type) -> None:
    trainer, _ = trained(7, averaging=rule(averaging_period=1000))
    bank, mean = trainer.run.bank, mean_of_learners(trainer.run.bank, Collective())
    length = torch.linalg.vector_norm(torch.cat(mean.trained()))
    squares = [
        torch.linalg.vector_norm(torch.cat(bank.weights.trained(j)) - torch.cat(mean.trained())) ** 2 / length**2
        for j in range(3)
    ]
    assert spread(trainer.run) == pytest.approx(float(sum(squares) / 3) ** 0.5, rel=1e-5)


def test_average_model_of_zeros_has_no_spread() -> None:
    class Zeros(torch.nn.Linear):
        def reset_parameters(self) -> None:
            self.weight.data.zero_()
            self.bias.data.zero_()

    trainer, _ = trained(7, averaging=SMA(averaging_period=1000), model=lambda: Zeros(4, 3))
    assert spread(trainer.run) is None
    trainer, _ = trained(7, averaging=LocalSGD(averaging_period=1000), model=lambda: Zeros(4, 3))
    found = spread(trainer.run)
    assert found is not None and 0 < found < 1


def test_period_longer_than_the_run_is_said() -> None:
    said = []
    for kind, period in ((SMA, 6), (SMA, 5), (LocalSGD, 6), (PAPA, 6)):
        recorder = Recorder()
        make_trainer(averaging=kind(averaging_period=period), callbacks=[recorder]).fit(max_epochs=1)
        said.append([message for message in recorder.of("message") if "averaging_period=6" in message])
    assert [len(messages) for messages in said] == [1, 0, 1, 1]
    assert "is longer than the run of 5 rounds: learners never average, and the average model is as" in said[0][0]
    assert "evaluations show a mean of models apart" in said[2][0]


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo, SlowMo])
def test_model_right_after_learners_averaged_is_z_to_the_bit(rule: type) -> None:
    trainer, result = trained(6, averaging=rule(averaging_period=3))
    assert torch.equal(result.model.state_dict()["weight"], trainer.run.bank.z.shaped()["weight"])


def test_evaluation_between_two_averagings_changes_nothing_of_what_is_learned() -> None:
    options = {"averaging": DiLoCo(averaging_period=4), "num_learners": 2, "test_data": blobs(30)}
    seldom, often = make_trainer(**options), make_trainer(**options)
    seldom.fit(max_rounds=10)
    for _ in range(10):
        often.fit(max_rounds=1)
    assert torch.equal(seldom.run.bank.z.storage, often.run.bank.z.storage)
    assert all(torch.equal(one, other) for one, other in zip(weights(seldom), weights(often), strict=True))


def test_restart_after_rounds_apart_loses_none_of_them() -> None:
    # An epoch is 40 samples, a round 12: the rate has dropped when round 4 begins, which learns next to nothing.
    options: dict[str, Any] = {"schedule": MultiStep(milestones=(1.0,), gamma=1e-9)}
    apart, _ = trained(4, averaging=LocalSGD(averaging_period=1000), **options)
    mean = torch.stack(weights(apart)).mean(0)
    together, result = trained(5, averaging=LocalSGD(averaging_period=1000), **options)
    for row in weights(together):
        torch.testing.assert_close(row, mean)
    torch.testing.assert_close(result.model.state_dict()["weight"], mean)


def test_population_of_papa_stays_apart_when_the_rate_drops() -> None:
    options: dict[str, Any] = {"schedule": MultiStep(milestones=(1.0,), gamma=0.1)}
    rows = weights(trained(5, averaging=PAPA(averaging_period=1000), **options)[0])
    assert not torch.equal(rows[0], rows[1])


def test_last_round_of_a_growing_period_averages() -> None:
    averaging = SMA(quadratic_period=1.0)  # (1 / 0.02)² rounds, more than there are
    trainer = make_trainer(averaging=averaging, optimizer=SGD(learning_rate=0.02))
    result = trainer.fit(max_samples=56)
    start = make_trainer().run.bank.z.shaped()["weight"]
    assert not torch.equal(result.model.state_dict()["weight"], start)
    assert (trainer.state.round_index, trainer.state.apart_since) == (7, 7)


def test_period_that_grows_is_that_of_a_rate_that_is_warmed_up() -> None:
    # In the first round of two epochs of warm-up the rate is 0.1 / 80, and the period would be 25,600 rounds.
    options: dict[str, Any] = {"optimizer": SGD(learning_rate=0.1), "schedule": Constant(warmup_epochs=2.0)}
    trainer, _ = trained(9, averaging=LocalSGD(quadratic_period=0.2), **options)
    assert trainer.state.apart_since == 8  # after every four rounds


@pytest.mark.parametrize("rule", [SMA, Elastic, GroupedSMA])
def test_period_that_grows_needs_an_end_where_z_is_what_is_evaluated(rule: type) -> None:
    with pytest.raises(UserError, match="set max_epochs or max_samples"):
        make_trainer(averaging=rule(quadratic_period=0.2)).fit(max_rounds=3)
    make_trainer(averaging=LocalSGD(quadratic_period=0.2)).fit(max_rounds=3)


def test_period_that_grows_beyond_all_numbers_never_ends() -> None:
    rule = LocalSGD(quadratic_period=1.0)
    stage = Stage(round_index=9, num_learners=2, learning_rate=1e-200, rounds_apart=10, first_rate=1e-200)
    assert rule.round(stage) is None


def test_period_that_grows_is_fixed_when_it_begins() -> None:
    # In the middle of the first epoch the rate falls from 0.1 to 0.05, and the period grows from 4 rounds to 16.
    options: dict[str, Any] = {"schedule": MultiStep(milestones=(0.5,), gamma=0.5), "num_learners": 2}
    averaging = LocalSGD(quadratic_period=0.2, averaging_period=1, restart_on_drop=False)
    trainer = make_trainer(averaging=averaging, optimizer=SGD(learning_rate=0.1), **options)
    since = []
    for _ in range(8):
        trainer.fit(max_rounds=1)
        since.append(trainer.state.apart_since)
    # The rate falls at sample 20, in the third round, and the period which began before is over after the fourth.
    assert since == [0, 0, 0, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("momentum", ["keep", "average"])
def test_learner_that_went_out_of_bounds_adds_nothing_to_an_outer_step(momentum: str) -> None:
    trainer, _ = trained(3, averaging=LocalSGD(averaging_period=1000), optimizer=SGD(learning_rate=0.1, momentum=0.9))
    bank = trainer.run.bank
    z, rows = bank.z.shaped()["weight"].clone(), weights(trainer)
    velocities = [bank.state["momentum"].shaped(j)["weight"].clone() for j in range(3)]
    for held in (bank.weights, bank.state["momentum"]):
        held.shaped(1)["weight"].fill_(1e30)  # what a step can leave before the gate sees a loss
    expected = z + (rows[0] - z + rows[2] - z) / 3
    found = mean_of_learners(bank, Collective(), without=[1])
    torch.testing.assert_close(found.shaped()["weight"], expected)
    take_outer_step(bank, OuterStep(learner_momentum=momentum), Collective(), without=[1])  # type: ignore[arg-type]
    for row in [bank.z.shaped()["weight"], *weights(trainer)]:
        torch.testing.assert_close(row, expected)
    own = bank.state["momentum"].shaped(0)["weight"]
    of_all = (velocities[0] + velocities[2]) / 3
    torch.testing.assert_close(own, of_all if momentum == "average" else velocities[0])


@pytest.mark.parametrize("rule", [LocalSGD, DiLoCo, SlowMo, PAPA])
def test_run_in_which_a_learner_blows_up_between_two_outer_steps_goes_on_without_it(rule: type) -> None:
    inputs, targets = blobs(40)
    large = make_trainer().run.train_feed.batch(4).inputs[0]  # of learner 1 in round 0
    inputs[(inputs == large).all(1)] = 1e4  # its loss is finite, and that of round 1 is not

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.pow(4).mean()

    options: dict[str, Any] = {"train_data": (inputs, targets), "on_nonfinite": "reseed", "loss": loss}
    trainer, result = trained(3, averaging=rule(averaging_period=2), optimizer=SGD(learning_rate=1e-3), **options)
    assert trainer.state.num_reseeded == 1
    for row in [*weights(trainer), result.model.state_dict()["weight"]]:
        assert row.abs().max() < 10


def test_restart_of_independent_learners_is_refused() -> None:
    trainer, _ = trained(2, averaging=Independent())
    before = weights(trainer)
    with pytest.raises(UserError, match="independent learners lack"):
        trainer.restart()
    assert all(torch.equal(one, other) for one, other in zip(weights(trainer), before, strict=True))


def test_restart_brings_the_outer_momentum_of_one_learner_to_rest() -> None:
    trainer = make_trainer(num_learners=1, averaging=SNOO(averaging_period=2))
    trainer.fit(max_rounds=3)
    bank = trainer.run.bank
    assert bank.velocity is not None and bank.velocity.storage.any()
    trainer.restart()
    assert not bank.velocity.storage.any() and torch.equal(bank.z_prev.storage, bank.z.storage)


def test_outer_rate_is_remarked_on_also_where_the_auto_tuner_takes_learners() -> None:
    auto = make_trainer(num_learners="auto", averaging=DiLoCo(outer_learning_rate=2)).run
    assert "diverges from 1.357 on" in remarks_on_length(auto, 10_000)[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": Constant(warmup_epochs=2.0)}, "warmup_epochs=2 is longer than the run of 1 epochs"),
        ({"schedule": Cosine(epochs=0.5)}, "schedule.epochs=0.5 is shorter than the run of 1 epochs"),
        ({"averaging": SMA(average_ema=1.0)}, None),
        ({"schedule": Cosine(epochs=0.5, final_factor=0.1), "averaging": SMA(average_ema=0.5)}, None),
        ({"averaging": GroupedSMA()}, "averaging.group_size=4 puts all 2 learners into one group"),
        ({"averaging": SMA(node_period=2)}, "averaging.node_period=2 is for several nodes"),
        ({"schedule": Constant(warmup_epochs=1.0), "averaging": SMA()}, None),
        ({"averaging": GroupedSMA(averaging_period=9, group_size=1)}, "averaging_period=9 is longer than the run"),
        ({"averaging": GroupedSMA(averaging_period=9)}, "averaging.group_size=4 puts"),
        ({"averaging": "diloco", "num_learners": 1}, "averaging_period=50 is longer than the run of 10 rounds"),
        ({"averaging": "snoo"}, "averaging_period=20 is longer than the run of 5 rounds, which has no outer step"),
        ({"averaging": DiLoCo(outer_learning_rate=2, averaging_period=2)}, "diverges from 1.357 on; take a smaller"),
        ({"averaging": SlowMo(slow_learning_rate=4, averaging_period=2)}, "diverges from 3.4 on; take a smaller"),
    ],
)
def test_settings_that_do_nothing_in_this_run_are_said(options: dict[str, Any], said: str | None) -> None:
    recorder = Recorder()
    make_trainer(callbacks=[recorder], **options).fit(max_epochs=1)
    messages = recorder.of("message")
    assert len(messages) == (said is not None) and all(said in message for message in messages), messages
