"""Runs on data that worker processes make: exact whoever makes it, and nothing lost when it cannot be made."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossbow_py import SMA, Augmentation, Independent, Listener, Trainer
from crossbow_py.core.errors import BadSampleError, DataError
from crossbow_py.schedules import Constant
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from crossbow_py.train.evaluation.current_models import final_states
from tests.thinned import thinned
from tests.trainers import Recorder, image_trainer, images, weights


class Pictures:
    """Images with an augmentation of their own, drawn from NumPy's global generator."""

    def __init__(self, num_samples: int, bad: int | None = None, seconds: float = 0.0) -> None:
        self.images, self.targets = images(num_samples)
        self.bad, self.seconds = bad, seconds

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.bad:
            raise OSError("image file is truncated")
        time.sleep(self.seconds)
        return self.images[index].roll(int(np.random.randint(4)), -1), int(self.targets[index])


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert not multiprocessing.active_children()
    assert "crossbow data" not in {thread.name for thread in threading.enumerate()}


def trainer_of(folder: Path | None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "train_data": Pictures(50),
        "test_data": Pictures(20),
        "augmentation": Augmentation(flip="alternating", random_erasing=0.5),
        "schedule": Constant(),
        "output_dir": folder,
    }
    return image_trainer(**{**defaults, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "averaging"),
    [("serial", SMA(batch_norm="mean")), ("threads", SMA(recalibration_batches=3))],
    ids=["serial", "threads"],
)
def test_run_resumed_in_mid_epoch_with_other_workers_equals_the_uninterrupted_one(tmp_path, executor, averaging):
    options: dict[str, Any] = {"executor": executor, "averaging": averaging}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer_of(whole, num_workers=0, **options).fit(max_epochs=2)
    trainer_of(parts, num_workers=1, **options).fit(max_samples=64)
    trainer_of(parts, num_workers=2, resume=parts, **options).fit(max_epochs=2)
    assert weights(parts) == weights(whole)


def test_statistics_are_measured_beside_what_is_made_for_training():
    trainer = trainer_of(None, num_workers=1)
    parts = trainer.run
    feed, starts = parts.train_feed, [0, 4]
    feed.announce(starts)
    feed.wait(starts)
    producer, there = feed._producer, feed._buffer.starts()
    state = final_states(parts)[0]
    assert (state["1.running_mean"] != parts.bank.central_state()["1.running_mean"]).any()
    assert feed._producer is producer and feed._buffer.starts() >= there
    parts.close_feeds()


@pytest.mark.slow
def test_learners_that_share_batches_see_what_serial_ones_see(tmp_path):
    runs = [
        trainer_of(None, averaging=Independent(), executor=executor, num_learners=3, num_workers=workers)
        for executor, workers in (("serial", 0), ("threads", 1))
    ]
    one, other = (run.fit(max_epochs=1) for run in runs)
    for model, same_model in zip(one.models, other.models, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(value, same_model.state_dict()[name])
    assert runs[1].run.train_feed.loading_times.num_batches <= 13 + 2 + 2  # each batch once, and some ahead


@pytest.mark.slow
def test_waiting_for_slow_data_is_counted_and_none_for_data_on_the_device(tmp_path):
    slow = trainer_of(tmp_path / "slow", train_data=Pictures(50, seconds=0.005), num_workers=0).fit(max_epochs=1)
    (line,) = read_metrics(tmp_path / "slow" / "metrics.jsonl")
    seconds = slow.summary.data_wait_share * slow.summary.train_time_s
    assert 48 * 0.005 <= seconds <= slow.summary.train_time_s and slow.summary.num_workers == 0
    of_the_epoch = line["samples_seen"] / line["images_per_s"]  # seconds of training, which may go on after its end
    assert line["data_wait_share"] * of_the_epoch == pytest.approx(seconds, rel=1e-3)
    trainer_of(tmp_path / "resident", train_data=images(50), test_data=images(20)).fit(max_epochs=1)
    assert read_summary(tmp_path / "resident")["data_wait_share"] is None


@pytest.mark.parametrize(("executor", "num_workers"), thinned([("serial", 0), ("threads", 1)], quick=[0], slow=[1]))
def test_bad_sample_stops_the_run_with_a_checkpoint_of_all_that_was_trained(tmp_path, executor, num_workers):
    options: dict[str, Any] = {"num_workers": num_workers, "executor": executor}
    recorder = Recorder()
    probe = trainer_of(None, **options)
    order = [key.sample for start in range(0, 48, 4) for key in probe.run.train_feed._keys(start)]
    broken = trainer_of(tmp_path, train_data=Pictures(50, bad=order[35]), callbacks=[recorder], **options)
    with pytest.raises(BadSampleError, match=f"item {order[35]} of the data set cannot be read"):
        broken.fit(max_epochs=1)
    assert [path.name for path in checkpoints(tmp_path)] and read_summary(tmp_path)["status"] == "failed"
    assert any("resume=auto goes on" in message for message in recorder.of("message"))
    mended = trainer_of(tmp_path, resume=tmp_path, **options)
    assert mended.state.samples_seen == 32
    mended.fit(max_epochs=1)
    whole = tmp_path / "whole"
    trainer_of(whole, **options).fit(max_epochs=1)
    assert weights(tmp_path) == weights(whole)


@pytest.mark.slow
def test_bad_test_sample_keeps_the_epoch_and_a_resume_evaluates_it(tmp_path):
    with pytest.raises(BadSampleError):
        trainer_of(tmp_path, test_data=Pictures(20, bad=11)).fit(max_epochs=1)
    assert checkpoints(tmp_path)
    result = trainer_of(tmp_path, resume=tmp_path).fit(max_epochs=1)
    assert result.test_accuracy is not None and result.summary.samples_seen == 56
    assert [line["epoch"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


class KillWorkers(Listener):
    """Ends the processes that load data, once, after some samples."""

    def __init__(self, also_this: bool = False) -> None:
        self.also_this, self.done = also_this, False

    def on_progress(self, progress: Any) -> None:
        if progress.samples_seen >= 16 and not self.done:
            self.done = True
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM if self.also_this else signal.SIGKILL)
            if self.also_this:
                signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_killed_worker_stops_the_run_with_its_sample_and_a_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, train_data=Pictures(200, seconds=0.01), num_workers=1, callbacks=[KillWorkers()])
    with pytest.raises(DataError, match="killed by signal SIGKILL.* of the data set") as caught:
        trainer.fit(max_epochs=5)
    assert caught.value.exit_code == 1
    assert checkpoints(tmp_path)
    resumed = trainer_of(tmp_path, train_data=Pictures(200), num_workers=1, resume=tmp_path).fit(max_samples=240)
    assert resumed.status == "finished"


@pytest.mark.slow
def test_signal_that_reaches_the_workers_too_is_an_orderly_stop(tmp_path):
    trainer = trainer_of(
        tmp_path, train_data=Pictures(200, seconds=0.01), num_workers=1, callbacks=[KillWorkers(also_this=True)]
    )
    result = trainer.fit(max_epochs=5, handle_signals=True)
    assert result.status == "terminated" and checkpoints(tmp_path)
