"""One side of `run.py`, in a process of its own, by the package that PYTHONPATH has. Prints JSON, in bytes.

python experiments/one_base/side.py {finetune,adapters} K
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py import Member, Trainer, train_many
from crossbow_py.optimizers import AdamW

_WIDTH, _LAYERS, _CLASSES = 1540, 4, 325
_ROUNDS = 4


def make_base() -> nn.Module:
    """9.5 M values that are frozen, and 0.5 M that are not."""
    frozen = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Sequential(*frozen).requires_grad_(False), nn.Linear(_WIDTH, _CLASSES))


class Texts(nn.Module):
    """A BERT of 11 M parameters with adapters of rank 8 by PEFT."""

    def __init__(self) -> None:
        super().__init__()
        import peft  # noqa: PLC0415
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

        size = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        with torch.random.fork_rng():
            torch.manual_seed(0)  # stands for weights from a file
            base = BertForSequenceClassification(BertConfig(**size, num_labels=2))
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
        self.bert = peft.get_peft_model(base, config)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.bert(input_ids=ids).logits
        return found


def held() -> int:
    """The bytes of all tensors that Python knows, each memory once."""
    gc.collect()
    kinds = (Tensor, nn.Parameter)  # others, such as those without values, have no memory
    tensors = [own for own in gc.get_objects() if type(own) in kinds and own.device.type == "cpu"]
    return sum({own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in tensors}.values())


def resident(key: str = "VmRSS") -> int:
    """The process's own memory in the kernel's account; VmHWM is the most that it had."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def main(job: str, count: int) -> Mapping[str, Any]:
    seen: list[tuple[int, int]] = []

    def look(_: object) -> None:
        seen.append((held(), resident()))

    if job == "finetune":
        data = torch.randn(64 * count, _WIDTH), torch.randint(0, _CLASSES, (64 * count,))
        start, before = held(), resident()
        trainer = Trainer(
            make_base, data, optimizer=AdamW(learning_rate=1e-3), num_learners=count, batch_size=16, precision="fp32",
            executor="serial" if count == 1 else "fused", tensorboard=False,
        )  # fmt: skip
        rest: Callable[..., None] = look
        trainer.fit(max_rounds=_ROUNDS, after_round=rest)
    else:
        ids = torch.randint(5, 30_000, (2 * 40, 32))
        texts = ids, ids[:, 0] % 2
        start, before = held(), resident()
        members = [Member(seed=n, optimizer=AdamW(learning_rate=1e-3)) for n in range(count)]
        train_many(
            Texts, texts, texts, members=members, batch_size=2, max_epochs=1, precision="fp32", max_pack_size=count,
            executor="serial" if count == 1 else "fused", progress=look,
        )  # fmt: skip
    return {
        "held": max(own for own, _ in seen) - start, "resident": max(own for _, own in seen) - before,
        "peak": resident("VmHWM") - before,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
