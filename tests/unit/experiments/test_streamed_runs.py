"""Windows of runs on streamed photographs: figures by hand, windows that are dropped, and a short run for real."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import ModuleType

import pytest

from crossbow_py.core.errors import UserError
from experiments.bench import windows
from experiments.bench.streamed_runs import Setup, StreamedRun, photographs
from experiments.bench.windows import Mark, Window, Windows, by_turns, wait_until, waiting, window_of
from experiments.loader import run as loader
from experiments.preprocessing import run as preprocessing
from experiments.workers import run as workers


def window(rate: float, share: float = 0.5, foreign: float | None = 0.0) -> Window:
    return Window(rate, share, 0.1, 4, foreign)


def test_window_is_from_the_end_of_one_round_to_the_end_of_the_last() -> None:
    marks = [Mark(1.0, 0.9), Mark(2.0, 1.0), Mark(3.0, 1.25), Mark(4.0, 1.5)]
    assert window_of(marks, 1, 8) == Window(images_per_s=8.0, wait_share=0.25, round_s=1.0, rounds=2)


@pytest.mark.parametrize(("shares", "kept", "dropped"), [
    ([0.5, 0.1, 0.5, 0.5, 0.5, 0.15], [True, False, True], 4), ([None, 0.2, 0.0, 0.3, 0.0], [True] * 3, 2),
])  # fmt: skip
def test_window_in_which_others_were_busy_is_taken_again(
    shares: list[float | None], kept: list[bool], dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "RETRY_AFTER_S", 0.0)
    taken, side = iter(shares), Windows[Window]()
    for _ in kept:
        side.add(lambda: window(10.0, foreign=next(taken)))
    assert ([each is not None for each in side.taken], side.dropped) == (kept, dropped)
    assert side.load_known == (None not in shares)
    assert next(taken, "all") == "all"


def test_window_is_not_taken_again_when_the_time_is_over() -> None:
    side = Windows[Window]()
    side.add(lambda: window(10.0, foreign=0.5), wait_until(0.0))
    assert (side.taken, side.dropped) == ([None], 1)
    assert side.figures()["images_per_s"] is None


def test_sides_take_turns_in_a_new_order_every_time() -> None:
    turns = list(by_turns("abcd", 6))
    rounds = [turns[first : first + 4] for first in range(0, 24, 4)]
    assert all(sorted(turn) == ["a", "b", "c", "d"] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1


def test_ratio_is_of_repetitions_in_which_both_have_a_window() -> None:
    own = Windows([window(20.0), None, window(30.0), window(90.0)])
    base = Windows([window(10.0), window(10.0), window(10.0), None])
    assert own.ratio(base) == {"median": 2.5, "minimum": 2.0, "maximum": 3.0}
    assert own.ratio(Windows[Window]([None])) is None


def test_summary_has_medians_and_every_window() -> None:
    assert waiting(Windows([window(20.0, 0.25), None, window(40.0, 0.75)], dropped=3)) == {
        "images_per_s": 30.0,
        "wait_share": {"median": 0.5, "minimum": 0.25, "maximum": 0.75},
        "n": 2,
        "dropped": 3,
        "images_per_s_windows": [20.0, None, 40.0],
        "wait_share_windows": [0.25, None, 0.75],
    }


def test_models_on_one_feed_share_every_batch(photos: Path) -> None:
    images = photographs(str(photos))
    run = StreamedRun(Setup(width=2, batch_size=3, num_models=2, executor="fused"), images)
    taken = run.rounds_window(0, warm_up=1, rounds=3)
    feed = run._feed
    assert taken.rounds == 3
    assert 0 < taken.wait_share < 1  # loading happens in the loop
    assert taken.images_per_s == pytest.approx(6 / taken.round_s)
    assert feed.loading_times.num_batches == 4  # once for both models
    assert run.sample_bytes == 3 * 64 * 64
    assert (images.num_files, len(images.data)) == (9, 20_000)


def test_workers_load_while_models_train_and_end_with_the_window(photos: Path) -> None:
    run = StreamedRun(Setup(width=2, batch_size=3), photographs(str(photos)))
    assert run.rounds_window(1, warm_up=2, rounds=2).rounds == 2
    assert run.timed_window(1, warm_up_s=0.1, seconds=0.3).images_per_s > 0
    assert multiprocessing.active_children() == []


def test_window_too_short_for_a_round_is_refused(photos: Path) -> None:
    run = StreamedRun(Setup(width=2, batch_size=3), photographs(str(photos)))
    with pytest.raises(UserError, match="--seconds must be enough for a round, got 1e-09; lengthen it"):
        run.timed_window(0, warm_up_s=0.0, seconds=1e-9)


@pytest.mark.parametrize("experiment", [loader, preprocessing, workers])
def test_measurement_without_images_says_what_is_missing(
    experiment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        experiment.main(["--folder", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert "is not there" in capsys.readouterr().err
