"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    parse_session_end_info_plugin_data,
    parse_session_start_info_plugin_data,
)
from tensorboard.summary.writer import event_file_writer

from crossbow_py.telemetry.class_counts import ClassCounts, markdown_table
from crossbow_py.telemetry.events import Predictions
from crossbow_py.telemetry.learners import LearnerFigures
from crossbow_py.telemetry.pictures.confusion_picture import confusion_picture
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.telemetry.tensorboard.listeners import NodeScalars, TensorBoardScalars
from tests.event_files import read_events
from tests.made_up_ranks import ManyGpus


@contextmanager
def writing(
    folder: Path, events: Any, resumed: int | None = None, info: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[TensorBoardScalars]:
    """Scalars of a run that has started; closed at the end."""
    scalars = TensorBoardScalars(folder, resumed, **options)
    scalars.on_start(events.run_info(**(info or {})))
    yield scalars
    scalars.close()


def _points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder).Scalars(tag)]


def test_scalars_of_an_epoch_are_tagged_and_placed_at_samples_seen(tmp_path: Path, events: Any) -> None:
    with writing(tmp_path, events, info={"num_devices": 2}) as scalars:
        scalars.on_epoch(events.epoch_record(1))
    expected = {
        "throughput/images_per_s": 250.0, "throughput/images_per_s_per_device": 125.0, "loss/train": 0.25,
        "loss/test": 0.5, "accuracy/train": 0.875, "accuracy/test": 0.75, "num_learners": 2.0,
        "averaging/spread": 0.125, "averaging/correction_norm": 2.0, "time/training_s": 4.0,
    }  # fmt: skip
    read = read_events(tmp_path)
    assert set(read.Tags()["scalars"]) == {*expected, "learning_rate"}
    for tag, value in expected.items():
        assert [(event.step, event.value) for event in read.Scalars(tag)] == [(1000, value)]


def test_scalars_without_a_central_model_show_each_learner(tmp_path: Path, events: Any) -> None:
    with writing(tmp_path, events) as scalars:
        own = {"learner_accuracy": (0.5, 0.75), "learner_loss": (2.0, 0.25)}
        scalars.on_epoch(events.epoch_record(1, spread=None, correction_norm=None, **own))
        learners = (LearnerFigures(test_loss=2.0), LearnerFigures(test_loss=0.25, is_best=True))
        scalars.on_end(events.summary(learners=learners))
    assert _points(tmp_path / "learner_1", "accuracy/test") == [(1000, 0.75)]
    assert _points(tmp_path / "learner_0", "loss/test") == [(1000, 2.0)]
    assert _points(tmp_path, "loss/test") == [(1000, 0.5)]  # of their mean
    assert "learners/text_summary" in read_events(tmp_path).Tags()["tensors"]
    assert "averaging/spread" not in read_events(tmp_path).Tags()["scalars"]


def test_scalars_of_a_run_with_validation_data_are_named_so_and_not_finite_ones_left_out(
    tmp_path: Path, events: Any
) -> None:
    with writing(tmp_path, events) as scalars:
        validation = {"validation_accuracy": 0.5, "validation_loss": math.nan}
        scalars.on_epoch(events.epoch_record(1, test_accuracy=None, test_loss=None, **validation))
    tags = read_events(tmp_path).Tags()["scalars"]
    assert "accuracy/validation" in tags
    assert "accuracy/test" not in tags
    assert "loss/validation" not in tags


def test_classes_have_a_picture_of_their_confusions_and_a_table(tmp_path: Path, events: Any) -> None:
    counts = ClassCounts(np.array([[3, 1, 0], [0, 2, 0]]), ("cat", "dog"))
    with writing(tmp_path, events) as scalars:
        scalars.on_class_counts(counts, "validation", 1500)
    read = read_events(tmp_path)
    (image,) = read.Images("confusion_matrix/validation")
    assert (image.step, image.height, image.width) == (1500, *confusion_picture(counts).shape[:2])
    (text,) = read.Tensors("classes/validation/text_summary")
    assert text.tensor_proto.string_val[0].decode() == markdown_table(counts.figures())


def test_progress_faster_than_the_interval_is_thinned_out(tmp_path: Path, events: Any) -> None:
    with writing(tmp_path, events, interval_s=1.0) as scalars:
        for tenth in range(21):
            scalars.on_progress(events.progress(tenth * 100, elapsed_s=tenth / 10))
    assert [step for step, _ in _points(tmp_path, "loss/train")] == [0, 1000, 2000]


def test_scalars_of_a_resumed_run_hide_what_came_after_the_checkpoint(
    tmp_path: Path, events: Any, monkeypatch: Any
) -> None:
    # Files are read in the order of their names: within a second a process's tenth would come before its ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with writing(tmp_path, events) as first:
        for epoch in (1, 2, 3):
            first.on_epoch(events.epoch_record(epoch))
    with writing(tmp_path, events, 2000, {"samples_seen": 2000}) as second:
        second.on_epoch(events.epoch_record(3, test_accuracy=0.5))
    assert _points(tmp_path, "accuracy/test") == [(1000, 0.75), (2000, 0.75), (3000, 0.5)]


def test_texts_and_layout_are_written_with_the_run(tmp_path: Path, events: Any) -> None:
    with writing(tmp_path, events, config_text="seed: 0\n") as scalars:
        scalars.on_end(events.summary())
    tags = read_events(tmp_path).Tags()["tensors"]
    assert "config/text_summary" in tags
    assert "result/text_summary" in tags
    assert "custom_scalars__config__" in tags


