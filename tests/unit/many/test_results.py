"""What results of many members show, made up by hand: the table, curves, TensorBoard and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.many.curves import draw_curves
from crossbow_py.many.report import write_records
from crossbow_py.many.results import MemberResult, Results, curve
from tests.event_files import read_events


def many_results(num: int) -> Results:
    """Member n reaches an accuracy of n / 1000; the last one failed."""
    history = [{"epoch": 1.0, "samples": 60, "train_loss": 1.0}]
    members = [MemberResult(f"m{n}", n, "finished", test_accuracy=n / 1000, test_loss=1.0, state={"w": torch.ones(1)},
                            history=[{**history[0], "validation_loss": float(n)}]) for n in range(num - 1)]  # fmt: skip
    return Results([*members, MemberResult("bad", num, "failed")], 60, 1.0, 1.0)


def test_table_of_many_members_has_the_best_the_worst_and_how_many_ended_how() -> None:
    lines = [line.split() for line in many_results(101).table().splitlines()]
    assert " ".join(lines[0]) == "101 members: 100 finished, 1 failed; the best first"
    assert [line[0] for line in lines[2:]] == [*(f"m{n}" for n in range(99, 89, -1)), "...", "m2", "m1", "m0", "mean"]
    assert lines[12] == ["...", "87", "members", "between"]
    assert len(many_results(40).table().splitlines()) == 42


def test_best_is_by_validation_then_test_then_training_and_never_one_that_failed() -> None:
    by: list[dict[str, Any]] = [{"validation_loss": 1.0, "test_loss": 2.0}, {"validation_loss": 2.0, "test_loss": 1.0}]
    for names, best in ((("validation_loss", "test_loss"), "0"), (("test_loss",), "1"), ((), "1")):
        members = [
            MemberResult(
                str(n), n, "finished", state={"w": torch.ones(1)}, history=[{"epoch": 1, "train_loss": -n}],
                **{name: own[name] for name in names},
            ) for n, own in enumerate(by)
        ]  # fmt: skip
        found = Results([MemberResult("bad", 9, "failed"), *members], 60, 1.0, 1.0).best_first()
        assert [len(found), found[0].name] == [2, best]


def test_members_without_validation_come_after_those_with_some_the_best_first() -> None:
    """Catches members left in their order because others were measured where they were not."""
    own: dict[str, dict[str, Any]] = {
        "worse": {"history": [{"train_loss": 3.0}]}, "better": {"history": [{"train_loss": 2.0}]},
        "tested": {"test_loss": 9.0, "history": [{"train_loss": 9.0}]}, "validated": {"validation_loss": 99.0},
    }  # fmt: skip
    members = [MemberResult(name, 0, "finished", state={"w": torch.ones(1)}, **given) for name, given in own.items()]
    ranked = Results(members, 60, 1.0, 1.0).best_first()
    assert [each.name for each in ranked] == ["validated", "tested", "better", "worse"]


def test_curve_is_by_evaluation_where_epochs_of_folds_end_a_batch_apart() -> None:
    members = [MemberResult(str(n), n, "finished", history=[{"epoch": e + 0.02 * n, "loss": e + n} for e in (1, 2)])
               for n in range(3)]  # fmt: skip
    found = curve(members, "loss")
    assert (found.epochs, found.middle) == ([1.02, 2.02], [2.0, 3.0])
    assert [*found.low, *found.high] == pytest.approx([1.2, 2.2, 2.8, 3.8])


def test_many_members_are_a_band_and_the_best_by_name_in_tensorboard_and_picture(tmp_path: Path) -> None:
    (tmp_path / "out_of_fold.npy").touch()  # of a study with folds, which this one has not
    old = tmp_path / "tensorboard" / "an earlier member" / "events.out.tfevents.0"
    old.parent.mkdir(parents=True)
    old.touch()
    found = many_results(14)
    assert write_records(found, tmp_path, ["tensorboard"]) == ["results.json", "curves.png", "tensorboard"]
    assert not (tmp_path / "out_of_fold.npy").exists()
    assert {path.parent.name for path in tmp_path.glob("tensorboard/*/*")} == {"all", "best, m12"}
    band = {tag: read_events(tmp_path / "tensorboard/all").Scalars(tag)[0].value
            for tag in ("many/validation_loss_by_evaluation", "many_band/validation_loss_10_percent")}  # fmt: skip
    assert list(band.values()) == pytest.approx([6.0, 1.2])
    (axes,) = draw_curves(found).axes
    assert axes.get_title().startswith("test accuracy") and axes.get_xlabel().endswith("best: m12")
