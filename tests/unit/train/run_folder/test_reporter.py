"""The reporter: what listeners hear and when, on a clock that the test advances."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from crossbow_py.core.host import versions
from crossbow_py.data.normalisation import Normalisation
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.telemetry.events import Listener, RunInfo
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.checkpoints.weights import SavedModels
from crossbow_py.train.evaluation.evaluator import Evaluation, Examples
from crossbow_py.train.run_folder.reporter import Reporter, example_predictions
from crossbow_py.train.train_state import TrainState
from tests.support import CPU
from tests.trainers import Recorder

INFO = RunInfo(
    experiment="test", model="linear", num_parameters=15, data="blobs", num_train_samples=40, num_test_samples=10,
    device="cpu", executor="serial", precision="fp32", averaging="sma", num_learners=2, num_devices=1, batch_size=4,
    seed=0,
)  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_reporter(num_listeners=1):
    clock, listeners = Clock(), [Recorder() for _ in range(num_listeners)]
    meter = ThroughputMeter(clock)
    reporter = Reporter(listeners, meter, clock)
    reporter.start(INFO)
    meter.start()
    return reporter, listeners, clock


def two_learners():
    """Return a bank with w = (3, 4) and (0, 0) around z = (3, 0)."""
    bank = ReplicaBank(
        nn.Linear(2, 1, bias=False), 2, device=CPU, precision=FP64, state_names=(), channels_last=False
    )
    for rows, row, values in [(bank.weights, 0, [3, 4]), (bank.weights, 1, [0, 0]), (bank.z, 0, [3, 0])]:
        rows.flat(row)[0].copy_(torch.tensor(values))
    bank.total.flat(0)[0].copy_(torch.tensor([0.6, -0.8]))
    return bank


def test_every_listener_is_told_everything_in_order():
    reporter, listeners, _ = make_reporter(num_listeners=2)
    reporter.message("a decision")
    reporter.checkpoint("folder", 8)
    reporter.epoch("record")
    for listener in listeners:
        assert listener.calls == [
            ("start", INFO), ("message", "a decision"), ("checkpoint", ("folder", 8)), ("epoch", "record"),
        ]  # fmt: skip


def test_notes_of_a_listener_reach_every_listener_as_messages_once():
    class Noting(Recorder):
        def take_notes(self):
            told = ("message", "a note") in self.calls
            return [] if told else ["a note"]

    noting, other = Noting(), Recorder()
    reporter = Reporter([noting, other], ThroughputMeter(Clock()), Clock())
    reporter.start(INFO)
    reporter.epoch("record")
    for listener in (noting, other):
        assert [name for name, _ in listener.calls] == ["start", "message", "epoch"]
        assert listener.of("message") == ["a note"]


def test_progress_comes_a_few_times_a_second_and_not_before_the_first_loss():
    reporter, (listener,), clock = make_reporter()
    state = TrainState(samples_seen=8)
    reporter.progress(state, 0.1, 100, 2)
    assert listener.of("progress") == []
    state.loss_sum, state.num_losses = 3.0, 2
    for _ in range(100):  # two seconds
        clock.now += 0.02
        reporter.meter.update(8)
        reporter.progress(state, 0.1, 100, 2)
    shown = listener.of("progress")
    assert 9 <= len(shown) <= 11
    first = shown[0]
    assert (first.samples_seen, first.epoch, first.train_loss, first.learning_rate) == (8, 0.2, 1.5, 0.1)
    assert shown[-1].images_per_s == pytest.approx(400.0)
    assert shown[-1].elapsed_s == pytest.approx(2.0, abs=0.2)


def test_summary_takes_training_time_from_the_meter_and_wall_time_from_the_clock():
    reporter, (listener,), clock = make_reporter()
    clock.now += 2.0
    reporter.meter.update(100)
    reporter.meter.pause()
    clock.now += 3.0
    state = TrainState(samples_seen=60, best_accuracy=0.9, time_to_accuracy_s=1.5, num_reseeded=1)
    final = (Evaluation(0.3, 0.8, 10, {"a": 1.0}), ())
    summary = reporter.summarize(state, "finished", "max_epochs", final, SavedModels("model", {}))
    assert listener.of("end") == [summary]
    assert (summary.train_time_s, summary.wall_time_s, summary.images_per_s) == (2.0, 5.0, 30.0)
    assert (summary.epochs, summary.samples_seen, summary.num_reseeded) == (1.5, 60, 1)
    assert (summary.test_accuracy, summary.test_loss, summary.best_test_accuracy) == (0.8, 0.3, 0.9)
    assert (summary.status, summary.stop_reason, summary.time_to_accuracy_s) == ("finished", "max_epochs", 1.5)
    assert (summary.model_path, summary.metrics, summary.versions) == ("model", {"a": 1.0}, versions())


def test_close_closes_every_listener_once():
    reporter, listeners, _ = make_reporter(num_listeners=2)
    reporter.close()
    reporter.close()
    assert [len(listener.of("close")) for listener in listeners] == [1, 1]


def test_squared_distances_are_over_the_squared_norm_of_the_center():
    bank = two_learners()
    assert bank.squared_distances() == pytest.approx([16 / 9, 9 / 9])  # distances 4 and 3, |z| = 3
    assert bank.squared_distances(excluded=[0]) == pytest.approx([1.0])
    bank.z.storage.zero_()
    assert bank.squared_distances() == []


def test_correction_norm_is_the_length_of_the_sum_and_one_learner_has_none():
    bank = two_learners()
    assert bank.correction_norm() == pytest.approx(1.0)
    bank.resize(1)
    assert bank.correction_norm() is None


def test_time_left_is_that_of_whatever_ends_the_run_first():
    reporter, (listener,), clock = make_reporter()
    state = TrainState(samples_seen=8, loss_sum=3.0, num_losses=2)
    for planned, limit_s in ((1_000_000, 10.0), (None, 10.0), (None, None)):
        clock.now += 0.5
        reporter.meter.update(8)
        reporter.progress(state, 0.1, planned, 2, limit_s)
    first, second, third = (shown.remaining_s for shown in listener.of("progress"))
    elapsed = [shown.elapsed_s for shown in listener.of("progress")]
    assert (first, second, third) == (10.0 - elapsed[0], 10.0 - elapsed[1], None)


class Blocking(Recorder):
    """A listener that takes three seconds for every progress event."""

    BLOCKS = True

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_progress(self, progress):
        self.clock.now += 3.0


def test_what_a_blocking_listener_takes_is_no_training():
    clock = Clock()
    meter = ThroughputMeter(clock)
    reporter = Reporter([Blocking(clock)], meter, clock)
    reporter.start(INFO)
    meter.start()
    state = TrainState(samples_seen=8, num_losses=1)
    for _ in range(2):
        clock.now += 1.0
        reporter.progress(state, 0.1, None, 2)
    assert meter.elapsed_s == 2.0


TARGETS, OUTPUTS = torch.tensor([1, 0]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])


def test_normalisation_is_undone_and_the_likeliest_class_named() -> None:
    normalisation = Normalisation((0.5, 0.25, 0.0), (0.5, 0.25, 2.0))
    pixels = torch.rand(2, 3, 4, 4)
    pixels[0, 0, 0, 0], pixels[0, 0, 0, 1] = 0.0, 1.0
    mean, std = normalisation.constants(pixels, torch.float32)
    found = example_predictions(Examples((pixels - mean) / std, TARGETS, OUTPUTS), normalisation, ["cat", "dog"])
    assert found is not None
    assert found.images.shape == (2, 4, 4, 3)
    torch.testing.assert_close(
        torch.from_numpy(found.images).float(), pixels.permute(0, 2, 3, 1) * 255, atol=0.51, rtol=0
    )
    assert (found.targets, found.predicted) == ((1, 0), (1, 0))
    assert found.probabilities == pytest.approx((0.8807971, 0.5))
    assert found.class_names == ("cat", "dog")


def test_dark_images_are_stretched_to_what_a_screen_has() -> None:
    found = example_predictions(Examples(torch.tensor([0.0, 0.02, 0.01, 0.0]).view(2, 1, 1, 2), TARGETS, OUTPUTS), None)
    assert found is not None
    assert found.images.flatten().tolist() == [0, 255, 128, 0]


def test_clips_show_their_middle_frame() -> None:
    clips = torch.zeros(2, 3, 5, 4, 4)
    clips[:, :, 2] = 1.0
    found = example_predictions(Examples(clips, TARGETS, OUTPUTS), None)
    assert found is not None
    assert found.images.shape == (2, 4, 4, 3)
    assert found.images.min() == 255


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(torch.zeros(2, 7, 4, 4), OUTPUTS), (torch.zeros(2, 1, 4, 4), torch.full((2, 2), torch.nan))],
    ids=["seven channels", "not finite"],
)
def test_what_no_screen_can_show_is_not_shown(inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    assert example_predictions(Examples(inputs, TARGETS, outputs), None) is None
    assert example_predictions(None, None) is None


def test_listeners_may_be_frozen_and_have_notes_of_their_own():
    @dataclass(frozen=True)
    class Frozen(Listener):
        name: str = "frozen"

    class OwnNotes(Listener):
        def __init__(self):
            self._notes = []

        def on_message(self, message):
            self._notes.append(message)

    own = OwnNotes()
    reporter = Reporter([Frozen(), own], ThroughputMeter(Clock()), Clock())
    reporter.start(INFO)
    reporter.message("one")
    reporter.message("two")
    assert own._notes == ["one", "two"]
