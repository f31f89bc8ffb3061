"""The configuration of `crossbow_py.check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from crossbow_py.cli.configuration import Registry
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import check, setting
from crossbow_py.engine.modules.precision import check_device

_USAGE = """\
usage: python -m crossbow_py.check [device=auto|cpu|cuda] [KEY=VALUE ...] [--help]

Tries what executors use on a device, step by step, each step in a child process: plain operators, CUDA graphs, every
kernel, streams, sums over GPUs, streamed data, resuming. Each trains a small model and is compared with serial.
executor=auto takes only what has passed, and tries what it needs by itself the first time on a GPU.

  python -m crossbow_py.check                      # the GPU, or the CPU where there is none
  python -m crossbow_py.check device=cuda again=true
  CUDA_VISIBLE_DEVICES=1 python -m crossbow_py.check device=cuda archive=second_gpu.tar.gz

Outcomes are remembered by device, driver, versions of torch and Triton, and this package's code. The archive has
everything that a report about a failure needs: versions, the logs of all steps, their times, and chosen convolutions.

Exit codes: 0 all passed, 1 a step failed or a bug of ours, 2 a mistake in what was asked for, 130 after Ctrl-C.
"""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Everything `crossbow_py.check` can be told."""

    GROUP: ClassVar[str] = ""
    CONF: ClassVar[str] = "check"
    USAGE: ClassVar[str] = _USAGE
    GROUPS: ClassVar[Mapping[str, Registry]] = {}
    MEANINGS: ClassVar[Mapping[str, str]] = {}
    LAID_OVER: ClassVar[Mapping[str, Callable[[Any, str, Any], Any]]] = {}
    TAKES_RECIPES: ClassVar[bool] = False
    NEEDS_FOLDER: ClassVar[bool] = False
    experiment: ClassVar[str] = "check"
    resume: ClassVar[None] = None
    output_dir: ClassVar[None] = None

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "the device to try")
    again: bool = setting(False, "try everything anew, whatever is remembered")
    limit_s: float | None = setting(
        None, "seconds until a step is killed; null is 120, and 300 to 600 where kernels are compiled", above=0
    )
    archive: str | None = setting(
        None, "file for what a report about a failure needs; null is crossbow_check_<time>.tar.gz"
    )

    def __post_init__(self) -> None:
        check_device(self.device)
        check(self)
        if self.archive is not None:
            given_path("archive", self.archive)
