"""Stopped anywhere and taken up again, a run ends in the very bits of one that was never stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from crossbow_py import SGD, SMA, AdamW, Augmentation, CheckpointSettings, Independent, Result, Trainer
from crossbow_py.averaging import PAPA, DiLoCo, Elastic, GroupedSMA, LocalSGD, SlowMo, SynchronousSGD
from crossbow_py.core.errors import CheckpointError
from crossbow_py.engine.modules import precision
from crossbow_py.schedules import MultiStep
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from tests.thinned import thinned
from tests.trainers import Recorder, image_model, image_trainer, images, measured, weights

EXECUTORS = ["serial", "threads"]


def trainer_of(folder: Path, **options: Any) -> Trainer:
    """With AdamW, which has two moments."""
    schedule = MultiStep(milestones=(1.0, 2.0), gamma=0.5)
    defaults = {"optimizer": AdamW(learning_rate=0.01), "schedule": schedule, "output_dir": folder}
    return image_trainer(**{**defaults, **options})


def assert_resumed_as_whole(tmp_path: Path, stop: dict[str, int], max_epochs: int, **options: Any) -> Result:
    """In the folders `parts`, which was stopped there and resumed, and `whole`. Returns the result of `parts`."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer_of(whole, **options).fit(max_epochs=max_epochs)
    trainer_of(parts, **options).fit(**stop)
    result = trainer_of(parts, **options, resume=parts).fit(max_epochs=max_epochs)
    assert {path.name: path.read_bytes() for path in parts.glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in whole.glob("*.safetensors")
    }
    return result


