"""Several evaluations in an epoch: where they are, what they count, and that they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import SGD, CheckpointSettings, Listener, Trainer, UserError
from crossbow_py.telemetry.events import EpochRecord
from crossbow_py.telemetry.records import METRICS_FILE, read_metrics

SAMPLES, BATCH = 40, 4


class Records(Listener):
    def __init__(self) -> None:
        self.found: list[EpochRecord] = []

    def on_epoch(self, record: EpochRecord) -> None:
        self.found.append(record)


def trainer(rate: float = 0.05, **options: Any) -> tuple[Trainer, list[EpochRecord]]:
    inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
    data, records = (inputs, (inputs[:, 0] > 0).long()), Records()
    here = {"executor": "serial", "device": "cpu", "precision": "fp32"}
    given = {"batch_size": BATCH, "num_learners": 2, **here, **options}
    made = Trainer(
        model=lambda: nn.Linear(5, 2), train_data=data, test_data=data, optimizer=SGD(learning_rate=rate),
        callbacks=[records], **given,
    )  # fmt: skip
    return made, records.found


def test_parts_of_an_epoch_are_evaluated_and_the_run_takes_the_same_course() -> None:
    (once, whole), (often, parts) = trainer(), trainer(evaluations_per_epoch=5)
    one, other = once.fit(max_epochs=2), often.fit(max_epochs=2)
    assert [record.samples_seen for record in parts] == [8, 16, 24, 32, 40, 48, 56, 64, 72, 80]
    assert [record.epoch for record in parts] == [0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8, 2]
    assert [(r.epoch, r.test_loss, r.test_accuracy) for r in parts[4::5]] == [
        (r.epoch, r.test_loss, r.test_accuracy) for r in whole
    ]
    for own, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(own, theirs)
    # Each has the mean of its own part; parts are equally long here.
    assert sum(record.train_loss for record in parts[:5]) / 5 == pytest.approx(whole[0].train_loss)


def test_more_parts_than_rounds_are_one_evaluation_a_round() -> None:
    made, records = trainer(evaluations_per_epoch=1000)
    made.fit(max_epochs=1)
    assert [record.samples_seen for record in records] == [8, 16, 24, 32, 40]


def test_a_target_and_patience_stop_within_an_epoch() -> None:
    made, records = trainer(evaluations_per_epoch=5)
    assert made.fit(max_epochs=3, target_loss=0.9 * first_loss()).status == "target_reached"
    assert records[-1].epoch < 3
    still, kept = trainer(evaluations_per_epoch=5, rate=0.0)
    result = still.fit(max_epochs=3, patience=2)
    assert (result.status, result.stop_reason) == ("finished", "patience")
    assert [record.samples_seen for record in kept] == [8, 16, 24]  # the first is the best


def first_loss() -> float:
    made, records = trainer(evaluations_per_epoch=5)
    made.fit(max_rounds=1)
    assert records[0].test_loss is not None
    return records[0].test_loss


@pytest.mark.slow
def test_a_run_that_stopped_between_goes_on_to_the_same_records(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(evaluations_per_epoch=5, output_dir=whole)[0].fit(max_epochs=2)
    trainer(evaluations_per_epoch=5, output_dir=parts)[0].fit(max_rounds=3)
    trainer(evaluations_per_epoch=5, output_dir=parts, resume=parts)[0].fit(max_epochs=2)

    def of(folder: Path) -> list[Any]:
        lines = read_metrics(folder / METRICS_FILE)
        return [(line["epoch"], line["train_loss"], line["test_loss"]) for line in lines]

    assert of(parts) == of(whole)


def test_what_was_trained_is_kept_when_a_metric_fails(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails_late(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.extend([len(targets)] * (len(targets) > 6))  # fewer are tried before training
        return output[0 if len(calls) <= 1 else len(output)].mean()

    never = CheckpointSettings(every_epochs=None)
    made, _ = trainer(metrics={"late": fails_late}, output_dir=tmp_path, checkpoint=never)
    with pytest.raises(UserError, match=r"metrics\['late'\] fails"):
        made.fit(max_epochs=3)
    again, records = trainer(output_dir=tmp_path, resume=tmp_path)
    again.fit(max_epochs=3)
    assert again.run.resumed_from is not None and records[0].samples_seen >= 2 * SAMPLES
