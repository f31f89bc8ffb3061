"""Ids, years and counts in floating-point inputs: bfloat16 lacks some integers above 256, and a run says so."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from crossbow_py.engine.modules import precision
from tests.trainers import Recorder, make_trainer

N = 60
IDS = 2 * torch.arange(N) % 60 + 101  # odd: from 257 on bfloat16 has none of them


class Lookup(nn.Module):
    """A model with a class for each id, which is the inputs' first value."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(600, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.embed(inputs[:, 0].long()))


@pytest.fixture(autouse=True)
def _bf16_is_fast(monkeypatch):
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: True)


def data_of(ids, streamed):
    inputs, targets = torch.stack([ids.float(), torch.rand(len(ids))], 1), ids % 3
    return list(zip(inputs, targets.tolist(), strict=True)) if streamed else (inputs, targets)


def run(train_data, **options):
    recorder = Recorder()
    given = {"precision": "auto", "num_workers": 0, "callbacks": [recorder], **options}
    result = make_trainer(model=Lookup, train_data=train_data, **given).fit(max_epochs=1)
    return result.summary.precision, [said for said in recorder.of("message") if "whole numbers" in said]


@pytest.mark.parametrize("streamed", [False, True])
def test_auto_precision_of_ids_that_bf16_rounds_is_fp32_and_says_so(streamed):
    chosen, said = run(data_of(IDS + 200, streamed))
    assert chosen == "fp32"
    (line,) = said
    assert line.startswith("precision is fp32, because in bf16 the inputs have whole numbers that bfloat16 rounds: 3")
    assert line.endswith(" becomes 300.")


@pytest.mark.parametrize("streamed", [False, True])
def test_auto_precision_of_small_ids_stays_bf16_without_a_word(streamed):
    assert run(data_of(IDS, streamed)) == ("bf16", [])


@pytest.mark.parametrize("streamed", [False, True])
def test_bf16_that_was_asked_for_says_that_it_rounds_ids(streamed):
    chosen, said = run(data_of(IDS + 200, streamed), precision="bf16")
    assert chosen == "bf16"
    (line,) = said
    assert re.fullmatch(
        r"The inputs have whole numbers that bfloat16 rounds: \d+ becomes \d+; if they are ids, years or counts, set "
        "precision=fp32, or give them as a tensor of integers.",
        line,
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_id_that_only_a_later_item_has_is_told_when_it_is_loaded(num_workers):
    ids = IDS.clone()
    ids[31] = 301  # not among the items that are looked at before training
    chosen, said = run(data_of(ids, streamed=True), num_workers=num_workers)
    assert chosen == "bf16"
    assert [line.split(";")[0] for line in said] == [
        "The inputs have whole numbers that bfloat16 rounds: 301 becomes 300"
    ]


def test_ids_of_the_test_data_alone_are_told_too():
    chosen, said = run(data_of(IDS, streamed=False), test_data=data_of(IDS + 200, streamed=False))
    assert (chosen, len(said)) == ("bf16", 1)


def test_normalised_inputs_and_images_stay_bf16_without_a_word():
    inputs, targets = data_of(IDS + 200, streamed=False)
    recorder = Recorder()
    make_trainer(
        model=lambda: nn.Linear(2, 3), train_data=(inputs, targets), mean=[300, 0.5], std=[50, 0.3], precision="auto",
        callbacks=[recorder],
    ).fit(max_rounds=1)  # fmt: skip
    assert recorder.of("start")[0].precision == "bf16"
    images = torch.randint(0, 256, (N, 3, 4, 4), dtype=torch.uint8)
    make_trainer(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), train_data=(images, targets), precision="auto",
        callbacks=[recorder],
    ).fit(max_rounds=1)  # fmt: skip
    assert recorder.of("start")[1].precision == "bf16"
    assert not [said for said in recorder.of("message") if "whole numbers" in said]


def test_fp32_of_timestamps_in_float64_says_that_it_rounds_them():
    inputs, targets = data_of(IDS, streamed=False)
    recorder = Recorder()
    stamped = inputs.double() + 1_700_000_000
    make_trainer(model=lambda: nn.Linear(2, 3), train_data=(stamped, targets), callbacks=[recorder]).fit(max_rounds=1)
    (said,) = [said for said in recorder.of("message") if "whole numbers" in said]
    assert said.startswith("The inputs have whole numbers that float32 rounds: 1700000101 becomes 1700000128;")
    assert "precision=fp32" not in said
