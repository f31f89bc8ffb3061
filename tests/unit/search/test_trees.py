"""Searches of models with several inputs: packs train trials on them as each is trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.search import __main__ as search
from tests.searches import DIGITS, merged, report

WORDS = 20


def sentences(as_items: bool = False, of_tokens: bool = False) -> tuple[Any, Any]:
    """A target for data=custom: mappings of ids, a mask and labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (240, 5), generator=generator)
    mask = (torch.arange(5) < torch.randint(2, 6, (240, 1), generator=generator)).float()
    columns = {"ids": ids, "mask": mask, "labels": (ids if of_tokens else ids[:, 0]) % 3}
    if as_items:
        rows = [{name: values[row].tolist() for name, values in columns.items()} for row in range(240)]
        return rows[:160], rows[160:]
    return tuple({name: values[part] for name, values in columns.items()} for part in (slice(160), slice(160, None)))


class Reader(nn.Module):
    """A target for model=custom."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head((self.embedding(ids) * mask.unsqueeze(-1)).mean(1))}


class LanguageModel(Reader):
    """Computes its loss, as those of transformers do."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        return {"logits": self.head(self.embedding(ids)), "loss": None}


def search_sentences(model: type[nn.Module], *overrides: str, **arguments: bool) -> int:
    own = [f"data.args.{name}={str(value).lower()}" for name, value in arguments.items()]
    return search.main([
        *merged([word for word in DIGITS if not word.startswith("model.")], overrides), "model=custom", "data=custom",
        f"model.target={__name__}.{model.__name__}", f"data.target={__name__}.sentences", "data.num_classes=3",
        "data.validation_fraction=0.25", *own,
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("as_items", [False, True])
def test_trials_in_packs_come_to_what_they_come_to_alone(as_items: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ran = [
        search_sentences(
            Reader, f"executor={executor}", f"packing={packing}", "num_workers=0", f"output_dir={executor}",
            as_items=as_items,
        )
        for executor, packing in (("serial", "none"), ("fused", "signature"))
    ]  # fmt: skip
    assert ran == [0, 0]
    alone, packed = (report(folder)["trials"] for folder in ("serial", "fused"))
    for one, other in zip(alone, packed, strict=True):
        assert one["values"] == pytest.approx(other["values"], abs=0.03)


def test_a_model_that_computes_its_loss_from_tokens_is_refused(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert search_sentences(LanguageModel, of_tokens=True) == 2
    assert "computes its own loss from labels of tokens" in capsys.readouterr().err
