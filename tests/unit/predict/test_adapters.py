"""Adapters of several ranks and scales answer one batch over one base, each as PEFT's model alone.

What this alone catches: another adapter's rank or scale, and a base for each of them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from crossbow_py import Ensemble, LoRA
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.predict import ensemble as ensembles


class Words(nn.Module):
    """An embedding, a convolution and linear layers: all kinds of layers that adapters are for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.linear(self.mix(self.embed(ids).mT).relu().mean(-1)).tanh())
        return found


def base() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Words()


def by_peft(rank: int, alpha: int, **options: Any) -> Any:
    """A model as PEFT makes it, with an adapter that does something, in float64."""
    settings = {"target_modules": ["embed", "mix", "linear"], "modules_to_save": ["head"], **options}
    model = peft.get_peft_model(base(), peft.LoraConfig(r=rank, lora_alpha=alpha, **settings)).double()
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        for own in model.parameters():
            if own.requires_grad:
                nn.init.normal_(own, std=0.3)
    return model


IDS = torch.arange(30).reshape(5, 6) % 20


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_adapters_of_other_ranks_and_scales_are_one_bank_and_answer_as_each_alone(
    executor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ensembles, "choose_precision", lambda name, device: FP64)
    models = [
        by_peft(1, 7), by_peft(4, 3, lora_dropout=0.2), by_peft(2, 16), by_peft(3, 2, use_rslora=True), by_peft(2, 5),
    ]  # fmt: skip
    models[-1].save_pretrained(tmp_path)
    models[-1] = peft.PeftModel.from_pretrained(base().double(), tmp_path)  # all of which PEFT freezes
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    with torch.no_grad():
        expected = torch.stack([model.eval()(IDS).softmax(1) for model in models])
    assert (expected[0] - expected[1]).abs().max() > 0.01
    with Ensemble(models, executor=executor, device="cpu") as ensemble:
        assert ensemble.num_banks == 1
        assert ensemble._banks[0].base.is_shared and ensemble._banks[0].base.num_values > 20 * 8
        assert (ensemble.members(IDS) - expected).abs().max() <= 1e-10
        assert (ensemble.predict(IDS) - expected.mean(0)).abs().max() <= 1e-10
    for model, own in zip(models, before, strict=True):
        found = model.state_dict()
        assert found.keys() == own.keys() and all(torch.equal(found[name], value) for name, value in own.items())
    assert models[0].peft_config["default"].r == 1 and models[1].peft_config["default"].r == 4


def test_bases_that_differ_and_what_is_no_plain_lora_still_answer_right() -> None:
    other: Any = by_peft(2, 5)
    with torch.no_grad():
        other.base_model.model.linear.base_layer.weight.add_(0.1)
    dora = by_peft(2, 5, target_modules=["linear"], use_dora=True)
    merged = copy.deepcopy(by_peft(2, 5))
    merged.merge_adapter()
    models = [by_peft(3, 5), other, dora, merged, base()]
    models = [model.float() for model in models]
    with torch.no_grad():
        expected = torch.stack([model.eval()(IDS).softmax(1) for model in models])
    with Ensemble(models, executor="serial", device="cpu") as ensemble:
        assert ensemble.num_banks == 4
        assert (ensemble.members(IDS) - expected).abs().max() <= 1e-6


def test_scale_that_is_a_buffer_already_is_taken_as_it_is() -> None:
    models: list[Any] = [LoRA(base, rank=rank, alpha=alpha, targets=["linear"])() for rank, alpha in ((2, 4), (3, 7))]
    for model in models:
        nn.init.normal_(model.base_model.model.linear.lora_B["default"].weight)
    with torch.no_grad():
        expected = torch.stack([model.eval()(IDS).softmax(1) for model in models])
    with Ensemble(models, executor="serial", device="cpu") as ensemble:
        assert ensemble.num_banks == 1
        assert (ensemble.members(IDS) - expected).abs().max() <= 1e-6
