"""Small batches through the model before anything is trained: refuses what cannot work, in one sentence each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.data.feed import Batch, Feed
from crossbow_py.engine.agreement import changed_state, projection, python_state
from crossbow_py.engine.dropout import OwnDraws, replace_dropout
from crossbow_py.engine.precision import Precision, cast_module
from crossbow_py.engine.rounds import Loss
from crossbow_py.errors import UserError, one_line
from crossbow_py.evaluation import Metric
from crossbow_py.losses import classes_of, misfit, remarks

_KEEPS_STATE = (
    "The model's forward changes its attribute {}, which every learner has for itself, and which evaluations, saved "
    "models and resumed runs begin anew: keep in a buffer what they need."
)
_DRAWS_OUTSIDE = (
    "The model draws random numbers outside nn.Dropout modules, from torch's own generator: "
    "runs will not repeat or resume bit for bit."
)


def probe(
    template: nn.Module,
    precision: Precision,
    batch: Batch,
    loss: Loss,
    num_classes: int | None,
    exact: bool = True,
    label_smoothing: float = 0.0,
    compile_model: bool = False,
    feed: Feed | None = None,
) -> list[str]:
    """Run one small training batch through a copy of the model; returns warnings.

    Args:
        num_classes: the width the output must have; None when the data does not say.
        exact: whether more outputs than classes are refused too.
        label_smoothing: with more than 0 the loss is cross-entropy with a class for each sample.
        compile_model: whether the model will be compiled.
        feed: where the batch is from, whose other targets must be classes of the output, too.

    Raises:
        UserError: the model, its output or the loss does not fit the data.
    """
    model = _runnable(template, precision).train()
    device = batch.inputs.device
    generator = torch.Generator(device)
    replace_dropout(model, generator)
    own = device.type == "cpu" and not compile_model  # learners draw as `RoundTasks` says
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            before, state = _generator_state(device), python_state(model)
            with OwnDraws(generator) if own else nullcontext():
                output = model(batch.inputs)
            draws = not torch.equal(before, _generator_state(device))
            changed = changed_state(state, python_state(model))
    except Exception as error:
        raise _unfit("training", batch.inputs, error) from error
    _check_output(output, batch.targets, num_classes, exact)
    if wrong := misfit(loss, output, batch.targets):
        raise UserError(wrong)
    _check_labels(loss, output, batch, feed, "training")
    _check_loss(output, batch.targets, precision, loss)
    if label_smoothing and (output.ndim != 2 or batch.targets.ndim != 1):
        raise UserError(
            f"label_smoothing={label_smoothing} is for outputs [batch, classes] with a class for each sample, got "
            f"{list(output.shape)} and targets {list(batch.targets.shape)}; set label_smoothing=0, and smooth inside a "
            "loss of your own."
        )
    _check_backward(model, output, generator)
    moved = [name for name, buffer in model.named_buffers() if buffers.get(name) != buffer.data_ptr()]
    if moved:
        raise UserError(
            f"the model replaces its buffer {moved[0]} in forward, and a learner's buffers live in one place; "
            "write into it instead, with copy_()."
        )
    kept = [_KEEPS_STATE.format(changed)] if changed else []
    return [*([_DRAWS_OUTSIDE] if draws else []), *kept, *remarks(loss, output, batch.targets)]


def _check_backward(model: nn.Module, output: Tensor, generator: torch.Generator) -> None:
    """Refuse a model that draws a learner's numbers in its backward pass: they are not those of its forward pass."""
    parameters, before = [own for own in model.parameters() if own.requires_grad], generator.get_state()
    with torch.random.fork_rng(), OwnDraws(generator) if generator.device.type == "cpu" else nullcontext():
        try:
            torch.autograd.grad(projection(output), parameters, allow_unused=True)
        except Exception:  # which `faithful_copy` tells of
            return
    if not torch.equal(before, generator.get_state()):
        raise UserError(
            "the model draws random numbers in what torch.utils.checkpoint computes again, where it would draw others; "
            "take dropout and the like out of what is checkpointed, or checkpoint nothing."
        )


