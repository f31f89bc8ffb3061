"""Where trials stand, on disk: what is read is what was written, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.packs.trial import Checkpoint
from crossbow_py.search.hyperband import Segment
from crossbow_py.search.study.states import TrialStates, Underway


def checkpoint(value: float) -> Checkpoint:
    row = {"weights": {"w": torch.full((1, 2), value)}, "integer_buffers": [{"n": torch.tensor(3)}], "step_counts": [7]}
    return Checkpoint(samples_seen=80, num_rounds=20, row=row)


def weight(states: TrialStates, segment: Segment) -> list[float] | None:
    loaded = states.load(segment)
    return None if loaded is None else loaded.row["weights"]["w"].flatten().tolist()


def test_state_saved_is_loaded_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    states = TrialStates(tmp_path / "trials")
    states.save(Segment(4, 1), checkpoint(0.5))
    loaded = TrialStates(tmp_path / "trials").load(Segment(4, 1))
    assert loaded is not None and (loaded.samples_seen, loaded.num_rounds) == (80, 20)
    assert torch.equal(loaded.row["weights"]["w"], torch.tensor([[0.5, 0.5]]))
    assert loaded.row["integer_buffers"][0]["n"] == 3 and loaded.row["step_counts"] == [7]
    assert [path.name for path in tmp_path.glob("trials/*/*")] == ["rung_1.pt"]
    assert states.load(Segment(4, 0)) is None is states.load(Segment(5, 1))


def test_state_at_a_rung_is_on_the_disk_with_its_name_before_the_results_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync, rung = os.fsync, tmp_path / "trials" / "00004" / "rung_1.pt"

    def spied(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, rung.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spied)
    states = TrialStates(tmp_path / "trials")
    states.save(Segment(4, 1), checkpoint(0.5))
    made, (written, had_its_name), named = synced
    assert made == ("trials", False) and named == ("00004", True)
    assert written.endswith(".partial") and not had_its_name
    synced.clear()
    states.save_underway(Segment(4, 2), Underway(checkpoint(0.5), loss_sum=3.5, num_losses=20, seconds=1.25))
    assert not synced  # what is lost of it is trained again


def test_state_that_is_torn_or_of_another_format_is_not_there(tmp_path: Path) -> None:
    states, path = TrialStates(tmp_path), tmp_path / "00000" / "rung_0.pt"
    states.save(Segment(0, 0), checkpoint(0.5))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert states.load(Segment(0, 0)) is None
    torch.save({"format_version": 2, **vars(checkpoint(0.5))}, path)
    assert states.load(Segment(0, 0)) is None


def test_states_forgotten_are_those_of_the_trial_before_the_rung(tmp_path: Path) -> None:
    states = TrialStates(tmp_path)
    for segment in (Segment(0, 0), Segment(0, 1), Segment(0, 2), Segment(1, 0)):
        states.save(segment, checkpoint(0.5))
    states.forget(0, before_rung=2)
    assert [weight(states, Segment(0, rung)) for rung in range(3)] == [None, None, [0.5, 0.5]]
    states.forget(0)
    states.forget(0)
    assert not (tmp_path / "00000").exists() and weight(states, Segment(1, 0)) == [0.5, 0.5]


def test_state_within_a_segment_is_kept_until_the_segment_is_over(tmp_path: Path) -> None:
    states, segment = TrialStates(tmp_path), Segment(4, 1)
    assert states.load_underway(segment) is None and not states.is_underway(segment)
    states.save_underway(segment, Underway(checkpoint(0.5), loss_sum=3.5, num_losses=20, seconds=1.25))
    found = states.load_underway(segment)
    assert found is not None and (found.loss_sum, found.num_losses, found.seconds) == (3.5, 20, 1.25)
    assert found.checkpoint.num_rounds == 20
    assert torch.equal(found.checkpoint.row["weights"]["w"], torch.tensor([[0.5, 0.5]]))
    assert states.is_underway(segment) and not states.has(segment) and states.load(segment) is None
    states.save(segment, checkpoint(0.75))
    states.forget(4, before_rung=1)
    assert [path.name for path in tmp_path.glob("*/*")] == ["rung_1.pt"] and states.has(segment)


def test_state_that_the_disk_refuses_leaves_the_old_one_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = TrialStates(tmp_path)
    states.save(Segment(0, 0), checkpoint(0.25))

    def full(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(UserError, match=r"cannot write .*rung_0.pt \(no space left\); make room there"):
            states.save(Segment(0, 0), checkpoint(0.5))
    assert weight(states, Segment(0, 0)) == [0.25, 0.25]
    assert [path.name for path in tmp_path.glob("*/*")] == ["rung_0.pt"]
