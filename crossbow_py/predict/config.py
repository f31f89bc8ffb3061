"""The configuration of `crossbow_py.predict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from crossbow_py.cli.configuration import Registry
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import check, setting
from crossbow_py.data.sources import SOURCES
from crossbow_py.engine.modules.precision import PrecisionName, check_device, check_precision
from crossbow_py.predict.predictors import PredictorName

_USAGE = """\
usage: python -m crossbow_py.predict models=[RUN,...] [data=NAME] [KEY=VALUE ...] [--help]

Runs trained models over the test part of a data set, each alone and all as an ensemble: the mean of their
probabilities. Shows accuracies, images/s, and how long an answer takes for batches of 1 to 64 samples.

  python -m crossbow_py.predict models=[runs/digits/a,runs/digits/b]     # folders of runs
  python -m crossbow_py.predict models=[runs/digits/a/model_0.safetensors,runs/digits/b] executor=serial
  python -m crossbow_py.predict models=[runs/lenet/a] data=fashion_mnist latency_s=0 output_dir=predicted

A run with averaging=independent has a model for every learner, and its folder stands for all of them. Without data
the models' own data set is taken, which must be the same. Models of one architecture run as rows of one bank.
Writes predict.json, and predictions.npz: members [K, N, C], ensemble [N, C], targets [N], names [K].

Exit codes: 0 done, 2 a mistake in what was asked for, 130 after Ctrl-C, 1 anything else.
"""


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Everything `crossbow_py.predict` can be told. `data` is None where the models' own data set is meant."""

    GROUP: ClassVar[str] = ""
    CONF: ClassVar[str] = "predict"
    USAGE: ClassVar[str] = _USAGE
    GROUPS: ClassVar[Mapping[str, Registry]] = {"data": SOURCES}
    MEANINGS: ClassVar[Mapping[str, str]] = {}
    LAID_OVER: ClassVar[Mapping[str, Callable[[Any, str, Any], Any]]] = {}
    TAKES_RECIPES: ClassVar[bool] = False
    NEEDS_FOLDER: ClassVar[bool] = True
    experiment: ClassVar[str] = "predict"
    resume: ClassVar[None] = None

    models: tuple[str, ...] | str = setting(
        (), "in brackets, folders of runs (all models of each) or .safetensors files in them: models=[RUN,RUN]"
    )
    executor: PredictorName = setting(
        "auto",
        "how models run: auto (the fastest, measured), serial, fused (one graph); on CPU threads (a model a core), and "
        "fused_threads (a graph a core); on CUDA streams (a model a stream)",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where models run")
    precision: PrecisionName = setting("fp32", "number format of models: fp32, bf16, or auto (bf16 where it is fast)")
    batch_size: int | None = setting(None, "samples at a time; null is 256, and fewer of large ones", minimum=1)
    latency_s: float = setting(0.5, "seconds for which to measure the latency of each batch size; 0 never", minimum=0)
    num_workers: int | Literal["auto"] = setting("auto", "processes that load streamed data", minimum=0)
    targets: tuple[str, ...] = setting(
        (), "functions that runs may name as model.target or data.target, and that are called: targets=[pkg.fn]"
    )
    output_dir: str | None = setting(None, "folder for the results; null is runs/predict/<time>")
    data: Any = dataclasses.field(
        default=None, metadata={"help": "the data set whose test part is predicted; by default that of the models"}
    )

    def __post_init__(self) -> None:
        check_device(self.device)
        check_precision(self.precision)
        check(self)
        models = (self.models,) if isinstance(self.models, str) else self.models
        object.__setattr__(self, "models", models)
        if not models:
            raise UserError("models must name at least one trained model, got none; set models=[RUN], or [RUN,RUN].")
        for path in models:
            given_path("models", path)
        if self.output_dir is not None:
            given_path("output_dir", self.output_dir)
