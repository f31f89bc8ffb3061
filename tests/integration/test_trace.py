"""`trace=true`: a whole run's trace.json, and what it shows of the order of tasks."""

from __future__ import annotations

import json
import math
import signal
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from crossbow_py import SMA, UserError
from crossbow_py.errors import NonFiniteError
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train import trainer as trainer_module
from crossbow_py.train.__main__ import main
from tests.trainers import Recorder, blobs, image_model, images, make_trainer

K = TypeVar("K")
NANOSECOND = 1e-3  # in the trace's microseconds


class Span(NamedTuple):
    name: str
    row: str
    round_index: int
    start: float
    end: float


def read_trace(folder: Path) -> list[Span]:
    """The spans of a run's trace.json, in the order they began."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        Span(event["name"], rows[event["tid"]], event["args"]["round"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X"
    ]


def overlap(one: Span, other: Span) -> bool:
    return min(one.end, other.end) > max(one.start, other.start)


def by(key: Callable[[Span], K], spans: list[Span]) -> dict[K, list[Span]]:
    found = defaultdict(list)
    for span in spans:
        found[key(span)].append(span)
    return found


def by_task(spans: list[Span]) -> dict[tuple[str, int], list[Span]]:
    """The spans of each (task, round)."""
    return by(lambda span: (span.name, span.round_index), spans)


def traced(folder: Path, **options: Any) -> list[Span]:
    """A run of 64 rounds on images, four learners: what its trace shows."""
    data = {"model": image_model, "train_data": images(64 * 16)}
    make_trainer(**{**data, "num_learners": 4, "output_dir": folder, "trace": True, **options}).fit(max_rounds=64)
    return read_trace(folder)


def test_threads_overlap_averaging_with_the_next_round_and_streams_run_one_task_at_a_time(tmp_path: Path) -> None:
    spans = traced(tmp_path, executor="threads")
    rows = by(lambda span: span.row, spans)
    assert set(rows) == {"learner 0", "learner 1", "learner 2", "learner 3", "averaging"}
    for own in rows.values():
        assert all(before.end <= after.start + NANOSECOND for before, after in pairwise(own))
    found = by_task(spans)
    assert {name: len([span for span in spans if span.name == name]) for name, _ in found} == {
        "learning": 4 * 64, "correction": 4 * 64, "averaging": 64,
    }  # fmt: skip
    assert any(
        overlap(found["averaging", n][0], learning) for n in range(63) for learning in found["learning", n + 1]
    ), "averaging never overlapped the next round's learning"
    for n in range(64):
        (averaging,) = found["averaging", n]
        assert all(correction.end <= averaging.start + NANOSECOND for correction in found["correction", n])
        assert all(averaging.end <= correction.start + NANOSECOND for correction in found["correction", n + 1])


@pytest.mark.slow
def test_moves_of_the_ema_are_spans_of_the_averaging_row_after_their_rounds(tmp_path: Path) -> None:
    # 64 samples a round, 1,024 an epoch: a twentieth of 4 epochs is 3.2 rounds.
    found = by_task(traced(tmp_path, executor="threads", batch_size=16, averaging=SMA(average_ema=4.0)))
    moves = sorted(round_index for name, round_index in found if name == "average EMA")
    assert moves[:5] == [3, 6, 9, 12, 15]
    for n in moves:
        (move,) = found["average EMA", n]
        assert move.row == "averaging"
        assert found["averaging", n][0].end <= move.start + NANOSECOND
        assert all(move.end <= learning.start + NANOSECOND for learning in found["learning", n + 1])


def test_trace_of_a_second_fit_has_both(tmp_path: Path) -> None:
    trainer = make_trainer(output_dir=tmp_path, trace=True)
    for _ in range(2):
        trainer.fit(max_rounds=3)
    assert {span.round_index for span in read_trace(tmp_path)} == set(range(6))


def test_run_without_trace_writes_none_and_a_trace_without_a_folder_is_refused(tmp_path: Path) -> None:
    recorder = Recorder()
    make_trainer(output_dir=tmp_path, callbacks=[recorder]).fit(max_rounds=2)
    assert not (tmp_path / "trace.json").exists()
    assert recorder.of("start")[0].trace_path is None
    with pytest.raises(UserError, match=r"trace writes into .* got no output_dir; set one, or trace=false"):
        make_trainer(trace=True)


def test_trace_of_a_run_that_fails_is_written(tmp_path: Path) -> None:
    inputs, targets = blobs(40)
    inputs[:] = math.nan
    with pytest.raises(NonFiniteError):
        make_trainer(train_data=(inputs, targets), output_dir=tmp_path, trace=True).fit(max_epochs=1)
    assert {span.name for span in read_trace(tmp_path)} == {"learning", "correction", "averaging"}


def test_trace_of_a_run_stopped_by_a_signal_is_written(tmp_path: Path) -> None:
    class Stop(Recorder):
        def on_epoch(self, record: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(output_dir=tmp_path, trace=True, callbacks=[Stop()])
    assert trainer.fit(max_epochs=3, handle_signals=True).status == "terminated"
    assert {span.round_index for span in read_trace(tmp_path)} == set(range(5))


def test_resume_may_switch_tracing_on_and_shows_only_its_own_rounds(tmp_path: Path) -> None:
    make_trainer(output_dir=tmp_path).fit(max_rounds=3)
    make_trainer(output_dir=tmp_path, resume=tmp_path, trace=True).fit(max_rounds=2)
    assert {span.round_index for span in read_trace(tmp_path)} == {3, 4}


def test_trace_of_more_tasks_than_it_holds_is_cut_off_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "Timeline", partial(Timeline, max_spans=7))
    recorder = Recorder()
    make_trainer(output_dir=tmp_path, trace=True, callbacks=[recorder]).fit(max_rounds=3)
    assert len(read_trace(tmp_path)) == 7
    assert recorder.of("message") == ["The timeline has the first 7 tasks of the run; the 8 after them were dropped."]


def test_command_with_trace_says_where_the_timeline_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["+experiment=digits", "device=cpu", "num_learners=2", "max_rounds=2", "output_dir=run", "trace=true"]
    assert main(arguments) == 0
    assert "  timeline       run/trace.json (open it in ui.perfetto.dev)\n" in capsys.readouterr().out
    assert read_trace(Path("run"))
    assert "trace: true" in Path("run/config.yaml").read_text()
    assert main([*arguments[:-1], "max_rounds=3", "resume=auto", "trace=false"]) == 0