@torch.no_grad()
def probe_evaluation(
    template: nn.Module,
    precision: Precision,
    batch: Batch,
    loss: Loss,
    what: str,
    metrics: Mapping[str, Metric] | None = None,
    feed: Feed | None = None,
) -> None:
    """Run one small batch of the `what` ("test", "validation") data; training data is known to fit. See `probe`.

    Raises UserError when it does not fit the model, or a metric cannot be measured on it.
    """
    try:
        output = _runnable(template, precision).eval()(batch.inputs).to(precision.master)
        wrong = misfit(loss, output, batch.targets)
        if wrong is None:
            _check_labels(loss, output, batch, feed, what)
            loss(output, batch.targets)
    except UserError:
        raise
    except Exception as error:
        raise _unfit(what, batch.inputs, error) from error
    if wrong is not None:
        raise UserError(f"of the {what} data, {wrong}")
    for name, metric in (metrics or {}).items():
        if wrong := misfit(metric, output, batch.targets):
            raise UserError(f"metrics[{name!r}]: {wrong}")
        try:
            float(metric(output, batch.targets))
        except Exception as error:
            raise UserError(
                f"metrics[{name!r}] cannot take the model's output {list(output.shape)} with targets "
                f"{list(batch.targets.shape)} ({one_line(error)}); it must return one number, the mean over a batch of "
                "any size."
            ) from error


def _runnable(template: nn.Module, precision: Precision) -> nn.Module:
    try:
        return cast_module(copy.deepcopy(template), precision)
    except Exception as error:
        raise UserError(
            f"the model cannot be copied ({one_line(error)}), and every learner needs a copy; initialise lazy modules "
            "in the function that makes it, and keep open files and locks out of it."
        ) from error


def _unfit(what: str, inputs: Tensor, error: Exception) -> UserError:
    return UserError(
        f"the model cannot take the {what} data, inputs of shape {list(inputs.shape[1:])} and dtype {inputs.dtype} "
        f"({one_line(error)}); choose a model, data and a batch size that fit each other, precision=fp32, or, where "
        "a view fails, channels_last=false."
    )


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


def _check_output(output: Any, targets: Tensor, num_classes: int | None, exact: bool) -> None:
    if not isinstance(output, Tensor):
        raise UserError(f"the model must return one tensor, got {type(output).__name__}; wrap it so that it does.")
    if output.is_complex():
        raise UserError("the model returns complex numbers, of which losses take the real part; return real ones.")
    if num_classes is None:
        return
    # One score a class for each target; of those that a sample has several of, as a pixel each, in the second place.
    width = output.shape[1] if output.ndim == max(2, targets.ndim + 1) else 0
    if width < num_classes or (exact and width > num_classes):
        raise UserError(
            f"the model's output has shape [batch, {', '.join(map(str, output.shape[1:]))}] and the data has "
            f"{num_classes} classes; its last layer must return "
            f"[{', '.join(map(str, ['batch', num_classes, *targets.shape[1:]]))}]."
        )


def _check_labels(loss: Loss, output: Tensor, batch: Batch, feed: Feed | None, what: str) -> None:
    classes = classes_of(loss, output, batch.targets)
    if classes is None:
        return
    if found := classes.first_outside(batch.targets):
        raise UserError(classes.refusal(f"sample {found[0]} of the {what} data", found[1]))
    if feed is not None:
        feed.check_labels(classes, what)


def _check_loss(output: Tensor, targets: Tensor, precision: Precision, loss: Loss) -> None:
    try:
        value: Any = loss(output.to(precision.master), targets)
    except Exception as error:
        raise UserError(
            f"the loss cannot take the model's output {list(output.shape)} with targets {list(targets.shape)} "
            f"({one_line(error)}); give a loss that fits them."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"the loss must return one number, a batch mean, as a tensor, got {shape}; average it.")
    if not value.requires_grad:
        raise UserError("the loss does not depend on the parameters; detach nothing on the way to it.")
