"""Runs small batches through the model before anything is trained, and refuses what cannot work in one sentence."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UnknownIdError, UserError, one_line
from crossbow_py.core.host_randomness import host_state, kept_generators, kept_torch_state
from crossbow_py.core.settings import suggestion
from crossbow_py.core.trees import Tree, call, detached, form_of, in_format, leaves, map_tree, shape_of
from crossbow_py.data.datasets import has_integers
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.engine.bank.binding import WRITES_A_COPY, WRITES_FROZEN, bindings_of, find_rebound
from crossbow_py.engine.bank.frozen_base import frozen_parameters, note_only_read
from crossbow_py.engine.modules.call_watch import CallWatch
from crossbow_py.engine.modules.dropout import OwnDraws, replace_dropout
from crossbow_py.engine.modules.losses import (
    Loss,
    TokenLoss,
    compared,
    has_tokens,
    ignored_target,
    model_loss,
    part_for,
    plain_loss,
    scores_of,
)
from crossbow_py.engine.modules.precision import Precision, cast_module, full_precision_parameters
from crossbow_py.engine.trust.compare import outputs_by_name, projection
from crossbow_py.engine.trust.side_effects import changed_state, fingerprint, kept_between_passes, python_state
from crossbow_py.train.checks.fatal_modules import refusing_fatal_modules
from crossbow_py.train.checks.losses import classes_of, copied_loss, hidden_parameter, misfit, remarks, remarks_on_parts
from crossbow_py.train.evaluation.metrics import Metric, has_states, try_metric

_KEEPS_STATE = (
    "The model's forward changes its attribute {}. Every learner has its own, and evaluations, saved models and "
    "resumed runs start with the initial value: keep what they need in a buffer."
)
_DOES_NOT_REPEAT = (
    "A second pass of the model over the same batch gives another output: its forward keeps state between passes, "
    "without which evaluations, saved models and resumed runs start. Keep what they need in a buffer."
)
_WRITES_PARAMETER = (
    "The model's forward writes its parameter {}: every learner writes its own, and the average model, which is "
    "evaluated and saved, follows only by averaging."
)
_LOSES_DIGITS = (
    "The model's buffer {} is float64, but float32 in learners and saved models: whole numbers are exact up to 2**24."
)
_DRAWS_ON_HOST = (
    "The model draws random numbers from Python's or NumPy's generator: runs will not repeat or resume bit for bit."
)
_DRAWS_OUTSIDE = (
    "The model draws random numbers outside nn.Dropout modules, from torch's own generator: "
    "runs will not repeat or resume bit for bit."
)
_MOST_SAMPLES = 64  # that a loss is tried on in micro-batches


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
    averages: bool = False,
    accumulate: int = 1,
) -> list[str]:
    """Run one small training batch through a copy of the model. Returns warnings.

    Args:
        num_classes: the width that the output must have; None if unknown.
        exact: whether to refuse more outputs than classes, too.
        label_smoothing: above 0, the loss is cross-entropy with one class per sample.
        compile_model: whether the model will be compiled.
        feed: the feed of the batch; its other targets must be classes of the output, too.
        averages: whether learners may follow an average model.
        accumulate: the number of micro-batches of a learner's step.

    Raises:
        UserError: the model, its output or the loss does not fit the data.
    """
    model = _runnable(template, precision).train()
    generator = torch.Generator(batch.targets.device)
    replace_dropout(model, generator)
    own = batch.targets.device.type == "cpu" and not compile_model  # as in `RoundTasks`
    _check_arguments(model, batch.inputs, "training")
    passes = _TwoPasses(model, batch.inputs, generator, own)
    with refusing_fatal_modules(model), _explained("training", model, template, precision, batch, loss):
        output, targets = compared(loss, passes.first(), batch.targets)
    batch, loss = batch._replace(targets=targets), plain_loss(loss)
    _check_output(output, targets, num_classes, exact, loss)
    if wrong := misfit(loss, output, batch.targets):
        raise UserError(wrong)
    _check_labels(loss, output, batch, feed, "training")
    of_loss = _check_loss(output, batch.targets, precision, loss)
    if label_smoothing and (not isinstance(output, Tensor) or output.ndim != 2 or batch.targets.ndim != 1):
        raise UserError(
            f"label_smoothing={label_smoothing} is for outputs [batch, classes] with a class for each sample, got "
            f"{shape_of(output)} and targets {list(batch.targets.shape)}; set label_smoothing=0, and smooth inside a "
            "loss of your own."
        )
    _check_backward(model, output, generator)
    digits = torch.finfo(precision.master).eps
    floats = {name: own.dtype for name, own in template.named_buffers() if own.is_floating_point()}
    wide = [_LOSES_DIGITS.format(name) for name, dtype in floats.items() if torch.finfo(dtype).eps < digits]
    if accumulate > 1 and feed is not None:
        step = feed.first_samples(min(feed.batch_size, _MOST_SAMPLES)).targets
        of_loss += remarks_on_parts(loss, in_format(output, precision.master), step, min(accumulate, len(step)))
    return [
        *passes.check(template, precision, averages), *wide[:1], *of_loss, *remarks(loss, output, batch.targets)
    ]  # fmt: skip


class _TwoPasses:
    """Two passes of a model over one batch, to find side effects.

    Both begin with the same states of all generators, except those that the model has itself.
    """

    def __init__(self, model: nn.Module, inputs: Tree, generator: torch.Generator, own: bool) -> None:
        self._model, self._inputs, self._generator, self._own = model, inputs, generator, own
        self._bound, self._seed = bindings_of(model), generator.get_state()
        self._buffers = {name: own.clone() for name, own in model.named_buffers()}
        self._watch = CallWatch()
        self._draws_torch = self._draws_host = False

    def first(self) -> Tree:
        """Return the outputs of a first pass."""
        device = self._generator.device
        torchs, host = _generator_state(device), host_state()
        with kept_generators(device), self._draws(), self._watch:
            output = call(self._model, self._inputs)
            self._draws_torch = not torch.equal(torchs, _generator_state(device))
            self._draws_host = host != host_state()
        self._has_drawn = not torch.equal(self._seed, self._generator.get_state())
        self._output = map_tree(lambda own: own.detach().clone(), output)  # a loss may write it
        return output

    def _draws(self) -> AbstractContextManager[OwnDraws | None]:
        return OwnDraws(self._generator) if self._own else nullcontext()

    def check(self, template: nn.Module, precision: Precision, averages: bool) -> list[str]:
        """Return warnings about the first pass and a second one. Raises UserError for what a learner cannot do.

        `template` has the weights as they were before the first pass.
        """
        if self._watch.reseeds and self._has_drawn:
            raise UserError(
                f"the model's forward sets torch's generator at {self._watch.reseeds[0]} and draws from it, but "
                "learners draw from generators of their own; draw from a generator that forward makes: "
                "torch.rand(..., generator=torch.Generator().manual_seed(7))."
            )
        for name, buffer in self._model.named_buffers():
            if name in self._buffers and self._buffers[name].shape != buffer.shape:
                raise UserError(
                    f"the model's buffer {name} has another shape after a first pass; run the model once where it is "
                    "made, before it is returned: model(torch.zeros(2, ...))."
                )
        if found := find_rebound(self._model, self._bound):
            raise UserError(found)
        before = dict(template.named_parameters())
        notes = self._written(before, full_precision_parameters(template) if precision.has_shadow else before, averages)
        if self._draws_torch or self._draws_host:
            notes.append(_DRAWS_OUTSIDE if self._draws_torch else _DRAWS_ON_HOST)
        try:
            kept = kept_between_passes(
                self._model, outputs_by_name(self._output), lambda: self._second(before), self._draws_torch
            )
        except Exception:  # such as buffers that cannot be written, which other checks report
            return notes
        if kept is not None:
            notes.append(_KEEPS_STATE.format(kept) if isinstance(kept, str) else _DOES_NOT_REPEAT)
        return notes

    def _written(self, before: Mapping[str, Tensor], full: Container[str], averages: bool) -> list[str]:
        """Return notes about parameters that the first pass has written, where learners may write them."""
        notes = []
        for name, parameter in self._model.named_parameters():
            if not torch.equal(before[name].to(parameter.dtype).nan_to_num(), parameter.detach().nan_to_num()):
                if name not in full:
                    raise UserError(WRITES_A_COPY.format(name))
                if averages and not parameter.requires_grad:
                    raise UserError(WRITES_FROZEN.format(name))
                notes += [_WRITES_PARAMETER.format(name)] if averages else []
        return notes

    def _second(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of a second pass that begins as the first one did."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
        self._generator.set_state(self._seed)
        with kept_generators(self._generator.device), self._draws():
            return outputs_by_name(detached(call(self._model, self._inputs)))


def find_only_read(template: nn.Module, precision: Precision, batch: Batch) -> None:
    """Note of a model whose passes leave its frozen parameters as they are that they do; see `note_only_read`."""
    if not frozen_parameters(template):
        return
    model = _runnable(template, precision)
    frozen = frozen_parameters(model).values()
    before = [own._version for own in frozen]
    with torch.no_grad(), kept_generators(batch.targets.device):
        for training in (True, False):
            try:
                call(model.train(training), batch.inputs)
            except Exception:  # which other checks explain
                return
    if [own._version for own in frozen] == before:
        note_only_read(template)


def _check_backward(model: nn.Module, output: Tree, generator: torch.Generator) -> None:
    """Refuse a model that draws random numbers in its backward pass: they would differ from the forward pass's."""
    parameters, before = [own for own in model.parameters() if own.requires_grad], generator.get_state()
    with kept_torch_state(generator.device), OwnDraws(generator) if generator.device.type == "cpu" else nullcontext():
        try:
            torch.autograd.grad(projection(output), parameters, allow_unused=True)
        except Exception:  # which `faithful_copy` reports
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
    class_names: Sequence[str] = (),
    num_ranks: int = 1,
) -> None:
    """Run one small batch of the `what` ("test", "validation" or "new") data through a copy of the model.

    Raises UserError if it does not fit the model, or a metric cannot be computed on it, or not by several ranks.
    """
    model = _runnable(template, precision).eval()
    _check_arguments(model, batch.inputs, what)
    with _explained(what, model, template, precision, batch, loss):
        output = call(model, batch.inputs)
        output, targets = compared(loss, in_format(output, precision.master), batch.targets)
        batch, loss = batch._replace(targets=targets), plain_loss(loss)
        wrong = misfit(loss, output, batch.targets)
        if wrong is None:
            _check_labels(loss, output, batch, feed, what)
            loss(output, batch.targets)
    if wrong is not None:
        raise UserError(f"of the {what} data, {wrong}")
    ignored = None if batch.targets.is_floating_point() else ignored_target(loss)
    for name, metric in (metrics or {}).items():
        if has_states(metric):
            try_metric(name, metric, output, batch.targets, ignored, class_names, num_ranks)
            continue
        if wrong := misfit(metric, output, batch.targets):
            raise UserError(f"metrics[{name!r}]: {wrong}")
        try:
            float(metric(output, batch.targets))
        except Exception as error:
            raise UserError(
                f"metrics[{name!r}] cannot take the model's output {shape_of(output)} with targets "
                f"{list(batch.targets.shape)} ({one_line(error)}); {_as_dict(output)}it must return one number, the "
                "mean over a batch of any size."
            ) from error


