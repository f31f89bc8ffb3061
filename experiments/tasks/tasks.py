"""Tasks that people bring, each as a loop of plain PyTorch and with `Trainer`, on the same samples in the same order.

A loop is what its author would write, and is counted as it stands: `plain_NAME` and `with_NAME`. Both train
`NAME_model` on `NAME_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from crossbow_py import SGD, AdamW, Trainer
from crossbow_py.models import GPT
from crossbow_py.optimizers import ParameterGroup, TorchOptimizer

Order = Sequence[Tensor]  # which samples are in each batch
BATCH_SIZE = 16


def weights(model: nn.Module) -> Tensor:
    """Return all weights of a model one after the other, in float64."""
    return torch.cat([own.detach().double().flatten() for own in model.parameters()])


class Task(NamedTuple):
    """A task: what both sides train, and both sides.

    Attributes:
        note: what is special about it.
        plain: trains a model on the batches of an order.
        trainer: makes a trainer of the same, with further arguments of `Trainer`.
        outcome: what is compared of a trained model.
    """

    note: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    plain: Callable[[nn.Module, Any, Order], None]
    trainer: Callable[..., Trainer]
    outcome: Callable[[nn.Module], Tensor] = weights


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# --- text: scores of every token --------------------------------------------------------------------------------------


def text_model() -> nn.Module:
    return GPT(depth=2, width=64, heads=4).build((32,), 50)


def text_data() -> Any:
    tokens = torch.randint(50, (1024, 1), generator=_draw()) + 3 * torch.arange(33)
    return tokens[:, :-1] % 50, tokens[:, 1:] % 50


def plain_text(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for batch in order:
        scores = model(data[0][batch])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), data[1][batch].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_text(**options: Any) -> Trainer:
    optimizer = AdamW(learning_rate=0.001, decay_norm_and_bias=True)
    return Trainer(model=text_model, train_data=text_data(), optimizer=optimizer, **options)


# --- tabular: categories and numbers, by name -------------------------------------------------------------------------


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(10, 8) for _ in range(6))
        self.rest = nn.Sequential(nn.Linear(58, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        each = [own(column) for own, column in zip(self.columns, categories.unbind(1), strict=True)]
        scores: Tensor = self.rest(torch.cat([*each, numbers], 1))
        return scores


def tabular_data() -> Any:
    categories = torch.randint(10, (2048, 6), generator=_draw())
    numbers = torch.randn(2048, 10, generator=_draw())
    return {"categories": categories, "numbers": numbers}, (categories[:, 0] > 4 + numbers[:, 0]).long()


def plain_tabular(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    inputs, targets = data
    for batch in order:
        scores = model(categories=inputs["categories"][batch], numbers=inputs["numbers"][batch])
        loss = nn.functional.cross_entropy(scores, targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_tabular(**options: Any) -> Trainer:
    optimizer = AdamW(learning_rate=0.001, decay_norm_and_bias=True)
    return Trainer(model=Tabular, train_data=tabular_data(), optimizer=optimizer, **options)


# --- dense: a class for every pixel -----------------------------------------------------------------------------------


def dense_model() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 3, 1))


def dense_data() -> Any:
    images = torch.randn(512, 1, 24, 24, generator=_draw())
    return images, (images[:, 0] > 0.5).long() + (images[:, 0] > 1).long()


def plain_sgd(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in order:
        loss = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_dense(**options: Any) -> Trainer:
    return Trainer(model=dense_model, train_data=dense_data(), optimizer=SGD(learning_rate=0.05), **options)


# --- several inputs: an image and features, in order ------------------------------------------------------------------


class ImageAndFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 49 + 8, 4)

    def forward(self, image: Tensor, features: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([self.image(image), features], 1))
        return scores


def several_data() -> Any:
    images, features = torch.randn(512, 3, 16, 16, generator=_draw()), torch.randn(512, 8, generator=_draw())
    return (images, features), 2 * (images.mean((1, 2, 3)) > 0).long() + (features[:, 0] > 0).long()


def plain_several(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    (images, features), targets = data
    for batch in order:
        loss = nn.functional.cross_entropy(model(images[batch], features[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_several(**options: Any) -> Trainer:
    return Trainer(model=ImageAndFeatures, train_data=several_data(), optimizer=SGD(learning_rate=0.05), **options)


# --- Hugging Face: a BERT that computes its loss ----------------------------------------------------------------------


def bert_model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  seconds to import

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # both sides would draw other masks
    model: nn.Module = BertForSequenceClassification(BertConfig(vocab_size=60, **size, **still))
    return model


def bert_data() -> Any:
    ids = torch.randint(3, 60, (1024, 16), generator=_draw())
    mask = (torch.arange(16) < torch.randint(4, 17, (1024, 1), generator=_draw())).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids[:, 0] > 30).long()}


def plain_bert(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for batch in order:
        loss = model(**{name: values[batch] for name, values in data.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_bert(**options: Any) -> Trainer:
    optimizer = AdamW(learning_rate=0.001, decay_norm_and_bias=True)
    return Trainer(model=bert_model, train_data=bert_data(), optimizer=optimizer, **options)


# --- weighted: rare classes count more --------------------------------------------------------------------------------


def weighted_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


def weighted_data() -> Any:
    inputs = torch.randn(2048, 20, generator=_draw())
    return inputs, (inputs[:, 0] > 1).long() + (inputs[:, 0] > 2).long()


def plain_weighted(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    counts = torch.bincount(data[1])
    criterion = nn.CrossEntropyLoss(weight=len(data[1]) / (len(counts) * counts))
    for batch in order:
        loss = criterion(model(data[0][batch]), data[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_weighted(**options: Any) -> Trainer:
    optimizer = SGD(learning_rate=0.05)
    return Trainer(
        model=weighted_model, train_data=weighted_data(), class_weights="balanced", optimizer=optimizer, **options
    )


# --- accumulation: four batches a step --------------------------------------------------------------------------------


def plain_accumulated(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.zero_grad()
    for number, batch in enumerate(order, start=1):
        loss = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
        (loss / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def with_accumulated(**options: Any) -> Trainer:
    optimizer = SGD(learning_rate=0.05)
    return Trainer(model=weighted_model, train_data=weighted_data(), accumulate=4, optimizer=optimizer, **options)


# --- groups: a head that learns faster than the rest ------------------------------------------------------------------


def plain_groups(model: nn.Module, data: Any, order: Order) -> None:
    body, head = model.get_submodule("0"), model.get_submodule("2")
    assert isinstance(head, nn.Linear)
    groups: list[dict[str, Any]] = [
        {"params": body.parameters()}, {"params": [head.weight], "lr": 0.1, "weight_decay": 0.01},
        {"params": [head.bias], "lr": 0.1},
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    for batch in order:
        loss = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_groups(**options: Any) -> Trainer:
    optimizer = SGD(learning_rate=0.01, groups=(ParameterGroup("2", rate=10.0, weight_decay=0.01),))
    return Trainer(model=weighted_model, train_data=weighted_data(), optimizer=optimizer, **options)


# --- another optimizer of torch ---------------------------------------------------------------------------------------


def plain_rmsprop(model: nn.Module, data: Any, order: Order) -> None:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001, alpha=0.9)
    for batch in order:
        loss = nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_rmsprop(**options: Any) -> Trainer:
    optimizer = TorchOptimizer(target=torch.optim.RMSprop, args={"alpha": 0.9}, learning_rate=0.001)
    return Trainer(model=weighted_model, train_data=weighted_data(), optimizer=optimizer, **options)


# --- cross-validation: one of five folds ------------------------------------------------------------------------------


def fold() -> list[int]:
    """Return the samples that a fold trains on: all but every fifth."""
    return [number for number in range(len(weighted_data()[1])) if number % 5]


def fold_data() -> Any:
    return tuple(each[fold()] for each in weighted_data())


def with_fold(**options: Any) -> Trainer:
    others = Subset(TensorDataset(*weighted_data()), fold())
    optimizer = SGD(learning_rate=0.05)
    return Trainer(model=weighted_model, train_data=others, optimizer=optimizer, **options)


# --- export: a program by torch.export, which runs without the model's code -------------------------------------------


def exported_scores(model: nn.Module) -> Tensor:
    inputs = weighted_data()[0]
    scores: Tensor = torch.export.export(model.eval(), (inputs,)).module()(inputs)
    return scores.detach().double()


def with_export(**options: Any) -> Trainer:
    return Trainer(model=weighted_model, train_data=weighted_data(), optimizer=SGD(learning_rate=0.05), **options)


TASKS = {
    "text": Task("scores of every token, [B, T, V]", text_model, text_data, plain_text, with_text),
    "tabular": Task("a dict of inputs", Tabular, tabular_data, plain_tabular, with_tabular),
    "dense": Task("a class for every pixel", dense_model, dense_data, plain_sgd, with_dense),
    "several inputs": Task("a tuple of inputs", ImageAndFeatures, several_data, plain_several, with_several),
    "Hugging Face": Task("a BERT that returns its loss", bert_model, bert_data, plain_bert, with_bert),
    "weighted": Task("balanced class weights", weighted_model, weighted_data, plain_weighted, with_weighted),
    "accumulation": Task("four batches a step", weighted_model, weighted_data, plain_accumulated, with_accumulated),
    "groups": Task("a rate and a decay of the head's own", weighted_model, weighted_data, plain_groups, with_groups),
    "another optimizer": Task("RMSprop of torch", weighted_model, weighted_data, plain_rmsprop, with_rmsprop),
    "cross-validation": Task("a fold, as a Subset", weighted_model, fold_data, plain_sgd, with_fold),
    "export": Task("scores of the exported model", weighted_model, weighted_data, plain_sgd, with_export,
                   exported_scores),
}  # fmt: skip
