"""A plain PyTorch loop, and the same training with `Trainer`: digits, the same model, data, optimizer and epochs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.data.sources.digits import Digits

BATCH_SIZE, EPOCHS = 16, 5


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, test), each images float [N, 1, 8, 8] in [0, 1] and classes [N]."""
    source = Digits().load(progress=False)
    (images, labels), (test_images, test_labels) = source.train, source.test
    return (images / 16, labels), (test_images / 16, test_labels)


def plain(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = train
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = model(test[0]).argmax(1) == test[1]
    return correct.float().mean().item()


def with_trainer(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    trainer = Trainer(
        model=make_model,  # the function, not a model: every learner gets one
        train_data=train,
        test_data=test,
        batch_size=BATCH_SIZE,  # of each learner
        optimizer=SGD(learning_rate=0.05, momentum=0.9),
        num_learners=2,  # "auto" looks for the one that learns fastest
    )
    result = trainer.fit(max_epochs=EPOCHS)
    assert result.test_accuracy is not None  # there are test data
    return result.test_accuracy


def main() -> tuple[float, float]:
    train, test = load()
    accuracies = plain(train, test), with_trainer(train, test)
    print("test accuracy: plain loop {:.3f}, Trainer {:.3f}".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    main()