@torch.no_grad()
def probe_inputs(template: nn.Module, precision: Precision, batch: Batch, what: str) -> None:
    """Run the inputs of one small batch of the `what` data through a copy of the model.

    Raises UserError if they do not fit the model.
    """
    model = _runnable(template, precision).eval()
    _check_arguments(model, batch.inputs, what)
    with _explained(what, model, template, precision, batch, None):
        call(model, batch.inputs)


def _runnable(template: nn.Module, precision: Precision) -> nn.Module:
    try:
        return cast_module(copy.deepcopy(template), precision)
    except Exception as error:
        raise UserError(
            f"the model cannot be copied ({one_line(error)}), and every learner needs a copy; initialise lazy modules "
            "in the function that makes it, keep open files and locks out of it, and take "
            "torch.nn.utils.parametrizations in place of the old weight_norm and of prune."
        ) from error


@contextmanager
def _explained(
    what: str, model: nn.Module, template: nn.Module, precision: Precision, batch: Batch, loss: Loss | None
) -> Iterator[None]:
    """Have the block, in which a model takes a batch of the `what` data, raise UserError for every exception."""
    try:
        yield
    except UnknownIdError as error:
        raise UnknownIdError(f"of the {what} data, {error}") from error
    except UserError:
        raise
    except Exception as error:
        wrong = _wrong_labels(what, model, batch) if loss is model_loss else None
        casts = not precision.has_shadow and any(own.dtype == torch.bfloat16 for own in template.parameters())
        raise UserError(wrong or _misfit_of_inputs(what, model, precision, batch.inputs, error, casts)) from error


