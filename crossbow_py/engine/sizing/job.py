"""The inputs of the memory model: a learner's samples, what is done with them, and the shapes of its model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import AveragingRule
from crossbow_py.engine.bank.layout import Order, buffer_layout, parameter_layout
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.sizing.memory import ModelSizes
from crossbow_py.engine.update.optimizers import Optimizer


@dataclass(frozen=True)
class Sample:
    """One sample as it enters the model, and its target: by default a class."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype = torch.float32
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64

    def batch(self, size: int, channels_last: bool) -> tuple[Tensor, Tensor]:
        """Return uninitialised inputs `[B, ...]` and targets `[B, ...]`, as a feed returns them."""
        inputs = torch.empty(size, *self.input_shape, dtype=self.input_dtype)
        if channels_last and inputs.ndim == 4:
            inputs = torch.empty_like(inputs, memory_format=torch.channels_last)
        return inputs, torch.empty(size, *self.target_shape, dtype=self.target_dtype)


@dataclass(frozen=True)
class Job:
    """The settings of training that memory depends on. `order` is that of the bank's rows."""

    loss: Loss
    optimizer: Optimizer
    rule: AveragingRule
    precision: Precision
    channels_last: bool = True
    order: Order = "blocks"


def model_sizes(model: nn.Module, job: Job) -> ModelSizes:
    """Return the sizes that follow from the shapes of a model."""
    others = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    return ModelSizes(
        parameters=tuple(block.numel for block in parameter_layout(model, job.channels_last).blocks),
        buffers=tuple(block.numel for block in buffer_layout(model).blocks),
        counter_bytes=sum(buffer.numel() * buffer.itemsize for buffer in others),
        num_states=len(job.optimizer.STATE),
        master_bytes=job.precision.master.itemsize,
        compute_bytes=job.precision.compute.itemsize,
        order=job.order,
        has_velocity=job.rule.has_velocity,
        has_ema=job.rule.average_ema is not None,
        shows_mean=job.rule.shows_mean,
    )
