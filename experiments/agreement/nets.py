"""Networks with more to their backward pass than their forward pass shows, and what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py import SGD, Independent, Trainer
from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.dropout import OwnDraws, counter_seed
from experiments.bench.torchvision import import_torchvision

EXECUTORS = ("auto", "fused", "serial")
LEARNERS, ROUNDS, BATCH, RATE = 2, 10, 8, 0.05
WIDTH, CLASSES, TOKENS = 12, 4, 32


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES), between

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.second(self.between(self.first(x).tanh()))
        return scores


def hooked() -> nn.Module:
    """A network with a hook on the backward pass of a layer, which halves its gradients."""
    model = Between(torch.relu)
    model.second.register_full_backward_hook(_halve)
    return model


def _halve(_module: nn.Module, inputs: Any, _outputs: Any) -> tuple[Tensor, ...]:
    return (inputs[0] / 2,)


class Temperature(nn.Module):
    """CLIP's scores: similarities times a scale that is a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes = nn.Linear(WIDTH, 16), nn.Parameter(torch.randn(CLASSES, 16))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        normal = nn.functional.normalize
        return self.logit_scale.exp() * normal(self.encoder(x), dim=-1) @ normal(self.classes, dim=-1).t()


class DropPath(nn.Module):
    """Residual blocks, each of which skips some of the samples, drawn as timm draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            kept = x.new_empty((len(x), 1)).bernoulli_(0.7)
            x = x + block(x).relu() * kept.div_(0.7)
        scores: Tensor = self.head(x)
        return scores


class Llama(nn.Module):
    """A tiny Llama, from a configuration of the package transformers; tokens in, scores of classes out."""

    def __init__(self) -> None:
        super().__init__()
        import_torchvision()
        from transformers import LlamaConfig, LlamaForSequenceClassification  # noqa: PLC0415  an extra

        configuration = LlamaConfig(
            vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_labels=CLASSES, pad_token_id=None, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForSequenceClassification(configuration)
        self.model.config.pad_token_id = TOKENS - 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `[B, CLASSES]` of tokens `[B, T]`."""
        scores: Tensor = self.model(tokens).logits
        return scores


NETS: dict[str, Callable[[], nn.Module]] = {
    "straight-through estimator": lambda: Between(_StraightThrough.apply),
    "gradient reversal": lambda: Between(_Reversal.apply),
    "backward hook": hooked,
    "CLIP's temperature": Temperature,
    "drop path": DropPath,
    "tiny Llama": Llama,
}


def samples(name: str) -> tuple[Tensor, Tensor]:
    """Random inputs and classes, always the same."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, CLASSES, (160,), generator=generator)
    if name == "tiny Llama":
        return torch.randint(0, TOKENS - 1, (160, 6), generator=generator), classes
    return torch.randn(160, WIDTH, generator=generator), classes


def trained(name: str, executor: str) -> dict[str, Any]:
    """Ten rounds of two learners by an executor, and how far they end from plain PyTorch's loop.

    The loop is written out here: a model a learner, torch.optim.SGD, the learners' initial weights, batches and random
    numbers. What is given back is the largest relative distance of weights, or why the executor was refused.
    """
    try:
        trainer = Trainer(
            model=NETS[name], train_data=samples(name), batch_size=BATCH, num_learners=LEARNERS, executor=executor,
            averaging=Independent(), optimizer=SGD(learning_rate=RATE, momentum=0.9), device="cpu", precision="fp32",
        )  # fmt: skip
    except UserError as error:
        return {"refused": str(error)}
    parts = trainer.run
    models = []
    for learner in range(LEARNERS):
        model = NETS[name]()
        model.load_state_dict(parts.bank.learner_state(learner), strict=False)
        models.append(model.train())
    trainer.fit(max_rounds=ROUNDS)
    distances = []
    for learner, model in enumerate(models):
        _train_plainly(name, model, parts.train_feed, learner)
        ended = parts.bank.learner_state(learner)
        distances += [
            float((ended[key] - own.detach()).norm() / own.detach().norm().clamp_min(1e-12))
            for key, own in model.named_parameters()
        ]
    return {"executor": parts.choices.executor, "distance": max(distances)}


def _train_plainly(name: str, model: nn.Module, feed: Any, learner: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for index in range(ROUNDS):
        batch = feed.batch(index * BATCH)
        # An ordinary module draws what a learner draws in a round.
        own = OwnDraws(torch.Generator().manual_seed(counter_seed(0, "dropout", index, learner)))
        with own if name == "drop path" else nullcontext():
            output = model(batch.inputs)
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, batch.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
