"""The timeline of a run: when epochs close, what stops it, what is reported, and non-finite learners."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from crossbow_py import SGD, SMA, CheckpointSettings, Independent
from crossbow_py.core.errors import LearnerError, UserError
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.data.sampler import epoch_order
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.distributed.watch import Watch
from crossbow_py.errors import NonFiniteError
from crossbow_py.schedules import MultiStep
from crossbow_py.telemetry.records import read_summary
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train import trainer as trainer_module
from crossbow_py.train.checkpoints import manager
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from crossbow_py.train.checkpoints.writer import CheckpointWriter
from tests.trainers import Recorder, blobs, equal_states, make_trainer

EXECUTORS = ["serial", "threads"]
SLOW = SGD(learning_rate=0.01)  # several epochs to a target


def run(stops, **options):
    """Return (result, recorder, trainer)."""
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder], **options)
    return trainer.fit(**stops), recorder, trainer


def spy(monkeypatch, owner, name):
    """Record the first argument of calls, and pass them on."""
    original, seen = getattr(owner, name), []

    def call(first, *rest):
        seen.append(first)
        return original(first, *rest)

    monkeypatch.setattr(owner, name, call)
    return seen


def with_a_nan_at(position):
    """Return blobs with a NaN sample at a position of the first epoch's stream (seed 0)."""
    inputs, targets = blobs(40)
    inputs[epoch_order(0, 0, 40)[position]] = math.nan
    return inputs, targets


# Epochs


def test_epoch_closes_with_the_first_round_at_or_past_its_last_sample_and_batches_cross(monkeypatch):
    recorder = Recorder()
    trainer = make_trainer(train_data=blobs(42), callbacks=[recorder])
    starts = spy(monkeypatch, trainer.run.train_feed, "batch")
    result = trainer.fit(max_epochs=3)
    # Rounds of 8: 42 samples are seen with the 6th, 84 with the 11th, 126 with the 16th.
    assert [record.samples_seen for record in recorder.of("epoch")] == [48, 88, 128]
    assert [record.epoch for record in recorder.of("epoch")] == [1, 2, 3]
    assert starts == list(range(0, 128, 4))
    assert result.summary.samples_seen == 128
    assert result.summary.epochs == pytest.approx(128 / 42)


def test_round_larger_than_an_epoch_closes_several_at_once():
    _, recorder, _ = run({"max_epochs": 5}, train_data=blobs(5), num_learners=3)
    assert [(record.epoch, record.samples_seen) for record in recorder.of("epoch")] == [(2, 12), (4, 24), (7, 36)]


def test_independent_learners_see_every_sample_each():
    result, recorder, _ = run({"max_epochs": 2}, averaging=Independent(), num_learners=3)
    assert [record.samples_seen for record in recorder.of("epoch")] == [40, 80]
    assert result.summary.samples_seen == 80


def test_epoch_record_has_the_means_of_the_epochs_rounds_alone():
    # A rate of zero: every epoch's training loss is the mean over all samples.
    _, recorder, trainer = run({"max_epochs": 2}, optimizer=SGD(learning_rate=0.0), test_data=blobs(40))
    whole = trainer.evaluate()
    for record in recorder.of("epoch"):
        assert record.train_loss == pytest.approx(whole.loss, rel=1e-5)
        assert record.train_accuracy == pytest.approx(whole.accuracy)
        assert (record.test_loss, record.test_accuracy) == (pytest.approx(whole.loss), pytest.approx(whole.accuracy))
        assert (record.spread, record.correction_norm, record.num_learners) == (0.0, 0.0, 2)


# Ends


@pytest.mark.parametrize(
    ("stops", "samples_seen", "reason"),
    [
        ({"max_samples": 25}, 32, "max_samples"),
        ({"max_epochs": 0.5}, 24, "max_epochs"),
        ({"max_rounds": 3, "max_epochs": 9}, 24, "max_rounds"),
        ({"max_rounds": 30, "max_epochs": 1}, 40, "max_epochs"),
    ],
)
def test_limit_ends_the_run_with_the_round_that_reaches_it(stops, samples_seen, reason):
    result, recorder, _ = run(stops, test_data=blobs(30))
    assert (result.summary.samples_seen, result.stop_reason, result.status) == (samples_seen, reason, "finished")
    assert recorder.of("epoch")[-1].samples_seen == samples_seen
    assert recorder.of("epoch")[-1].test_accuracy == result.test_accuracy


