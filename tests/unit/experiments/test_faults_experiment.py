"""Kills: phases told by made-up folders, streams put together by hand, tables and picture; the commands, briefly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.train.checkpoints.writer import save
from experiments.faults import campaign, recording
from experiments.faults.campaign import figures, hidden, phase
from experiments.faults.recording import Recording, counted_stream, lost_and_repeated, read_recordings, starts_of

PARTIAL = "checkpoints/.samples-000000000300.token-1.partial"


def make(run: Path, *names: str) -> None:
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix or "rank" in path.name else path.mkdir()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((f"{PARTIAL}/rank-0.partial",), campaign.WRITING),
        ((f"{PARTIAL}/rank-0.pt", f"{PARTIAL}/rank-1.partial"), campaign.WRITING),
        ((f"{PARTIAL}/rank-0.pt", f"{PARTIAL}/rank-1.pt", f"{PARTIAL}/rank-1.sha256"), campaign.PARTS),
        ((f"{PARTIAL}/rank-0.pt", f"{PARTIAL}/rank-1.pt", f"{PARTIAL}/manifest.json"), campaign.MANIFEST_THERE),
        (("checkpoints/samples-1/rank-0.pt", "checkpoints/samples-2/rank-0.pt"), campaign.BETWEEN),
        (tuple(f"checkpoints/samples-{number}/rank-0.pt" for number in (1, 2, 3)), campaign.RENAMED),
        (("checkpoints/.samples-1.token-1.dropped/rank-0.pt",), campaign.DROPPING),
        ((), campaign.BETWEEN),
    ],
)
def test_phase_is_told_by_what_lies_in_the_folder(tmp_path, names, found):
    make(tmp_path, *names)
    assert phase(tmp_path, leftovers=frozenset(), num_ranks=2, keep=2) == found


def test_what_an_earlier_kill_has_left_is_no_phase_of_this_one(tmp_path):
    make(tmp_path, f"{PARTIAL}/rank-0.partial")
    before = hidden(tmp_path)
    assert [name for name, _ in before] == [Path(PARTIAL).name]
    assert phase(tmp_path, before, num_ranks=1, keep=2) == campaign.BETWEEN
    make(tmp_path, "checkpoints/.samples-000000000400.token-1.partial/rank-0.pt")
    assert phase(tmp_path, before, num_ranks=1, keep=2) == campaign.PARTS


def test_newest_whole_checkpoint_is_found_and_what_is_wrong_with_others(tmp_path):
    assert campaign.look_at(tmp_path) == (None, [])
    for samples_seen in (100, 200):
        save(tmp_path, {"tensor": torch.ones(3)}, samples_seen, keep=2)
    assert campaign.look_at(tmp_path) == (200, [])
    part = tmp_path / "checkpoints" / "samples-000000000200" / "rank-0.pt"
    part.write_bytes(part.read_bytes()[:-1])
    newest, (problem,) = campaign.look_at(tmp_path)
    assert newest == 100
    assert "corrupted" in problem


def test_starts_say_what_they_went_on_from():
    log = (
        "digits: mlp\nwriting to /a/run\nThere is no checkpoint\nepoch 1/2\n"
        "digits: mlp\nwriting to /a/run\nresuming from /a/run/checkpoints/samples-000000000320 at 320 samples\n"
    )
    assert campaign.resumed_from(log) == [None, 320]


def of(rank: int, pid: int, *batches: tuple[int, ...], begin_s: float = 0.0) -> Recording:
    return Recording(rank, pid, tuple(begin_s + place for place in range(len(batches))), batches)


def killed_run() -> list[Recording]:
    """Epochs of 8 samples, 2 ranks of one learner, batches of 2: killed in the third round, back at the first's end."""
    return [
        of(0, 1, (0, 1), (4, 5), (6, 7)), of(1, 2, (2, 3), (6, 7)),
        of(0, 3, (4, 5), (7, 6), (3, 2), begin_s=9.0), of(1, 4, (6, 7), (5, 4), (1, 0), begin_s=9.5),
    ]  # fmt: skip


def test_stream_is_what_counts_of_every_start_in_the_order_of_learners():
    starts = starts_of(killed_run(), num_ranks=2)
    assert [{rank: each.pid for rank, each in start.items()} for start in starts] == [{0: 1, 1: 2}, {0: 3, 1: 4}]
    stream = counted_stream(starts, begins=[0, 4], end=16, num_ranks=2, num_learners=1)
    assert stream == [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    assert lost_and_repeated(stream, num_samples=8) == (0, 0)


def test_stream_of_a_start_that_goes_on_too_early_or_too_late_loses_and_repeats():
    starts = starts_of(killed_run(), num_ranks=2)
    early = counted_stream(starts, begins=[0, 8], end=16, num_ranks=2, num_learners=1)
    assert early == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 7, 6, 5, 4]
    assert lost_and_repeated(early, num_samples=8) == (4, 4)
    with pytest.raises(AssertionError, match="untrained"):
        counted_stream(starts, begins=[0, 12], end=16, num_ranks=2, num_learners=1)


def test_network_writes_down_what_it_is_trained_on_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    network, ((rows, labels), _) = recording.RecordingMLP(str(tmp_path)), recording.numbered_digits()
    assert (rows.shape, len(labels)) == ((recording.NUM_SAMPLES, 65), recording.NUM_SAMPLES)
    assert rows[:, 1:].max() == 1.0
    network(rows[[5, 7, 1500]])
    network(rows[:2])  # as the trainer looks at the outputs
    network.eval()
    network(rows[:3])
    (found,) = read_recordings(tmp_path, batch_size=3)
    assert (found.rank, found.batches) == (1, ((5, 7, 1500),))


def test_recording_torn_by_a_kill_is_read_up_to_its_last_whole_line(tmp_path):
    (tmp_path / "rank-0.77.jsonl").write_text("[1.5, 1, 2]\n[2.5, 3, 4]\n[3.")
    assert read_recordings(tmp_path, batch_size=2) == [Recording(0, 77, (1.5, 2.5), ((1, 2), (3, 4)))]


def kill(**changed: Any) -> dict[str, Any]:
    usual = {"aimed": True, "ranks": [0], "phase": campaign.WRITING, "after_s": 0.2, "whole": 320, "problems": [],
             "others": [], "resumed": 320}  # fmt: skip
    return {**usual, **changed}


def kills() -> dict[str, Any]:
    run = {"executor": "serial", "exit_codes": [0], "model_is_equal": True, "lines_are_equal": True}
    return {
        "kind": "kill9", "epochs": 10.0, "seed": 0, "minutes": 3.0,
        "runs": [
            {**run, "num_ranks": 1, "kills": [
                kill(), kill(phase=campaign.BETWEEN, after_s=0.4), kill(whole=None, resumed=None), kill(resumed=160),
            ]},
            {**run, "num_ranks": 1, "kills": [kill(problems=["bad"])], "exit_codes": [1], "model_is_equal": False},
            {**run, "num_ranks": 2, "kills": [kill(others=[1]), kill(ranks=[0, 1])], "exit_codes": [0, 0]},
        ],
    }  # fmt: skip


def test_figures_count_what_went_wrong_too():
    assert figures(kills()["runs"]) == {
        "runs": 3, "kills": 6, "in_write": 5, "resumed": 5, "before_first": 1, "afresh": 1, "corrupt": 1, "ended": 2,
        "equal_models": 2, "equal_lines": 3,
    }  # fmt: skip