def _wrong_labels(what: str, model: nn.Module, batch: Batch) -> str | None:
    """Return what is wrong with the labels from which a model has failed to compute its loss; None if unknown."""
    targets = batch.targets
    try:
        with kept_generators(targets.device):
            output = call(model, {key: own for key, own in batch.inputs.items() if key != "labels"})
        classes = classes_of(model_loss, output, targets.long())
    except Exception:  # not for the labels
        return None
    if classes is None:
        return None
    if targets.dtype != torch.int64:
        numbers = ", or, for numbers, a model with one output a sample" if targets.is_floating_point() else ""
        kind = str(targets.dtype).removeprefix("torch.")
        return (
            f"the labels of the {what} data are {kind}, and the model, which computes its loss itself, tells "
            f"{classes.num_classes} classes apart, which are int64; give labels.long(){numbers}."
        )
    found = classes.first_outside(targets)
    return classes.refusal(f"sample {found[0]} of the {what} data", found[1]) if found else None


def _misfit_of_inputs(
    what: str, model: nn.Module, precision: Precision, inputs: Tree, error: Exception, casts: bool
) -> str:
    """Return the message about a model that fails on its inputs; `casts` says that fp32 has cast bfloat16 weights."""
    given = form_of(inputs)
    if isinstance(inputs, Tensor):
        given = f"of shape {list(inputs.shape[1:])} and dtype {inputs.dtype}"
    message = f"the model cannot take the {what} data, inputs {given} ({one_line(error)})"
    named = [name for name, own in _arguments(model).items() if own.kind is not own.VAR_KEYWORD]
    unnamed = [key for key in inputs if key not in named] if isinstance(inputs, Mapping) else []
    if unnamed and named:  # by **kwargs
        return f"{message}; its forward names no argument {unnamed[0]}{suggestion(unnamed[0], named)}"
    message += "; choose a model, data and a batch size that fit each other"
    if precision.has_shadow:
        message += ", or precision=fp32"
    elif casts:
        message += ", or precision=bf16, in which bfloat16 weights stay as they are"
    if any(own.ndim == 4 for own in leaves(inputs)):
        message += ", or, where a view fails, channels_last=false"
    return f"{message}."