class Monitor(SystemMonitor):
    """A machine of 3 GiB in use."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    def sample(self) -> dict[str, float]:
        return {"system/process_memory_gib": 3.0}

    def close(self) -> None:
        self.closed += 1


def test_progress_brings_scalars_of_the_machine_into_the_same_event_file(tmp_path: Path, events: Any) -> None:
    monitor = Monitor()
    with writing(tmp_path, events, new_monitor=lambda: monitor) as scalars:
        for second in range(12):
            scalars.on_progress(events.progress(second * 100, elapsed_s=float(second)))
    assert _points(tmp_path, "system/process_memory_gib") == [(0, 3.0), (500, 3.0), (1000, 3.0)]
    assert len(list(tmp_path.iterdir())) == 1
    assert monitor.closed == 1


def test_notes_of_the_scalars_are_what_keeps_a_gpu_from_being_watched(tmp_path: Path, events: Any) -> None:
    nobodys = ("GPU-00000000-0000-0000-0000-000000000000",)
    scalars = TensorBoardScalars(tmp_path, None, new_monitor=partial(SystemMonitor, nobodys))
    assert scalars.take_notes() == []
    scalars.on_start(events.run_info())
    (note,) = scalars.take_notes()
    assert "telemetry" in note
    assert scalars.take_notes() == []
    scalars.close()


def test_hyper_parameters_of_a_run_are_there_from_its_start_and_how_it_ended_at_its_end(
    tmp_path: Path, events: Any
) -> None:
    with writing(tmp_path, events, info={"hyper_parameters": {"model": "mlp", "batch_size": 16}}) as scalars:
        assert {EXPERIMENT_TAG, SESSION_START_INFO_TAG} <= set(_hyper_parameters(tmp_path))
        scalars.on_end(events.summary(time_to_accuracy_s=12.5))
    contents = _hyper_parameters(tmp_path)
    values = parse_session_start_info_plugin_data(contents[SESSION_START_INFO_TAG]).hparams
    assert (values["model"].string_value, values["batch_size"].number_value) == ("mlp", 16)
    assert parse_session_end_info_plugin_data(contents[SESSION_END_INFO_TAG]).status == STATUS_SUCCESS
    assert _points(tmp_path, "time/to_accuracy_s") == [(4000, 12.5)]


def _hyper_parameters(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = read_events(folder).PluginTagToContent("hparams")
    return found


def test_predictions_are_a_picture_at_the_samples_seen(tmp_path: Path, events: Any) -> None:
    predictions = Predictions(np.zeros((2, 4, 4, 1), np.uint8), (0, 1), (0, 0), (0.5, 0.75))
    with writing(tmp_path, events) as scalars:
        scalars.on_predictions(predictions, 1000)
    assert [each.step for each in read_events(tmp_path).Images("predictions")] == [1000]


def test_close_twice_or_before_the_start_leaves_no_thread(tmp_path: Path, events: Any) -> None:
    before = threading.active_count()
    scalars = TensorBoardScalars(tmp_path, None)
    scalars.close()
    scalars.on_start(events.run_info())
    scalars.close()
    scalars.close()
    assert threading.active_count() == before


def test_full_disk_ends_the_writer_without_a_traceback_and_is_told(
    tmp_path: Path, events: Any, monkeypatch: Any
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    before = threading.excepthook
    scalars = TensorBoardScalars(tmp_path, None)
    scalars.on_start(events.run_info())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            scalars.on_end(events.summary())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert printed == []
    (other := threading.Thread(target=lambda: 1 / 0)).start()
    other.join()
    assert [args.exc_type for args in printed] == [ZeroDivisionError]
    scalars.close()
    assert threading.excepthook == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_writers_that_close_in_any_order_leave_the_processes_own_hook_of_threads(
    tmp_path: Path, events: Any, monkeypatch: Any, order: tuple[int, int]
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    before = threading.excepthook
    writers = [TensorBoardScalars(tmp_path / str(index), None) for index in range(2)]
    for writer in writers:
        writer.on_start(events.run_info())
    hook = threading.excepthook
    assert hook != before
    writers[order[0]].close()
    writers[order[0]].close()
    assert threading.excepthook == hook
    writers[order[1]].close()
    assert threading.excepthook == before

def test_node_writes_its_machine_and_what_keeps_a_gpu_from_being_watched_and_no_curves(
    tmp_path: Path, events: Any
) -> None:
    monitor = SystemMonitor(["GPU-0", "GPU-7"], nvml=ManyGpus(1))
    scalars = NodeScalars(tmp_path, None, lambda: monitor)
    scalars.on_start(events.run_info(num_devices=16))
    for second in range(12):
        scalars.on_progress(events.progress(second * 100, elapsed_s=float(second)))
    scalars.on_epoch(events.epoch_record(1))
    assert scalars.take_notes() == []  # nobody listens on that rank
    scalars.close()
    read = read_events(tmp_path)
    assert [event.step for event in read.Scalars("gpu/0/power_w")] == [0, 500, 1000]
    assert not [tag for tag in read.Tags()["scalars"] if not tag.startswith(("gpu/0/", "system/"))]
    (warning,) = read.Tensors("warning/text_summary")
    assert warning.tensor_proto.string_val[0].decode() == (
        "No telemetry of GPU 1, because NVML does not find GPU-7 (Not Found)."
    )