def terminate_at(trainer: Trainer, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to this process while the batch at that position of the stream is made."""
    original = trainer.run.train_feed.batch

    def batch(start: int) -> Any:
        if start == position:
            signal.raise_signal(signal.SIGTERM)
        return original(start)

    monkeypatch.setattr(trainer.run.train_feed, "batch", batch)


@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"executor": "serial"},
            {"executor": "threads"},
            {"executor": "threads", "precision": "bf16"},
            {"executor": "threads", "augmentation": Augmentation(2, flip="alternating", random_erasing=0.5)},
            {"executor": "threads", "num_learners": 3, "averaging": SMA(averaging_period=3)},
            {"executor": "threads", "averaging": SMA(batch_norm="mean")},
            {"executor": "serial", "num_learners": 1, "optimizer": SGD(momentum=0.9, weight_decay=1e-3)},
            {"averaging": Elastic(averaging_period=2)},
            {"averaging": LocalSGD(averaging_period=2, quadratic_period=0.02)},
            {"executor": "threads", "averaging": DiLoCo(averaging_period=2)},
            {"averaging": SlowMo(averaging_period=2, learner_momentum="average")},
            {"averaging": PAPA(averaging_period=2, pull=0.2), "executor": "fused"},
            {"averaging": SynchronousSGD(), "executor": "fused"},
            {"averaging": GroupedSMA(group_size=2), "num_learners": 4, "executor": "threads"},
            {"averaging": SMA(average_ema=4.0), "executor": "threads"},
            {"averaging": SMA(average_ema=1.0), "num_learners": 1},
            {"averaging": SynchronousSGD(average_ema=4.0)},
        ],
        quick=[1, 3, 4, 8, 11, 12, 15],
        slow=[2, 5, 6, 7, 9, 10, 13, 14],
    ),
    ids=[
        "serial",
        "threads",
        "bf16",
        "erasing",
        "three learners",
        "means",
        "one learner",
        "elastic",
        "local_sgd",
        "diloco",
        "slowmo",
        "papa",
        "synchronous_sgd",
        "grouped_sma",
        "ema",
        "ema of one learner",
        "ema of synchronous_sgd",
    ],
)
def test_run_stopped_in_mid_epoch_and_resumed_equals_the_uninterrupted_one_in_every_bit(tmp_path, options):
    result = assert_resumed_as_whole(tmp_path, {"max_samples": 70}, 3, **options)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lines = measured(parts)
    assert len({line[1] for line in lines}) == len(lines)
    assert [line for line in lines if line[0] in (1, 2, 3)] == measured(whole)
    assert result.summary.resumed_from is not None
    assert read_summary(parts)["best_test_accuracy"] >= read_summary(whole)["best_test_accuracy"]


def test_resume_of_a_run_that_has_reached_its_stop_says_so(tmp_path):
    first = trainer_of(tmp_path).fit(max_epochs=1)
    recorder = Recorder()
    again = trainer_of(tmp_path, resume=tmp_path, callbacks=[recorder]).fit(max_epochs=1)
    assert recorder.of("message") == ["Nothing is left to train: the run had reached max_epochs; allow more of it."]
    assert again.summary.samples_seen == first.summary.samples_seen


def test_keyboard_interrupt_in_a_round_is_summed_up_as_interrupted(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)

    def interrupt(plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.run.train_feed, "batches", interrupt)
    monkeypatch.setattr(trainer.run.train_feed, "batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(max_epochs=1, handle_signals=True)
    summary = read_summary(tmp_path)
    assert (summary["status"], summary["stop_reason"]) == ("interrupted", "Ctrl-C, aborted")
    assert not checkpoints(tmp_path)


def test_run_stopped_right_before_a_restart_restarts_when_resumed(tmp_path):
    recorder = Recorder()  # the rate drops at 50, which the round that starts at 56 is the first to see
    assert_resumed_as_whole(tmp_path, {"max_samples": 56}, 2, callbacks=[recorder])
    dropped = "The learning rate dropped: learners restart from the average model."
    assert recorder.of("message").count(dropped) == 2  # in the whole run, and in the resumed part


@pytest.mark.parametrize("executor", EXECUTORS)
def test_run_stopped_by_sigterm_in_mid_epoch_and_resumed_equals_the_uninterrupted_one(tmp_path, monkeypatch, executor):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"executor": executor, "averaging": SMA(batch_norm="mean")}  # evaluations take no training batches
    trainer_of(whole, **options).fit(max_epochs=3)
    stopped = trainer_of(parts, **options)
    terminate_at(stopped, 68, monkeypatch)
    result = stopped.fit(max_epochs=3, handle_signals=True)
    assert (result.status, result.stop_reason) == ("terminated", "SIGTERM")
    assert (result.test_accuracy, read_summary(parts)["status"]) == (None, "terminated")
    assert 68 < result.summary.samples_seen < 100
    trainer_of(parts, **options, resume=parts).fit(max_epochs=3)
    assert weights(parts) == weights(whole)
    assert measured(parts) == measured(whole)
    assert read_summary(parts)["best_test_accuracy"] == read_summary(whole)["best_test_accuracy"]


def test_independent_learners_resumed_equal_the_uninterrupted_ones(tmp_path):
    options = {"averaging": Independent(), "optimizer": SGD(learning_rate=(0.01, 0.1))}
    assert_resumed_as_whole(tmp_path, {"max_rounds": 17}, 2, **options)
    assert len(list((tmp_path / "parts").glob("model_*.safetensors"))) == 2


def test_corrupted_checkpoint_is_passed_over_with_a_message_and_the_bits_stay_the_same(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    keep_one = {"checkpoint": CheckpointSettings(every_epochs=1, keep=2)}
    trainer_of(whole).fit(max_epochs=3)
    trainer_of(parts, **keep_one).fit(max_epochs=2)
    newest, older = checkpoints(parts)
    content = bytearray((newest / "rank-0.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "rank-0.pt").write_bytes(content)
    recorder = Recorder()
    resumed = trainer_of(parts, resume=parts, callbacks=[recorder], **keep_one)
    assert resumed.run.resumed_from == str(older)
    resumed.fit(max_epochs=3)
    (message,) = (text for text in recorder.of("message") if "corrupted" in text)
    assert newest.name in message
    assert "falling back to the one before" in message
    assert weights(parts) == weights(whole)
    assert measured(parts) == measured(whole)


def test_resume_into_another_folder_leaves_the_first_one_as_it_was(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    trainer_of(first).fit(max_epochs=1)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    (checkpoint,) = checkpoints(first)
    trainer_of(second, resume=checkpoint).fit(max_epochs=2)
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert [line[0] for line in measured(second)] == [2]


def other_model() -> nn.Module:
    model = image_model()
    model[7] = nn.Linear(32, 4)
    return model


def without_batch_norm_weights() -> nn.Module:
    model = image_model()
    model[1] = nn.GroupNorm(1, 8)
    return model


@pytest.mark.parametrize(
    ("changed", "named"),
    thinned(
        [
            ({"batch_size": 5}, "batch_size: 4 → 5"),
            ({"num_learners": 3}, "num_learners: 2 → 3"),
            ({"seed": 1}, "seed: 0 → 1"),
            ({"channels_last": False}, "channels_last: true → false"),
            ({"precision": "bf16"}, "precision: fp32 → bf16"),
            ({"optimizer": AdamW(learning_rate=0.02)}, "optimizer.learning_rate: 0.01 → 0.02"),
            ({"optimizer": SGD()}, "optimizer.name: adamw → sgd"),
            ({"schedule": MultiStep(milestones=(1.0, 2.0), gamma=0.1)}, "schedule.gamma: 0.5 → 0.1"),
            ({"averaging": SMA(correction_rate=0.5)}, "averaging.correction_rate: 1.0 → 0.5"),
            ({"averaging": Independent()}, "averaging.name: sma → independent"),
            ({"augmentation": Augmentation(crop_padding=1, flip=True)}, "data.augmentation.crop_padding: 2 → 1"),
            ({"augmentation": Augmentation(2, "alternating")}, "data.augmentation.flip: true → alternating"),
            ({"augmentation": Augmentation(2, True, 0.1)}, "data.augmentation.random_erasing: 0.0 → 0.1"),
            ({"augmentation": Augmentation(2, True, cutmix=1.0)}, "data.augmentation.cutmix: 0.0 → 1.0"),
            ({"mean": (0.5,), "std": (0.2,)}, r"data.mean: \[\] → \[0.5\]"),
            ({"train_data": images(60)}, "num_train_samples: 50 → 60"),
            ({"model": other_model}, r"model.7.weight: \[3,32\] → \[4,32\]"),
            ({"model": without_batch_norm_weights}, r"model.1.running_mean: \[8\] → null"),
        ],
        quick=range(0, 18, 3),
        slow=range(18),
    ),
)
def test_resume_with_other_settings_or_another_model_is_refused_naming_them(tmp_path, changed, named):
    trainer_of(tmp_path).fit(max_rounds=1)
    with pytest.raises(CheckpointError, match=rf"is of another run \(.*{named}.*resuming may change only stops"):
        trainer_of(tmp_path, **changed, resume=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0, 49, None])
def test_resume_says_that_the_training_data_are_others(tmp_path, changed):
    inputs, targets = images(50)
    trainer_of(tmp_path, train_data=(inputs, targets)).fit(max_rounds=1)
    if changed is not None:
        targets = targets.clone()
        targets[changed] = (targets[changed] + 1) % 3
    recorder = Recorder()
    trainer_of(tmp_path, train_data=(inputs, targets), resume=tmp_path, callbacks=[recorder]).fit(max_rounds=2)
    assert any("training data are not those" in text for text in recorder.of("message")) == (changed is not None)


def test_choices_of_auto_are_kept_on_resume_whatever_this_machine_would_choose(tmp_path, monkeypatch):
    trainer_of(tmp_path, executor="serial", precision="fp32").fit(max_rounds=1)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: True)
    resumed = trainer_of(tmp_path, executor="auto", precision="auto", resume=tmp_path)
    assert (resumed.run.choices.executor, resumed.run.choices.precision.name) == ("serial", "fp32")
    fresh = trainer_of(tmp_path, executor="auto", precision="auto")
    assert (fresh.run.choices.executor, fresh.run.choices.precision.name) == ("threads", "bf16")


def test_resume_after_a_fall_back_goes_on_from_the_newest_of_its_own_checkpoints(tmp_path):
    keep = {"checkpoint": CheckpointSettings(every_epochs=1, keep=1)}
    trainer_of(tmp_path).fit(max_epochs=3)
    older = checkpoints(tmp_path)[-1]
    trainer_of(tmp_path, resume=older, **keep).fit(max_rounds=1)
    assert trainer_of(tmp_path, resume=tmp_path).state.samples_seen == int(older.name.split("-")[1]) + 8
