"""The weights of a run in a plain `nn.Module`, without crossbow_py: predictions, and a program by torch.export."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.data.sources.digits import Digits

RUN = Path("runs/load_weights")


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip


def train() -> float:
    digits = Digits().load(progress=False)
    trainer = Trainer(
        model=make_model, train_data=digits.train, test_data=digits.test, mean=digits.mean, std=digits.std,
        optimizer=SGD(learning_rate=0.05), num_learners=2,
        output_dir=RUN, resume="auto",  # so that a second call finds what the first has done
    )  # fmt: skip
    result = trainer.fit(max_epochs=2)
    assert result.test_accuracy is not None
    return result.test_accuracy


def load() -> nn.Module:
    """From here on it is PyTorch and safetensors alone."""
    model = make_model()
    model.load_state_dict(load_file(RUN / "model.safetensors"))
    return model.eval()


def prepare(images: Tensor) -> Tensor:
    """uint8 images as training prepared them: scaled to [0, 1], and normalised by its mean and std."""
    return (images / 255 - 0.01915) / 0.02360


def export(model: nn.Module, inputs: Tensor) -> Path:
    """A file that runs without the model's code, for batches of any size."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},))
    torch.export.save(program, RUN / "model.pt2")
    return RUN / "model.pt2"


def main() -> tuple[float, float, float]:
    accuracy = train()
    images, labels = Digits().load(progress=False).test
    model, inputs = load(), prepare(images)
    program = torch.export.load(export(model, inputs)).module()
    with torch.no_grad():
        loaded, exported = ((each(inputs).argmax(1) == labels).float().mean().item() for each in (model, program))
    print(f"test accuracy: {accuracy:.4f} in training, {loaded:.4f} loaded, {exported:.4f} exported")
    return accuracy, loaded, exported


if __name__ == "__main__":
    main()