@pytest.mark.parametrize(("most", "said"), [(1, True), (2, False), (None, False)])
def test_evaluations_of_a_part_are_announced(most, said):
    _, recorder, _ = run({"max_rounds": 1}, test_data=blobs(300), max_evaluation_batches=most)
    of_a_part = "Evaluations are on the first 256 of 300 test samples (max_evaluation_batches=1)."
    assert (of_a_part in recorder.of("message")) == said


def test_max_time_s_counts_training_and_leaves_evaluation_out(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(trainer_module, "ThroughputMeter", lambda **_: ThroughputMeter(lambda: clock["now"]))
    trainer = make_trainer(test_data=blobs(30))
    learn, evaluate = trainer.run.train_feed.batch, trainer.run.evaluator.evaluate

    def slow_batch(start):
        clock["now"] += 0.5
        return learn(start)

    def slow_evaluate(*arguments, **named):
        clock["now"] += 1000.0
        return evaluate(*arguments, **named)

    monkeypatch.setattr(trainer.run.train_feed, "batch", slow_batch)
    monkeypatch.setattr(trainer.run.evaluator, "evaluate", slow_evaluate)
    result = trainer.fit(max_time_s=7.0)
    # Two batches a round, so a second a round.
    assert (result.stop_reason, result.summary.train_time_s) == ("max_time_s", 7.0)
    assert result.summary.samples_seen == 7 * 8
    assert result.images_per_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("target", "reaches"),
    [
        ({"target_accuracy": 0.9}, lambda record: record.test_accuracy >= 0.9),
        ({"target_loss": 0.1}, lambda record: record.test_loss <= 0.1),
    ],
)
def test_target_stops_at_the_evaluation_that_reaches_it_and_its_time_is_noted(target, reaches):
    result, recorder, _ = run({**target, "max_epochs": 50}, test_data=blobs(30), optimizer=SLOW)
    records = recorder.of("epoch")
    assert (result.status, result.stop_reason) == ("target_reached", *target)
    assert len(records) > 1 and [reaches(record) for record in records] == [False] * (len(records) - 1) + [True]
    time_s = records[-1].elapsed_s if "target_accuracy" in target else None
    assert result.summary.time_to_accuracy_s == time_s


def test_validation_data_feeds_targets_and_best_and_test_is_measured_once_at_the_end(monkeypatch):
    inputs, targets = blobs(30)
    recorder = Recorder()
    trainer = make_trainer(
        validation_data=blobs(30), test_data=(inputs, (targets + 1) % 3), callbacks=[recorder]
    )  # the test targets are wrong on purpose: accuracy there falls while it rises on the validation data
    measured = []
    original = trainer.run.evaluator.evaluate

    def recorded(state, feed, *_, **__):
        measured.append(feed)
        return original(state, feed)

    monkeypatch.setattr(trainer.run.evaluator, "evaluate", recorded)
    result = trainer.fit(target_accuracy=0.9, max_epochs=50)
    records = recorder.of("epoch")
    assert result.stop_reason == "target_accuracy"
    assert measured == [trainer.run.validation_feed] * len(records) + [trainer.run.test_feed]
    assert [(record.test_loss, record.test_accuracy) for record in records] == [(None, None)] * len(records)
    assert result.summary.best_validation_accuracy == max(record.validation_accuracy for record in records) >= 0.9
    assert result.test_accuracy <= 0.1


# Listeners and files


def test_listeners_hear_of_the_run_in_order(tmp_path):
    _, recorder, _ = run({"max_epochs": 2}, test_data=blobs(30), output_dir=tmp_path)
    heard = [name for name, _ in recorder.calls if name not in ("progress", "checkpoint")]
    assert heard == ["start", "epoch", "epoch", "end", "close"]
    assert [name for name, _ in recorder.calls][-3:] == ["checkpoint", "end", "close"]
    (info,) = recorder.of("start")
    assert (info.num_learners, info.batch_size, info.planned_samples, info.model) == (2, 4, 80, "linear_model")
    assert (info.num_parameters, info.num_train_samples, info.num_test_samples) == (15, 40, 30)
    assert (info.executor, info.precision, info.averaging, info.output_dir) == ("serial", "fp32", "sma", str(tmp_path))
    assert recorder.of("progress")
    newest, older = map(str, checkpoints(tmp_path))
    assert recorder.of("checkpoint") == [(older, 40), (newest, 80)]


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        (CheckpointSettings(every_epochs=2), [80, 120]),
        (CheckpointSettings(every_epochs=None), [120]),
    ],
)
def test_checkpoints_are_written_when_due_and_always_at_the_end(tmp_path, settings, written):
    _, recorder, _ = run({"max_epochs": 3}, output_dir=tmp_path, checkpoint=settings)
    assert [samples for _, samples in recorder.of("checkpoint")] == written
    assert len(checkpoints(tmp_path)) == min(2, len(written))


