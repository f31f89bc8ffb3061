"""Windows of throughput, and runs whose number of learners changes while they train."""

from __future__ import annotations

import json

import pytest
import torch

from crossbow_py import SGD, Independent, Listener, Trainer
from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerState, Decision
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.errors import LearnerError, UserError
from crossbow_py.tuning import LearnerTuning
from tests.trainers import blobs, image_model, images, make_trainer


class Scripted(LearnerTuning):
    """Takes counts from a list, one a round, whatever the throughput."""

    def __init__(self, counts):
        super().__init__(AutoTuner())
        self.counts = list(counts)

    def after_round(self, images, elapsed_s):
        if not self.counts:
            return None
        count = self.counts.pop(0)
        before, self.state = self.state.num_learners, AutoTunerState(num_learners=count)
        return Decision("grow" if count > before else "shrink", count, f"{before} → {count}")

    def out_of_memory(self):
        self.state = AutoTunerState(num_learners=self.state.num_learners - 1)
        return Decision("shrink", self.state.num_learners, "memory does not hold it")


class Seen(Listener):
    def __init__(self):
        self.changes, self.records = [], []

    def on_learner_count(self, change):
        self.changes.append(change)

    def on_epoch(self, record):
        self.records.append(record)


def auto_trainer(counts, **options):
    trainer = make_trainer(num_learners="auto", **options)
    trainer.run.tuning = Scripted(counts)
    return trainer


def test_window_ends_with_the_first_round_past_its_length_and_four_rounds_at_least():
    tuning = LearnerTuning(AutoTuner(warm_up_windows=0, windows=1), window_s=1.0)
    decisions = [tuning.after_round(16, seconds) for seconds in (10.0, 10.4, 10.8, 11.2, 11.6, 12.0)]
    # Begun at 10.0; four rounds of 16 images by 11.6: 64 / 1.6 = 40 images/s, and one more learner is worth a look.
    assert [decision is None for decision in decisions] == [True, True, True, True, False, True]
    assert (decisions[4].num_learners, tuning.state.measured) == (2, ((1, pytest.approx(40.0)),))


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_run_whose_learners_come_and_go_sees_every_sample_and_learns(executor):
    seen = Seen()
    counts = [2, 3, 1, 4, 2]
    trainer = auto_trainer(counts, executor=executor, train_data=blobs(120), test_data=blobs(30), callbacks=[seen])
    result = trainer.fit(max_epochs=4)
    assert [change.num_learners for change in seen.changes] == counts
    # Rounds of 1, 2, 3, 1, 4 learners with batches of 4, then 2: samples seen when each decision was taken.
    assert [change.samples_seen for change in seen.changes] == [4, 12, 24, 28, 44]
    assert seen.records[-1].num_learners == result.summary.num_learners == 2
    assert result.test_accuracy >= 0.9


def test_growth_from_one_learner_begins_at_its_weights_and_shrinking_to_one_ends_at_the_average():
    trainer = auto_trainer([2], train_data=blobs(120), optimizer=SGD(learning_rate=0.0))
    bank = trainer.run.parts.bank
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
    second.run.tuning = Scripted([])
    second.fit(max_rounds=4)
    for name, value in straight.run.parts.bank.state_dict()["weights"].items():
        assert torch.equal(value, second.run.parts.bank.state_dict()["weights"][name]), name


def test_decisions_are_lines_of_their_own_in_the_metrics(tmp_path):
    auto_trainer([2, 3], output_dir=tmp_path).fit(max_epochs=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "auto_tuner"]
    assert [(line["num_learners"], line["reason"]) for line in events] == [(2, "1 → 2"), (3, "2 → 3")]
    assert [line["epoch"] for line in lines if "event" not in line] == [1]


def test_learner_that_memory_does_not_hold_is_not_added_and_nothing_is_lost(monkeypatch):
    trainer = auto_trainer([2, 3], train_data=blobs(120), test_data=blobs(30))
    allocate, bank = ReplicaBank._allocate, trainer.run.parts.bank

    def limited(self, capacity):
        if capacity > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        allocate(self, capacity)

    monkeypatch.setattr(ReplicaBank, "_allocate", limited)
    seen = Seen()
    trainer.callbacks = [seen]
    result = trainer.fit(max_epochs=3)
    assert [change.num_learners for change in seen.changes] == [2, 3, 2]
    assert bank.num_learners == 2
    assert result.test_accuracy >= 0.9


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_round_that_dies_for_want_of_memory_takes_learners_away_and_training_goes_on(executor):
    trainer = auto_trainer([2, 3], executor=executor, train_data=blobs(120), test_data=blobs(30))
    feed = trainer.run.parts.train_feed
    batch, batches = feed.batch, feed.batches

    def limited(start):
        if trainer.run.parts.bank.num_learners > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch(start)

    feed.batch = limited
    feed.batches = lambda starts: batches(starts) if len(starts) < 3 else limited(0)
    seen = Seen()
    trainer.callbacks = [seen]
    result = trainer.fit(max_epochs=3)
    assert [change.num_learners for change in seen.changes] == [2, 3, 2]
    assert result.summary.num_learners == 2
    assert result.test_accuracy >= 0.9


def test_out_of_memory_with_a_number_of_learners_that_was_asked_for_is_the_end(monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(trainer.run.parts.train_feed, "batch", lambda start: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(LearnerError):
        trainer.fit(max_epochs=1)


def test_auto_finds_a_number_of_learners_by_itself():
    trainer = Trainer(model=image_model, train_data=images(96), device="cpu", executor="threads", max_learners=3)
    trainer.run.tuning = LearnerTuning(AutoTuner(max_learners=3), window_s=0.02)
    seen = Seen()
    trainer.callbacks = [seen]
    trainer.fit(max_time_s=2.0)
    assert seen.changes[0].num_learners == 2
    assert any(change.reason.startswith(("Settled on", "3 → ", "2 → ")) for change in seen.changes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"averaging": Independent()}, "set how many: num_learners=4"),
        ({"optimizer": SGD(learning_rate=(0.1, 0.2))}, "num_learners is auto; give one value for all"),
        ({"max_learners": 0}, "max_learners must be at least 1, got 0"),
        ({"num_learners": "foo"}, "num_learners must be a whole number or one of auto, got 'foo'"),
    ],
)
def test_settings_that_auto_cannot_serve_are_refused_in_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        make_trainer(**{"num_learners": "auto", **options})