@torch.no_grad()
def settled_on_tokens(loss: Loss, template: nn.Module, precision: Precision, batch: Batch) -> Loss:
    """Return a `TokenLoss` if the model gives scores [B, T, V] of tokens; the loss itself if not, or if it is unknown.

    Where V = T, the model is asked for scores of fewer tokens.
    """
    if batch.targets.ndim != 2 or not has_integers(batch.targets):
        return loss
    model, num_tokens = _runnable(template, precision).eval(), batch.targets.shape[1]

    def cut(values: Tensor) -> Tensor:
        return values[:, :-1] if values.ndim > 1 and values.shape[1] == num_tokens else values

    try:
        with kept_generators(batch.targets.device):
            if has_tokens(loss, call(model, batch.inputs), batch.targets):
                return TokenLoss(loss)
            output = part_for(loss)(call(model, map_tree(cut, batch.inputs)))
    except Exception:  # which the probe reports, or it takes no fewer
        return loss
    asked = TokenLoss(loss)
    return asked if num_tokens > 1 and has_tokens(asked, output, cut(batch.targets)) else loss


def takes_labels(model: nn.Module) -> bool:
    """Return whether forward has an argument `labels`, from which it computes a loss, as models of transformers do."""
    return "labels" in _arguments(model)


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # of compiled code
        return {}


def _check_arguments(model: nn.Module, inputs: Tree, what: str) -> None:
    """Raise UserError for several inputs that are not what forward takes."""
    arguments = _arguments(model)
    if isinstance(inputs, Tensor) or not arguments:
        return
    try:
        named = isinstance(inputs, Mapping)
        call(inspect.Signature(list(arguments.values())).bind, inputs)
    except TypeError as error:
        given = ", ".join(map(str, inputs)) if named else f"{len(inputs)} inputs"
        raise UserError(
            f"the model's forward takes ({', '.join(arguments)}), and a sample of the {what} data has {given} "
            f"({error}); rename or leave out entries of the samples, or give the argument a default."
        ) from error


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


