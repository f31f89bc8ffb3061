"""Predictions: of one model after another, and of an `Ensemble`. Images are bytes, normalised here on all sides."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from crossbow_py.predict.ensemble import Ensemble
from crossbow_py.predict.predictors import PredictorName
from experiments.bench.gate import Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.packs.layers import tuned_step
from experiments.bench.packs.side import DEFAULT, DEFAULT_ENSEMBLE, ONE_THREAD, TUNED, PackSide, PackWorkload
from experiments.bench.sides.captured import Step, train_for_ever
from experiments.bench.workloads import Effort

# Batches that are gone through over and over, so that images do not all come from the cache.
_NUM_BATCHES = 16


def predict(side: PackSide, workload: PackWorkload, gate: Gate, effort: Effort) -> None:
    """Predict for ever. Every model takes the batch; the images count once for each."""
    torch.set_num_threads(usable_cores())
    with ExitStack() as stack:
        if side.side in (DEFAULT, DEFAULT_ENSEMBLE):
            step, detail = default_step(side.num_learners, workload), ""
        elif side.side == TUNED:
            step, detail = tuned_step(_resident_step(workload), workload.device, effort, " a batch")
        else:
            step, detail = ensemble_step(side, workload, stack), ""
        gate.ready(Ready(1 if side.side in ONE_THREAD else torch.get_num_threads(), detail))
        train_for_ever(step, side.num_learners * workload.batch_size, gate)


def default_step(num_models: int, workload: PackWorkload) -> Step:
    """Make the step of PyTorch's tutorials: `model.eval()`, `torch.no_grad()`, float32, NCHW; the mean of models."""
    device = torch.device(workload.device)
    models = [workload.make_model().to(device).eval() for _ in range(num_models)]
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    batches = cycle(_batches(workload))

    def step() -> None:
        with torch.no_grad():
            inputs = (next(batches).to(device).float() / 255 - mean) / std
            outputs = [model(inputs) for model in models]
            answer = outputs[0] if num_models == 1 else torch.stack([each.softmax(1) for each in outputs]).mean(0)
            answer.argmax(1).cpu()

    return step


def _resident_step(workload: PackWorkload) -> Step:
    device = torch.device(workload.device)
    model = workload.make_model().to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    images = _batches(workload)[0].to(device, memory_format=torch.channels_last)

    def step() -> None:
        with torch.inference_mode():
            model(images.float().div_(255).sub_(mean).div_(std)).argmax(1)

    return step


def ensemble_step(side: PackSide, workload: PackWorkload, stack: ExitStack) -> Step:
    """A batch through an ensemble of the side's models, which the stack closes: the class by the mean probabilities."""
    device = torch.device(workload.device)
    executor = cast(PredictorName, side.side)
    models = [workload.make_model() for _ in range(side.num_learners)]
    ensemble = stack.enter_context(
        Ensemble(models, executor=executor, device="cuda" if workload.device == "cuda" else "cpu")
    )
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    batches = cycle(_batches(workload))

    def step() -> None:
        ensemble.predict((next(batches).to(device).float() / 255 - mean) / std).argmax(1).cpu()

    return step


def _batches(workload: PackWorkload) -> list[Tensor]:
    images = workload.tensors()[0][: _NUM_BATCHES * workload.batch_size]
    return list(torch.split(images, workload.batch_size))
