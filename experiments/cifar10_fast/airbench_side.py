"""airbench's own script, `airbench94_muon.py`, on CPUs in float32: its text is read from a clone, changed and run.

    python experiments/cifar10_fast/airbench_side.py SCRIPT DATA WIDTHS BATCH EPOCHS RATE SEED

Only what needs a GPU is replaced, and what `Changes` says; a fragment that is not there as often as expected is an
error. DATA is a folder with the images as the script keeps them, `cifar10/train.pt` and `cifar10/test.pt`. It prints
the script's table.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCRIPT = "airbench94_muon.py"
# What needs a GPU: the fragment, how often it is there, and what takes its place.
FOR_CPU = (
    ("@torch.compile\n", 1, ""),
    ("X = G.bfloat16()", 1, "X = G.clone()"),
    ('torch.device("cuda")', 1, 'torch.device("cpu")'),
    ("self.images.half()", 1, "self.images.float()"),
    ("mod.half()", 1, "mod.float()"),
    ("torch.cuda.Event(enable_timing=True)", 2, "CpuEvent()"),
    ("        torch.cuda.synchronize()\n", 1, ""),
    ("CifarNet().cuda()", 1, "CifarNet()"),
    ('    model.compile(mode="max-autotune")\n', 1, ""),
    ('    main("warmup", model)\n', 1, ""),  # of the compiled model
)


class ChangedScriptError(Exception):
    """A sentence about what the script does not have."""


@dataclass(frozen=True)
class Changes:
    """What differs from the script as published besides: its size, the length of a run, and how it is evaluated.

    Whitening biases are trained for the same share of a run. `rate` is that of Muon, which goes with the batch size;
    other rates are of sums over samples and stay. After each epoch the model is evaluated on images and their mirror
    images, as the script can do, instead of images alone, and not once more at the end.
    """

    widths: tuple[int, int, int] = (64, 256, 256)
    batch_size: int = 2000
    epochs: float = 8
    rate: float = 0.24

    def replacements(self) -> list[tuple[str, int, str]]:
        """Return fragments, how often they are there, and what takes their place."""
        blocks = ", ".join(f"block{number}={width}" for number, width in enumerate(self.widths, 1))
        return [
            ("dict(block1=64, block2=256, block3=256)", 1, f"dict({blocks})"),
            ("    batch_size = 2000\n", 1, f"    batch_size = {self.batch_size}\n"),
            ("ceil(8 * len(train_loader))", 1, f"ceil({self.epochs} * len(train_loader))"),
            ("ceil(3 * len(train_loader))", 1, f"ceil({3 * self.epochs / 8} * len(train_loader))"),
            ("lr=0.24", 1, f"lr={self.rate}"),
            ("val_acc = evaluate(model, test_loader, tta_level=0)", 1,
             "val_acc = evaluate(model, test_loader, tta_level=1)"),
            ("tta_val_acc = evaluate(model, test_loader, tta_level=2)", 1, "tta_val_acc = val_acc"),
            ("for run in range(200)", 1, "for run in range(1)"),
        ]  # fmt: skip


class CpuEvent:
    """A stand-in for a CUDA event."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        """Return milliseconds."""
        return 1000 * (later._time - self._time)


def changed(text: str, changes: Changes) -> str:
    """Return the script as it runs here. Raises ChangedScriptError for a fragment that is not there as expected."""
    for fragment, count, other in (*FOR_CPU, *changes.replacements()):
        if (found := text.count(fragment)) != count:
            raise ChangedScriptError(
                f"{SCRIPT} has {fragment.strip()!r} {found} times instead of {count}: it is another version; check out "
                "commit f1c599c of cifar10-airbench."
            )
        text = text.replace(fragment, other)
    return text


class Normalize:
    """torchvision's, for batches of images: all that the script takes of that package."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self._mean, self._std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return (images - self._mean) / self._std


def main(script: str, data: str, widths: str, batch_size: str, epochs: str, rate: str, seed: str) -> None:
    path = Path(script).resolve()
    first, second, third = map(int, widths.split(","))
    changes = Changes((first, second, third), int(batch_size), float(epochs), float(rate))
    code = compile(changed(path.read_text(encoding="utf-8"), changes), str(path), "exec")
    if importlib.util.find_spec("torchvision") is None:
        package: Any = types.ModuleType("torchvision")
        package.transforms = types.ModuleType("torchvision.transforms")
        package.transforms.Normalize = Normalize
        sys.modules |= {"torchvision": package, "torchvision.transforms": package.transforms}
    os.chdir(data)  # it looks for images there, and writes a log
    sys.argv = [str(path)]  # it reads itself
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(int(seed))
    exec(code, {"__name__": "__main__", "CpuEvent": CpuEvent})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ChangedScriptError as error:
        raise SystemExit(f"error: {error}") from None
