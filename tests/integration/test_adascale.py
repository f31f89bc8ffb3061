"""The gradient noise in whole runs: learning rates that follow the gain, resumes to the bit, ranks, and bad input."""

from __future__ import annotations

import dataclasses

import pytest

from crossbow_py import SGD, SMA, AutoTunerSettings, UserError
from crossbow_py.averaging import PAPA, LocalSGD, SynchronousSGD
from crossbow_py.engine.goodput import NoiseScale
from crossbow_py.schedules import WSD, MultiStep
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings, checkpoints
from crossbow_py.train.checkpoints.manager import CheckpointManager
from crossbow_py.train.checks.remarks import remarks_on_length
from tests import rank_jobs
from tests.rank_jobs import assert_alike, results
from tests.trainers import Recorder, equal_states, image_trainer, make_trainer

ROUNDS = 90  # φ is known after 61, as rounds 0, 4, ... 60 compare, and used from 62 on


def with_rates(**options):
    """A trainer, and the learning rates and comparisons of its rounds as they come."""
    trainer = make_trainer(optimizer=SGD(learning_rate=0.02), **options)
    rates, found, absorb = [], {}, trainer.state.absorb

    def absorbed(outcome):
        found[outcome.plan.index] = outcome.comparison
        rates.append((outcome.plan.index, outcome.plan.learning_rates[0]))
        absorb(outcome)

    trainer.state.absorb = absorbed
    return trainer, rates, found


@pytest.mark.parametrize("rule", [SMA, SynchronousSGD], ids=lambda rule: rule.NAME)
@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_rate_is_that_of_the_gain_of_the_rounds_before_the_last(rule, executor):
    trainer, rates, found = with_rates(averaging=rule(rate_scaling="adascale"), num_learners=3, executor=executor)
    trainer.fit(max_rounds=ROUNDS)
    rates = dict(rates)
    assert [index for index, each in found.items() if each is not None] == list(range(0, ROUNDS, 4))
    for index in range(ROUNDS):
        noise = NoiseScale(4).after([each for n, each in found.items() if each is not None and n < index - 1])
        assert rates[index] == pytest.approx(0.02 * noise.gain(3), rel=1e-12)
    assert rates[0] == rates[61] == 0.02 < rates[62]
    assert rates[ROUNDS - 1] <= 0.06


def test_one_learner_has_the_rate_of_one():
    trainer, rates, _ = with_rates(averaging=SMA(rate_scaling="adascale"), num_learners=1)
    trainer.fit(max_rounds=ROUNDS)
    assert {rate for _, rate in rates} == {0.02}
    assert trainer.state.noise.count > 16


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "stops"), [("serial", (61, 62, 64, 65, 66, 67)), ("threads", (62, 65))])
def test_resumed_run_takes_the_same_course_to_the_bit(tmp_path, executor, stops):
    options = {"averaging": SMA(rate_scaling="adascale"), "executor": executor, "num_learners": 2}
    whole = image_trainer(**options).fit(max_rounds=72)
    stopped = image_trainer(**options, output_dir=tmp_path, checkpoint=CheckpointSettings(every_epochs=None, keep=100))
    for stop in stops:
        stopped.fit(max_rounds=stop - stopped.state.round_index)
    written = {int(each.name.rpartition("-")[2]): each for each in checkpoints(tmp_path)}
    for stop in stops:
        resumed = image_trainer(**options, resume=str(written[stop * 8]))
        assert resumed.state.round_index == stop
        result = resumed.fit(max_rounds=72, counts_earlier_rounds=True)
        assert equal_states(result.model, whole.model)


@pytest.mark.slow
def test_ranks_agree_on_the_noise_and_on_z():
    options = {"num_learners": 2, "averaging": SMA(rate_scaling="adascale")}
    found, again = (results(rank_jobs.train, 2, options, {"max_rounds": 70}, True) for _ in range(2))
    assert_alike(found)
    assert (found[0].z == again[0].z).all()  # no clock decides when they agree


@pytest.mark.parametrize("rule", [LocalSGD, PAPA])
def test_gain_is_refused_where_learners_are_apart(rule):
    with pytest.raises(UserError, match="averaging.rate_scaling=adascale compares .* set averaging.rate_scaling=sqrt"):
        rule(rate_scaling="adascale")
    with pytest.raises(UserError, match="adascale"):
        SMA(rate_scaling="adascale", averaging_period=2)
    with pytest.raises(UserError, match="average in every round"):
        make_trainer(averaging=SMA(averaging_period=2), count_effective_samples=True)


@pytest.mark.parametrize(
    ("averaging", "objective", "told", "measured"),
    [
        (SMA(), "goodput", False, True),
        (SynchronousSGD(), "goodput", False, True),
        (SMA(), "throughput", False, False),
        (LocalSGD(), "goodput", True, False),
        (SMA(averaging_period=4), "goodput", True, False),
        (LocalSGD(), "throughput", False, False),
    ],
)
def test_tuner_goes_by_goodput_where_it_can_and_says_where_it_cannot(averaging, objective, told, measured):
    recorder = Recorder()
    options = {"averaging": averaging, "auto_tuner": AutoTunerSettings(objective=objective)}
    trainer = make_trainer(num_learners="auto", callbacks=[recorder], **options)
    trainer.fit(max_rounds=80)
    assert (trainer.state.noise is not None and trainer.state.noise.samples is not None) is measured
    assert any("goes by images/s alone" in text for text in recorder.of("message")) is told