def _check_output(output: Tree, targets: Tensor, num_classes: int | None, exact: bool, loss: Loss) -> None:
    if not leaves(output):
        remedy = "let forward return its output" if output is None else "return tensors"
        raise UserError(f"the model must return a tensor, got {type(output).__name__}; {remedy}.")
    if not isinstance(output, Tensor):
        if part_for(loss) is scores_of:
            raise UserError(
                f"the model returns {form_of(output)}, of which the loss takes one tensor; call it logits, return it "
                "alone, or give a loss of your own that takes them all."
            )
        return
    if output.is_complex():
        raise UserError("the model returns complex numbers, of which losses take the real part; return real ones.")
    if num_classes is None:
        return
    # One score per class for each target. With several targets per sample, as one per pixel, classes are dimension 1.
    width = output.shape[1] if output.ndim == max(2, targets.ndim + 1) else 0
    if width < num_classes or (exact and width > num_classes):
        raise UserError(
            f"the model's output has shape [batch, {', '.join(map(str, output.shape[1:]))}] and the data has "
            f"{num_classes} classes, 0 to {num_classes - 1}; its last layer must return "
            f"[{', '.join(map(str, ['batch', num_classes, *targets.shape[1:]]))}]."
        )


def _check_labels(loss: Loss, output: Tree, batch: Batch, feed: Feed | None, what: str) -> None:
    classes = classes_of(loss, output, batch.targets)
    if classes is None:
        return
    if found := classes.first_outside(batch.targets):
        raise UserError(classes.refusal(f"sample {found[0]} of the {what} data", found[1]))
    if feed is not None:
        feed.check_labels(classes, what)


def _check_loss(output: Tree, targets: Tensor, precision: Precision, loss: Loss) -> list[str]:
    """Return warnings about side effects of the loss. Raises UserError if it does not train the whole model."""
    leaf, tried = map_tree(_as_leaf, in_format(output, precision.master)), copied_loss(loss)
    device = leaves(output)[0].device
    torchs, host, state = _generator_state(device), host_state(), _state_of(tried)
    try:
        with kept_generators(device):
            value: Any = tried(map_tree(torch.clone, leaf), targets.clone())  # clones, as it may write to them
            draws = not torch.equal(torchs, _generator_state(device)) or host != host_state()
    except Exception as error:
        raise UserError(
            f"the loss cannot take the model's output {shape_of(output)} with targets {list(targets.shape)} "
            f"({one_line(error)}); {_as_dict(output)}give a loss that fits them."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"the loss must return one number, a batch mean, as a tensor, got {shape}; average it.")
    if not value.requires_grad or not any(own.requires_grad for own in leaves(output)):
        raise UserError("the loss does not depend on the parameters; detach nothing on the way to it.")
    if (hidden := hidden_parameter(value, leaves(leaf))) is not None:
        raise UserError(
            f"the loss depends on a parameter of shape {list(hidden.shape)} that it holds itself, which no learner "
            "trains; put what is to be trained into the model, and a penalty on its weights into "
            "optimizer.weight_decay."
        )
    notes = ["The loss draws random numbers: runs will not repeat or resume bit for bit."] if draws else []
    if (changed := changed_state(state, _state_of(tried))) is not None:
        notes.append(f"The loss changes its {changed}, which all learners share and which resumed runs start without.")
    return notes


def _as_dict(output: Tree) -> str:
    """Return the part of a remedy that says how to take the scores of an output that is a plain dict."""
    if type(output) is not dict:
        return ""
    return f"the output is a dict, so take outputs[{'logits' if 'logits' in output else next(iter(output), '')!r}]; "


def _as_leaf(own: Tensor) -> Tensor:
    return own.detach().requires_grad_(own.is_floating_point())


def _state_of(loss: Any) -> dict[str, str]:
    """Return the state of a loss as text; a bound method has that of its object."""
    owner = getattr(loss, "__self__", loss)
    kept = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    tensors = {key: own for key, own in kept.items() if isinstance(own, Tensor)}
    others = python_state(owner) if isinstance(owner, nn.Module) else {k: fingerprint(own) for k, own in kept.items()}
    return {**others, **{key: str(own.detach().tolist()) for key, own in tensors.items()}}