class HeldWriter(CheckpointWriter):
    """A writer that completes a part only after a number of rounds have seen it being written."""

    ROUNDS = 0
    rounds_left = 0

    def begin(self, state, samples_seen):
        super().begin(state, samples_seen)
        self.rounds_left = self.ROUNDS

    @property
    def status(self):
        if self.rounds_left:
            self.rounds_left -= 1
            return "writing"
        super().wait()
        return super().status

    def wait(self):
        self.rounds_left = 0
        super().wait()


@pytest.mark.parametrize(
    ("rounds", "written"),
    [
        (0, [8, 24, 40, 56, 72, 88, 104, 120]),  # a round finds it written, the next may begin another
        (3, [8, 48, 88, 120]),  # begun at 8, being written at 16, 24 and 32, written at 40
        (99, [8, 120]),
    ],
)
def test_checkpoint_that_is_due_while_one_is_being_written_waits_for_a_later_round(
    tmp_path, monkeypatch, rounds, written
):
    monkeypatch.setattr(HeldWriter, "ROUNDS", rounds)
    monkeypatch.setattr(manager, "CheckpointWriter", HeldWriter)
    settings = CheckpointSettings(every_epochs=None, every_s=1e-9, keep=9)
    _, recorder, _ = run({"max_epochs": 3}, output_dir=tmp_path, checkpoint=settings)
    assert [samples for _, samples in recorder.of("checkpoint")] == written
    assert [str(path) for path in checkpoints(tmp_path)] == [path for path, _ in reversed(recorder.of("checkpoint"))]


def test_checkpoint_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    result, recorder, _ = run({"max_epochs": 2}, output_dir=tmp_path)
    assert result.status == "finished"
    first, last = recorder.of("message")
    assert first.startswith("No checkpoint was written (")
    assert last == "Incomplete, as not all could be written: the last checkpoint."


@pytest.mark.parametrize("executor", EXECUTORS)
def test_failing_task_closes_listeners_and_threads_and_names_the_task(executor):
    calls = []

    def fail_later(output, target):
        calls.append(1)
        if len(calls) > 8:
            raise ValueError("boom")
        return nn.functional.cross_entropy(output, target)

    recorder = Recorder()
    trainer = make_trainer(loss=fail_later, executor=executor, callbacks=[recorder])
    with pytest.raises(LearnerError, match=r"learning\(\d\) failed in round \d on learner \d: ValueError: boom"):
        trainer.fit(max_epochs=5)
    assert [name for name, _ in recorder.calls][-1] == "close"
    assert (recorder.of("end")[0].status, recorder.of("end")[0].stop_reason) == ("failed", "LearnerError")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crossbow")]


@pytest.mark.parametrize("is_ending", [False, True])
def test_error_after_a_hang_was_found_leaves_the_summary_to_the_watch(is_ending, tmp_path):
    class Ending(Watch):
        is_ending = False

    def fail(round_end):
        ranks.watch.is_ending = is_ending
        raise ValueError("lost")

    ranks, recorder = Ranks(), Recorder()
    ranks.watch = Ending()
    trainer = make_trainer(callbacks=[recorder], ranks=ranks, output_dir=tmp_path)
    with pytest.raises(ValueError, match="lost"):
        trainer.fit(max_epochs=1, after_round=fail)
    assert len(recorder.of("end")) == (not is_ending)
    assert (ranks.watch.record is not None) is is_ending
    if is_ending:
        ranks.watch.record([HangingRank(1, "there", 7, "round 3", "12:00", 1.5)], "rank 1 hangs.")
        summary = read_summary(tmp_path)
        assert (summary["status"], summary["stop_reason"]) == ("failed", "rank_hangs")
        assert [each["rank"] for each in summary["hanging_ranks"]] == [1]
        assert not (tmp_path / "console.log").exists()  # there is none from Python


def test_run_that_ends_well_while_a_rank_is_taken_to_hang_keeps_its_summary_from_the_watch(tmp_path):
    class Asking(Watch):
        is_ending = True

    ranks = Ranks()
    ranks.watch = Asking()
    make_trainer(ranks=ranks, output_dir=tmp_path).fit(max_epochs=1)
    assert ranks.watch.record is None and ranks.watch.folder is None
    assert read_summary(tmp_path)["status"] == "finished"


# Restarts


