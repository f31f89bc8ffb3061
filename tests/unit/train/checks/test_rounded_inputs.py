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
    given = {"model": Lookup, "precision": "auto", "num_workers": 0, "callbacks": [recorder], **options}
    result = make_trainer(train_data=train_data, **given).fit(max_epochs=1)
    return result.summary.precision, [said for said in recorder.of("message") if "whole numbers" in said]


@pytest.mark.parametrize(
    ("ids", "precision", "chosen", "said"),
    [
        (IDS, "auto", "bf16", []),
        (
            IDS + 200, "auto", "fp32",
            [r"precision is fp32, because in bf16 the inputs have whole numbers .* bfloat16 rounds: 3.. becomes 300\."],
        ),
        (
            IDS + 200, "bf16", "bf16",
            [
                r"The inputs have whole numbers that bfloat16 rounds: \d+ becomes \d+; if they are ids, years or "
                "counts, set precision=fp32, or give them as a tensor of integers."
            ],
        ),
    ],
    ids=["small ids", "rounded by auto", "rounded as asked for"],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_ids_that_bf16_rounds_are_said_and_auto_takes_fp32_for_them(ids, precision, chosen, said, streamed):
    taken, messages = run(data_of(ids, streamed), precision=precision)
    assert taken == chosen and len(messages) == len(said)
    assert all(re.fullmatch(*each) for each in zip(said, messages, strict=True))


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
    images = torch.randint(0, 256, (N, 3, 4, 4), dtype=torch.uint8)
    normalised = {"model": lambda: nn.Linear(2, 3), "mean": [300, 0.5], "std": [50, 0.3]}
    assert run((inputs, targets), **normalised) == ("bf16", [])
    assert run((images, targets), model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3))) == ("bf16", [])


def test_fp32_of_timestamps_in_float64_says_that_it_rounds_them():
    inputs, targets = data_of(IDS, streamed=False)
    stamped = inputs.double() + 1_700_000_000
    _, (said,) = run((stamped, targets), model=lambda: nn.Linear(2, 3), precision="fp32")
    assert said.startswith("The inputs have whole numbers that float32 rounds: 1700000101 becomes 1700000128;")
    assert "precision=fp32" not in said