@pytest.mark.parametrize(("before", "after"), [("throughput", "goodput"), ("goodput", "throughput")])
def test_resumed_run_measures_what_its_objective_needs(tmp_path, before, after):
    def made(objective, **options):
        settings = AutoTunerSettings(objective=objective)
        return make_trainer(num_learners="auto", auto_tuner=settings, output_dir=tmp_path, **options)

    made(before).fit(max_rounds=40)
    resumed = made(after, resume="auto")
    resumed.fit(max_rounds=40)
    assert (resumed.state.noise is not None) is (after == "goodput")


def test_run_too_short_for_a_known_gain_says_so():
    run = make_trainer(averaging=SMA(rate_scaling="adascale")).run
    short, long = (remarks_on_length(run, rounds * run.samples_per_round) for rounds in (255, 256))
    assert short == [
        "AdaScale's gain counts as 1 until it is known, after 64 rounds, and this run has about 255; set "
        "averaging.rate_scaling=sqrt for one so short."
    ]
    assert long == remarks_on_length(make_trainer().run, 255 * 8) == []


def test_fixed_number_of_learners_measures_nothing():
    trainer = make_trainer()
    trainer.fit(max_rounds=5)
    assert trainer.state.noise is None
    assert not trainer.state.compared


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_single_learner_resumes_with_its_noise_from_any_round(tmp_path, monkeypatch, executor):
    """Wherever they fall in the four rounds from one comparison to the next."""
    stops, begin = (73, 78, 83, 88), CheckpointManager.begin

    def write_now(self, elapsed_s):
        begin(self, elapsed_s)
        self.settle()

    monkeypatch.setattr(CheckpointManager, "begin", write_now)
    monkeypatch.setattr(CheckpointManager, "is_due", lambda self, elapsed_s: trainer.state.round_index in stops)
    often = CheckpointSettings(every_epochs=None, keep=100)
    options = {"averaging": SMA(rate_scaling="adascale"), "num_learners": 1, "executor": executor}
    trainer = whole = make_trainer(**options, output_dir=tmp_path, checkpoint=often)
    whole.fit(max_rounds=120)
    written = {int(each.name.rpartition("-")[2]) // 4: each for each in checkpoints(tmp_path)}  # batches of 4
    assert {stop % 4 for stop in stops} == set(range(4)) and written.keys() == {*stops, 120}
    for stop in stops:
        trainer = make_trainer(**options, resume=str(written[stop]))
        trainer.fit(max_rounds=120, counts_earlier_rounds=True)
        assert trainer.state.noise == whole.state.noise


def test_noise_is_in_checkpoints_as_are_comparisons_that_wait(tmp_path):
    trainer = make_trainer(averaging=SMA(rate_scaling="adascale"), output_dir=tmp_path)
    trainer.fit(max_rounds=65)
    again = make_trainer(averaging=SMA(rate_scaling="adascale"), output_dir=tmp_path, resume="auto")
    assert again.state.noise == trainer.state.noise
    assert again.state.compared == trainer.state.compared != []
    assert dataclasses.asdict(again.state)["samples_seen"] == 65 * 8


def test_effective_samples_end_the_run_and_move_the_schedule():
    options = {"averaging": SMA(rate_scaling="adascale"), "num_learners": 4, "schedule": WSD(cooldown=1.0)}
    trainer, rates, found = with_rates(**options, count_effective_samples=True)
    result = trainer.fit(max_samples=500)
    assert result.stop_reason == "max_samples"
    effective, rates = 0.0, dict(rates)
    for index in range(trainer.state.round_index):
        noise = NoiseScale(4).after([each for n, each in found.items() if each is not None and n < index - 1])
        assert effective < 500
        assert rates[index] == pytest.approx(0.02 * noise.gain(4) * (1 - effective / 500), rel=1e-9)
        effective += 4 * noise.gain(4)
    assert trainer.state.effective_samples == pytest.approx(effective)
    assert 500 <= effective < 500 + 16 < trainer.state.samples_seen
    assert result.summary.samples_seen == 16 * trainer.state.round_index


def test_one_learner_counts_effective_samples_as_samples():
    trainer = make_trainer(num_learners=1, count_effective_samples=True)
    trainer.fit(max_epochs=10)
    assert trainer.state.effective_samples == trainer.state.samples_seen == 400


@pytest.mark.slow
def test_resumed_run_that_counts_effective_samples_takes_the_same_course_to_the_bit(tmp_path):
    options = {"averaging": SMA(rate_scaling="adascale"), "count_effective_samples": True}
    options["schedule"] = MultiStep(milestones=(8.0, 12.0), gamma=0.5)
    whole = image_trainer(**options).fit(max_epochs=16)
    image_trainer(**options, output_dir=tmp_path).fit(max_rounds=70)
    resumed = image_trainer(**options, output_dir=tmp_path, resume="auto").fit(max_epochs=16)
    assert equal_states(resumed.model, whole.model)
    assert resumed.summary.samples_seen == whole.summary.samples_seen > 16 * 50


def test_effective_samples_are_refused_where_learners_are_apart():
    with pytest.raises(UserError, match="count_effective_samples=true goes by .* noise, which averaging=local"):
        make_trainer(averaging=LocalSGD(), count_effective_samples=True)