def restarts(monkeypatch, **options):
    """Fit through a drop at epoch 1. Returns what was true right after each restart."""
    recorder = Recorder()
    trainer = make_trainer(schedule=MultiStep(milestones=(1.0,), gamma=0.1), callbacks=[recorder], **options)
    bank, original, seen = trainer.run.bank, trainer.run.bank.restart, []

    def restart(*given):
        z = bank.z.storage.clone()
        original(*given)
        at_z = all(torch.equal(w, z) for w in bank.weights.stacked(2)["weight"] for z in [bank.z.shaped()["weight"]])
        zero = not bank.state["momentum"].storage.any()
        seen.append((trainer.state.samples_seen, at_z and torch.equal(bank.z_prev.storage, z), zero))

    monkeypatch.setattr(bank, "restart", restart)
    trainer.fit(max_epochs=2)
    return seen, recorder.of("message")


@pytest.mark.parametrize(("momentum", "zero"), [("reset", True), ("keep", False), ("average", False)])
def test_drop_of_the_rate_restarts_learners_from_z_once_and_says_so(monkeypatch, momentum, zero):
    seen, messages = restarts(monkeypatch, averaging=SMA(restart_momentum=momentum))
    assert seen == [(40, True, zero)]
    assert messages == ["The learning rate dropped: learners restart from the average model."]


@pytest.mark.parametrize(
    "options", [{"averaging": SMA(restart_on_drop=False)}, {"averaging": Independent()}, {"num_learners": 1}]
)
def test_drop_of_the_rate_without_restarts_or_company_changes_and_says_nothing(monkeypatch, options):
    seen, messages = restarts(monkeypatch, **options)
    assert seen == [] and not any("rate" in message for message in messages)


def test_learning_rate_of_a_record_is_that_of_its_last_round():
    _, recorder, _ = run({"max_epochs": 2}, schedule=MultiStep(milestones=(1.0,), gamma=0.1))
    assert [record.learning_rate for record in recorder.of("epoch")] == pytest.approx(
        [0.1 * math.sqrt(2), 0.01 * math.sqrt(2)]
    )


# Learners that are not finite


@pytest.mark.parametrize("executor", EXECUTORS)
def test_non_finite_learner_stops_the_run_with_learner_round_and_last_checkpoint(tmp_path, executor):
    trainer = make_trainer(
        train_data=with_a_nan_at(22), executor=executor, output_dir=tmp_path,
        checkpoint=CheckpointSettings(every_s=1e-9), callbacks=[recorder := Recorder()],
    )  # fmt: skip
    # Position 22 is in batch 5 of the stream: round 2, learner 1.
    with pytest.raises(NonFiniteError, match="learner 1 went non-finite in round 2; ") as caught:
        trainer.fit(max_epochs=2)
    last = recorder.of("checkpoint")[-1]  # round 1's too, unless that of round 0 was still being written
    assert caught.value.last_checkpoint == last[0]
    assert last[1] in (8, 16)
    assert last[0] in str(caught.value)
    assert (recorder.of("end")[0].status, recorder.of("end")[0].stop_reason) == ("failed", "non_finite")
    assert recorder.calls[-1][0] == "close"
    assert read_summary(tmp_path)["status"] == "failed"


