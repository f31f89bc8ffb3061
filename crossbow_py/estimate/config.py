"""The configuration of `crossbow_py.estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.core.settings import setting
from crossbow_py.estimate.units import parse_bytes
from crossbow_py.train.config import TrainConfig

_USAGE = """\
usage: python -m crossbow_py.estimate [+experiment=NAME] [memory=AMOUNT] [GROUP=OPTION ...] [KEY=VALUE ...] [--help]

Says how large batches may be, how many learners fit, and how many workers feed them. It takes what crossbow_py.train
takes, and the keys memory, held_back and images_per_s. Neither the data set nor the device has to be there.

  python -m crossbow_py.estimate +experiment=resnet50 memory=16GiB
  python -m crossbow_py.estimate +experiment=resnet32 memory=8GiB num_learners=4 precision=fp32
  python -m crossbow_py.estimate model=custom model.target=pkg.mod.fn data=cifar10 memory=24GiB output_dir=sized
  python -m crossbow_py.estimate +experiment=flowers
  python -m crossbow_py.estimate +experiment=digits find_learning_rate=true

With memory, tensors are counted without a device; it is taken for a GPU unless device=cpu.
With find_learning_rate=true, it trains some rounds on the data at rising rates instead, and suggests one.
Without memory, a visible GPU is measured by real rounds, and a CPU is held against the memory that is free now.
Nothing is written unless output_dir is set: then estimate.json, and with matplotlib estimate.png.

Exit codes: 0 answered, also when nothing fits; 2 a mistake in what was asked for; 1 anything else.
"""


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(TrainConfig):
    """Everything `crossbow_py.estimate` can be told: a run, and what is to be found out about it."""

    USAGE: ClassVar[str] = _USAGE
    MEANINGS: ClassVar[Mapping[str, str]] = {
        "output_dir": "folder for estimate.json and estimate.png; null writes nothing",
    }
    NEEDS_FOLDER: ClassVar[bool] = False

    memory: str | float | None = setting(
        None, "count for a device with that much memory (16GiB, 500MB, 8e9); null looks at this machine"
    )
    held_back: str | float | None = setting(
        None, "memory to leave free, an amount like those of memory; null is what the estimate says and why"
    )
    find_learning_rate: bool = setting(
        False, "answer another question, on the data: the learning rate at which the loss falls fastest (a range test)"
    )
    images_per_s: float | None = setting(
        None, "what the device trains, all learners together; null measures it on this machine", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        if self.held_back not in (None, 0, "0"):
            parse_bytes("held_back", self.held_back or 0)
