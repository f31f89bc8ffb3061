"""Windows of throughput, runs whose number of learners changes while they train, and the most that memory holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.core.errors import LearnerError, UserError
from crossbow_py.core.measured import Remembered
from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerState, Decision
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.loop.training_loop import TrainingLoop
from crossbow_py.train.run_folder.reporter import Reporter, run_info
from crossbow_py.train.run_settings import StopConditions
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from tests.networks import LstmClassifier, inputs_for
from tests.trainers import Recorder, blobs, change_run, image_model, images, make_trainer


class Scripted(LearnerTuning):
    """A tuning that takes counts from a list, one per round, whatever the throughput."""

    def __init__(self, counts):
        super().__init__(AutoTuner())
        self.counts = list(counts)

    def after_round(self, images, elapsed_s, noise=None):
        if not self.counts:
            return None
        count = self.counts.pop(0)
        before, self.state = self.state.num_learners, AutoTunerState(num_learners=count)
        return Decision("grow" if count > before else "shrink", count, f"{before} → {count}")

    def out_of_memory(self, noise=None):
        self.state = AutoTunerState(num_learners=self.state.num_learners - 1)
        return Decision("shrink", self.state.num_learners, "memory does not hold it")


class Seen(Recorder):
    def on_learner_count(self, change):
        self.calls.append(("change", change))

    @property
    def counts(self):
        return [change.num_learners for change in self.of("change")]


def auto_trainer(counts, **options):
    trainer = make_trainer(num_learners="auto", **options)
    change_run(trainer, tuning=Scripted(counts))
    return trainer


def test_window_ends_with_the_first_round_past_its_length():
    tuning = LearnerTuning(AutoTuner(warm_up_windows=0, windows=1), window_s=1.0)
    decisions = [tuning.after_round(16, seconds) for seconds in (10.0, 10.4, 10.8, 11.2, 11.6)]
    # Begun at 10.0; three rounds of 16 images by 11.2: 48 / 1.2 = 40 images/s, and one more learner is worth a look.
    assert [decision is None for decision in decisions] == [True, True, True, False, True]
    assert (decisions[3].num_learners, tuning.state.measured) == (2, ((1, pytest.approx(40.0)),))


def test_measurement_that_is_interrupted_begins_anew():
    tuning = LearnerTuning(AutoTuner(warm_up_windows=0, windows=2), window_s=1.0)
    tuning.after_round(16, 10.0)
    tuning.after_round(16, 11.0)
    assert tuning.state.recent == (16.0,)
    tuning.interrupt()
    # 64 images by 20.0 are not counted: only those of two windows afterwards are.
    decisions = [tuning.after_round(images, seconds) for images, seconds in ((64, 20.0), (32, 21.0), (32, 22.0))]
    assert [decision.num_learners if decision else None for decision in decisions] == [None, 1, 2]
    assert tuning.state.measured == ((1, 32.0),)


def test_rounds_longer_than_a_window_count_for_several():
    tuning = LearnerTuning(AutoTuner(warm_up_windows=1, windows=3), window_s=1.0)
    decisions = [tuning.after_round(16, seconds) for seconds in (10.0, 14.0, 18.0, 20.0, 22.0)]
    # One round of 4 s warms up, one is the whole measurement; with two learners, rounds of 2 s count for two windows.
    assert [decision.num_learners if decision else None for decision in decisions] == [None, 1, 2, 2, 2]
    assert tuning.state.recent == (8.0, 8.0)


def test_limit_lowered_on_resume_takes_learners_away_and_one_raised_starts_growing(tmp_path):
    options = {"train_data": blobs(120), "output_dir": tmp_path}
    first = make_trainer(num_learners="auto", max_learners=4, **options)
    first.run.tuning.state = AutoTunerState(4, "settled", measured=((1, 100.0), (2, 190.0), (4, 300.0)))
    first.run.bank.resize(4)
    first.fit(max_rounds=2)
    options |= {"resume": options.pop("output_dir")}
    lower = make_trainer(num_learners="auto", max_learners=3, **options)
    assert (lower.run.tuning.state.num_learners, lower.run.tuning.state.phase) == (2, "settled")
    assert lower.run.bank.num_learners == 2
    assert lower.fit(max_rounds=2).summary.num_learners == 2
    same = make_trainer(num_learners="auto", max_learners=4, **options)
    assert same.run.tuning.state.phase == "settled"
    higher = make_trainer(num_learners="auto", max_learners=8, **options)
    assert (higher.run.tuning.state.num_learners, higher.run.tuning.state.phase) == (4, "growing")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_note_is_told_once_however_often_the_number_of_learners_changes():
    recorder = Recorder()
    inputs, targets = inputs_for(LstmClassifier)
    auto_trainer(
        [2, 3, 1], model=LstmClassifier, train_data=(inputs, targets), executor="fused", callbacks=[recorder]
    ).fit(max_rounds=8)
    assert sum("learner by learner" in message for message in recorder.of("message")) == 1


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_run_whose_learners_come_and_go_sees_every_sample_and_learns(executor):
    seen = Seen()
    counts = [2, 3, 1, 4, 2]
    trainer = auto_trainer(counts, executor=executor, train_data=blobs(120), test_data=blobs(30), callbacks=[seen])
    result = trainer.fit(max_epochs=4)
    assert seen.counts == counts
    # Rounds of 1, 2, 3, 1, 4 learners with batches of 4, then 2: samples seen when each decision was taken.
    assert [change.samples_seen for change in seen.of("change")] == [4, 12, 24, 28, 44]
    assert seen.of("epoch")[-1].num_learners == result.summary.num_learners == 2
    assert result.test_accuracy >= 0.9


def test_growth_from_one_learner_begins_at_its_weights_and_shrinking_to_one_ends_at_the_average():
    trainer = auto_trainer([2], train_data=blobs(120), optimizer=SGD(learning_rate=0.0))
    bank = trainer.run.bank
    before = bank.weights.flat(0)[0].clone()
    trainer.fit(max_rounds=3)
    assert bank.num_learners == 2
    assert torch.equal(bank.z.flat()[0], before)
    trainer.run.tuning.counts = [1]
    trainer.fit(max_rounds=2)
    assert bank.num_learners == 1
    assert torch.equal(bank.weights.flat(0)[0], bank.z.flat()[0])


@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_resumed_run_goes_on_with_the_learners_it_had_bit_for_bit(executor, tmp_path):
    options = {"model": image_model, "train_data": images(96), "executor": executor}
    straight = auto_trainer([2, 3], **options)
    straight.fit(max_rounds=9)
    first = auto_trainer([2, 3], output_dir=tmp_path, **options)
    first.fit(max_rounds=5)
    second = make_trainer(num_learners="auto", resume=tmp_path, **options)
    assert second.run.tuning.state.num_learners == 3
    change_run(second, tuning=Scripted([]))
    second.fit(max_rounds=4)
    for name, value in straight.run.bank.state_dict()["weights"].items():
        assert torch.equal(value, second.run.bank.state_dict()["weights"][name]), name


def test_decisions_are_lines_of_their_own_in_the_metrics(tmp_path):
    auto_trainer([2, 3], output_dir=tmp_path).fit(max_epochs=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "auto_tuner"]
    assert [(line["num_learners"], line["reason"]) for line in events] == [(2, "1 → 2"), (3, "2 → 3")]
    assert [line["epoch"] for line in lines if "event" not in line] == [1]


@pytest.mark.slow
def test_learner_that_memory_does_not_hold_is_not_added_and_nothing_is_lost(monkeypatch):
    trainer = auto_trainer([2, 3], train_data=blobs(120), test_data=blobs(30))
    allocate, bank = ReplicaBank._allocate, trainer.run.bank

    def limited(self, capacity):
        if capacity > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        allocate(self, capacity)

    monkeypatch.setattr(ReplicaBank, "_allocate", limited)
    seen = Seen()
    trainer.callbacks = [seen]
    result = trainer.fit(max_epochs=3)
    assert seen.counts == [2, 3, 2]
    assert bank.num_learners == 2
    assert result.test_accuracy >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_round_that_dies_for_want_of_memory_takes_learners_away_and_training_goes_on(executor):
    trainer = auto_trainer([2, 3], executor=executor, train_data=blobs(120), test_data=blobs(30))
    feed = trainer.run.train_feed
    batch, batches = feed.batch, feed.batches

    def limited(start):
        if trainer.run.bank.num_learners > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch(start)

    feed.batch = limited
    feed.batches = lambda starts: batches(starts) if len(starts) < 3 else limited(0)
    seen = Seen()
    trainer.callbacks = [seen]
    result = trainer.fit(max_epochs=3)
    assert seen.counts == [2, 3, 2]
    assert result.summary.num_learners == 2
    assert result.test_accuracy >= 0.9


def test_learner_that_is_non_finite_when_the_number_changes_is_reseeded_first():
    trainer = auto_trainer(
        [3, 3, 3, 1, 1, 3], model=image_model, train_data=images(96), on_nonfinite="reseed", executor="serial"
    )
    feed = trainer.run.train_feed
    batch, calls = feed.batch, iter(range(100))

    def non_finite_once(start):
        found = batch(start)
        # Rounds of 1, 3, 3 and 3 learners: the last one's batch in the round before they shrink.
        return found._replace(inputs=found.inputs * math.nan) if next(calls) == 9 else found

    feed.batch = non_finite_once
    trainer.fit(max_rounds=8)
    assert trainer.state.num_reseeded == 1
    bank = trainer.run.bank
    states = [bank.learner_state(learner) for learner in range(bank.num_learners)]
    assert all(bool(value.isfinite().all()) for each in states for value in each.values())


@pytest.mark.slow
def test_number_found_when_memory_runs_out_in_the_last_round_is_not_overruled_by_the_decision_before():
    trainer = auto_trainer([3], executor="serial", train_data=blobs(120))
    trainer.fit(max_rounds=2)  # three learners now
    trainer.run.tuning.counts = [4]
    reporter = Reporter([], ThroughputMeter())
    with TrainingLoop(trainer.run, StopConditions(max_rounds=99), reporter, lambda own: [own], set()) as loop:
        loop.reporter.start(run_info(trainer.run, None), 0.0)
        decision = trainer.run.tuning.after_round(12, 1.0)
        loop.learners.executor.drain = lambda: (_ for _ in ()).throw(_memory_error())
        loop._apply(decision)
        assert trainer.run.bank.num_learners == trainer.run.tuning.state.num_learners == 3


def _memory_error():
    error = LearnerError("learning", 0, "learner 0", MemoryError())
    error.__cause__ = MemoryError()
    return error


@pytest.mark.slow
def test_auto_finds_a_number_of_learners_by_itself():
    trainer = Trainer(model=image_model, train_data=images(96), device="cpu", executor="threads", max_learners=3)
    change_run(trainer, tuning=LearnerTuning(AutoTuner(max_learners=3), window_s=0.02))
    seen = Seen()
    trainer.callbacks = [seen]
    trainer.fit(max_time_s=2.0)
    assert seen.of("change")[0].num_learners == 2
    assert any(change.reason.startswith(("Settled on", "3 → ", "2 → ")) for change in seen.of("change"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": SGD(learning_rate=(0.1, 0.2))}, "num_learners is auto; give one value for all"),
        ({"max_learners": 0}, "max_learners must be at least 1, got 0"),
    ],
)
def test_settings_that_auto_cannot_serve_are_refused_in_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        make_trainer(**{"num_learners": "auto", **options})


def wide_model() -> nn.Module:
    """Return a model of 4 · 4,000 + 4,000 · 250 + 250 · 3 = 1,016,750 parameters."""
    return nn.Sequential(
        nn.Linear(4, 4000, bias=False), nn.ReLU(), nn.Linear(4000, 250, bias=False), nn.Linear(250, 3, bias=False)
    )


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(Remembered, "path", tmp_path / "activations.json")

    def make(free_bytes: float, **options: Any) -> Trainer:
        monkeypatch.setattr("crossbow_py.train.tuning.learner_tuning.free_bytes", lambda device: free_bytes)
        return make_trainer(**{"model": wide_model, "num_learners": "auto", **options})

    return make


def most_of(trainer: Trainer) -> int:
    assert trainer.run.tuning is not None
    return trainer.run.tuning.tuner.max_learners


def test_ample_memory_leaves_the_limit_as_it_was_set(bounded):
    assert most_of(bounded(2**34)) == 8
    assert most_of(bounded(2**34, max_learners=5)) == 5


def test_scarce_memory_lowers_it_and_says_so(bounded):
    # A learner has weights, gradients, corrections and momentum of 4.07 MB each, and makes a gradient beside them when
    # at work: 16.3 MB and 4.1. Three rows of z and the template are 16.3. With serial, K of them take 20 + 16.3 K.
    recorder = Recorder()
    trainer = bounded(80e6 / 0.9, callbacks=[recorder])
    assert most_of(trainer) == 3
    trainer.fit(max_epochs=1)
    assert "Memory holds about 3 of at most 8 learners; no more are tried." in recorder.of("message")


def test_one_learner_is_always_allowed_and_a_fixed_number_not_touched(bounded):
    assert most_of(bounded(1e6)) == 1
    assert bounded(1e6, num_learners=4).run.bank.num_learners == 4


class Opaque(nn.Module):
    """A model that looks at a value, which fake tensors lack."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if float(x.sum()) > 0 else 0.5
        return self.layer(x) * scale


def test_model_that_cannot_be_probed_is_not_bounded(bounded):
    recorder = Recorder()
    unbounded = bounded(1e3, model=Opaque, callbacks=[recorder])
    assert most_of(unbounded) == 8
    unbounded.fit(max_epochs=1)
    assert any("How many learners memory holds is not known" in message for message in recorder.of("message"))


def test_probe_that_fails_in_any_way_bounds_nothing_and_ends_no_run(bounded, monkeypatch):
    def fail(*_: Any) -> int:
        raise AttributeError("no such\nbook")

    monkeypatch.setattr("crossbow_py.engine.sizing.bound._probed", fail)
    recorder = Recorder()
    unbounded = bounded(1e3, callbacks=[recorder])
    assert most_of(unbounded) == 8
    unbounded.fit(max_epochs=1)
    assert "How many learners memory holds is not known: AttributeError: no such book" in recorder.of("message")