def test_non_finite_learner_without_a_checkpoint_says_that_there_is_none():
    with pytest.raises(NonFiniteError, match="there is no checkpoint yet"):
        make_trainer(train_data=with_a_nan_at(22)).fit(max_epochs=1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_reseed_clones_the_non_finite_learner_from_z_and_leaves_the_others_bit_untouched(monkeypatch, executor):
    recorder = Recorder()
    trainer = make_trainer(
        train_data=with_a_nan_at(22), num_learners=3, executor=executor, on_nonfinite="reseed",
        callbacks=[recorder],
    )  # fmt: skip
    bank, original, checked = trainer.run.bank, trainer.run.bank.reseed, []

    def reseed(non_finite, buffers):
        (learner,) = non_finite
        healthy = [0, 1]
        everything = (bank.weights, *bank.state.values())
        before = [[view.clone() for rows in everything for view in rows.flat(other)] for other in healthy]
        original(non_finite, buffers)
        after = [[view for rows in everything for view in rows.flat(other)] for other in healthy]
        same = all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
        at_z = all(torch.equal(a, b) for a, b in zip(bank.weights.flat(learner), bank.z.flat(), strict=True))
        checked.append((learner, healthy, same, at_z, bool(bank.state["momentum"].flat(learner)[0].any())))

    monkeypatch.setattr(bank, "reseed", reseed)
    result = trainer.fit(max_rounds=3)
    # Position 22 is in batch 5 of the stream: round 1, learner 2.
    assert checked == [(2, [0, 1], True, True, False)]
    assert result.summary.num_reseeded == 1
    assert recorder.of("message") == [
        "The inputs of sample 7 hold NaN or an infinity; fill them, or leave such samples out.",
        "Learner 2 went non-finite in round 1 and was reseeded from the average model.",
    ]
    assert all(value.isfinite().all() for value in result.model.state_dict().values())


def test_reseed_with_every_learner_non_finite_stops():
    with pytest.raises(NonFiniteError, match="learner 0 went non-finite in round 0"):
        make_trainer(train_data=with_a_nan_at(slice(None)), on_nonfinite="reseed").fit(max_epochs=1)


def test_reseed_of_a_learner_that_stays_healthy_changes_nothing():
    stop, reseed = (make_trainer(on_nonfinite=policy).fit(max_epochs=1) for policy in ("stop", "reseed"))
    assert equal_states(stop.model, reseed.model)


def test_reseed_acts_at_the_same_round_wherever_checkpoints_lie_and_whatever_the_executor(tmp_path):
    options = {"train_data": with_a_nan_at(22), "num_learners": 3, "on_nonfinite": "reseed"}
    serial, threads = (make_trainer(executor=name, **options).fit(max_epochs=2) for name in EXECUTORS)
    assert serial.summary.num_reseeded == threads.summary.num_reseeded == 2
    for ours, reference in zip(threads.model.parameters(), serial.model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    often = make_trainer(output_dir=tmp_path, checkpoint=CheckpointSettings(every_s=1e-9), **options)
    assert equal_states(often.fit(max_epochs=2).model, serial.model)


def test_target_already_reached_is_not_trained_past():
    trainer = make_trainer(test_data=blobs(30))
    trainer.fit(target_accuracy=0.5, max_epochs=9)
    seen = trainer.state.samples_seen
    again = trainer.fit(target_accuracy=0.5, max_epochs=9)
    assert (again.status, trainer.state.samples_seen) == ("target_reached", seen)


def test_listener_whose_file_fails_is_dropped_with_a_message_and_training_goes_on():
    class Full(Recorder):
        def on_epoch(self, record):
            raise OSError(28, "No space left on device")

    full, other = Full(), Recorder()
    assert make_trainer(callbacks=[full, other]).fit(max_epochs=2).status == "finished"
    assert other.of("message") == [
        "Full stops recording ([Errno 28] No space left on device); training goes on.",
        "Incomplete, as not all could be written: the records of Full.",
    ]
    assert (len(other.of("epoch")), full.calls[-1][0]) == (2, "close")


# What is called after every round


def test_after_round_is_called_every_round_and_none_changes_nothing():
    ends = []
    result = make_trainer().fit(max_rounds=5, after_round=ends.append)
    assert [(end.images, end.num_learners, end.is_settled) for end in ends] == [(8, 2, True)] * 5
    assert [end.elapsed_s for end in ends] == sorted(end.elapsed_s for end in ends)
    assert equal_states(result.model, make_trainer().fit(max_rounds=5).model)


def test_after_round_sets_the_number_of_learners_of_auto_and_the_auto_tuner_does_not():
    trainer, told, wanted = make_trainer(num_learners="auto"), [], iter([None, 3, *[1] * 30])

    def after_round(end):
        told.append((end.num_learners, end.images, end.is_settled))
        return next(wanted)

    trainer.fit(max_rounds=30, after_round=after_round)
    assert told == [(1, 4, False), (1, 4, False), (3, 12, False), *[(1, 4, False)] * 27]
    assert (trainer.run.bank.num_learners, trainer.run.tuning.state.num_learners) == (1, 1)


@pytest.mark.parametrize("num_learners", [2, "auto"])
@pytest.mark.parametrize("wanted", [0, -1, 16_385, True, 2.0, "2"])
def test_after_round_that_returns_no_number_of_learners_is_refused(num_learners, wanted):
    said = f"after_round must return None or a whole number of learners from 1 to 16384, got {wanted!r}; return None"
    with pytest.raises(UserError, match=said):
        make_trainer(num_learners=num_learners).fit(max_rounds=2, after_round=lambda end: wanted)


def test_after_round_may_return_what_is_an_index():
    class Index:
        def __index__(self):
            return 3

    trainer = make_trainer(num_learners="auto")
    trainer.fit(max_rounds=3, after_round=lambda end: Index())
    assert trainer.run.bank.num_learners == 3


def test_after_round_may_return_a_fixed_number_but_not_another():
    assert make_trainer().fit(max_rounds=2, after_round=lambda end: 2).status == "finished"
    with pytest.raises(UserError, match="only with num_learners=auto, got 3 with num_learners=2; set num_learners=au"):
        make_trainer().fit(max_rounds=2, after_round=lambda end: 3)
