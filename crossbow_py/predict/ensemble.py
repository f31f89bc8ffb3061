"""Ensembles: trained models that answer together, by the mean of their probabilities.

Models of one architecture are the rows of one bank (HiveMind's serving case: K models, one shared input); an ensemble
of several architectures is several banks side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UserError
from crossbow_py.core.measured import fastest
from crossbow_py.core.trees import Tree, batch_key, call, form_of, leaves, map_tree
from crossbow_py.data.normalisation import digits_lost, rounding_note
from crossbow_py.engine.bank.frozen_base import frozen_values
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, check_executor
from crossbow_py.engine.executors.on_device import CaptureError
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.losses import scores_of
from crossbow_py.engine.modules.precision import PrecisionName, choose_device, choose_precision
from crossbow_py.models.lora import Scaling, in_one_form
from crossbow_py.predict.predictors import PREDICTORS, Predictor, PredictorName, candidates
from crossbow_py.train.checks.losses import are_probabilities
from crossbow_py.train.evaluation.evaluator import load_state

_EVERY_MODULES = frozenset(vars(nn.Module()))  # weights, children and hooks: none of a module's own settings
_ONLY_IN_TRAINING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


_MOST_CHOICES = 256
_PROBABILITIES = (
    "The models' outputs are probabilities already, and an ensemble takes the softmax of them again: leave the softmax "
    "out of the models, or return its logarithm."
)


class Ensemble:
    """K trained models that answer together. Not thread-safe; `close` it, or use it in a `with` statement.

    Args:
        models: classifiers, of the same input and the same classes; their weights are copied. `load_models` gives
            those that runs and searches have left behind. LoRA's adapters may differ in rank and scale.
        executor: how they run: `serial` one after another, `threads` on all cores of a CPU, `fused` as one graph of all
            (on CUDA a CUDA graph), `fused_threads` as a graph for each core of a CPU; on CUDA `streams` on a stream
            each. `auto` takes the fastest for a shape, measured at its first batch; on CUDA only of those that passed
            there in `python -m crossbow_py.check`. What is prepared for a shape is kept for the last eight of them; pad
            batches if you serve more.
        device: where they run.
        precision: in which format; `fp32` is what the models give alone, to rounding.
        channels_last: memory order of images and filters.

    Attributes:
        chosen: the executor of shapes and formats of batches seen so far, of the last 256.
        notes: sentences for the user.

    Raises:
        UserError: there is no model, or an executor that cannot run on the device.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        executor: PredictorName = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        precision: PrecisionName = "fp32",
        channels_last: bool = True,
    ) -> None:
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device)
        self.channels_last, self._executor = channels_last, executor
        self.chosen: dict[object, str] = {}
        self.notes: list[str] = []
        _check(models, executor, self.device)
        models = in_one_form(models)
        groups = same_architecture(models)
        self._banks = [self._bank([models[position] for position in group]) for group in groups]
        order = [position for group in groups for position in group]
        # Where the banks' rows go, so that members come in the order of the models.
        self._order = None if order == sorted(order) else torch.tensor(order, device=self.device).argsort()
        self._predictors: dict[str, Predictor] = {}
        self._writes_inputs = False

    def _bank(self, models: Sequence[nn.Module]) -> ReplicaBank:
        template = copy.deepcopy(models[0]).to(self.device)
        shares_base = len({frozen_values(model) for model in models}) == 1 and not _renorms(template)
        bank = ReplicaBank(
            template, len(models), device=self.device, precision=self.precision, state_names=(),
            channels_last=self.channels_last, order="blocks", training=False, shares_base=shares_base,
        )  # fmt: skip
        if shares_base:
            bank.base.lend(template)
        for row, model in enumerate(models):
            load_state(bank, row, dict([*model.named_parameters(), *model.named_buffers()]))
        return bank

    @property
    def num_models(self) -> int:
        """K."""
        return sum(bank.num_learners for bank in self._banks)

    @property
    def num_banks(self) -> int:
        """The number of architectures."""
        return len(self._banks)

    def predict(self, batch: Tree) -> Tensor:
        """The mean of the members' probabilities `[B, classes]`, float32, of inputs `[B, ...]` as the models take them.

        On CUDA it is enqueued on the current stream; the host does not wait, but at the first batch of a shape.

        Raises UserError for a batch that the models do not take, and for models that do not give scores of classes.
        """
        return self._probabilities(batch).mean(0)

    def members(self, batch: Tree) -> Tensor:
        """Return the probabilities of every model `[K, B, classes]`, in the order they were given; see `predict`."""
        found = self._probabilities(batch)
        return found if self._order is None else found[self._order]

    def _probabilities(self, batch: Tree) -> Tensor:
        """Return the probabilities `[K, B, classes]` in the banks' order."""
        inputs = self._prepared(batch)
        shape = batch_key(inputs)
        if shape not in self.chosen:
            self._try(inputs)
            if found := digits_lost(batch, torch.empty(0), self.precision.compute):
                self._note(rounding_note(found, self.precision.compute))
            self.chosen[shape] = self._settle(inputs)
            if len(self.chosen) > _MOST_CHOICES:
                del self.chosen[next(iter(self.chosen))]
        predictor = self._predictor(self.chosen[shape])
        probabilities = predictor.probabilities(inputs)
        for note in predictor.notes:
            self._note(note)
        return probabilities

    def _prepared(self, batch: Tree) -> Tree:
        odd = next((each for each in pytree.tree_leaves(batch) if not isinstance(each, Tensor)), None)
        if odd is not None or not leaves(batch):
            kind = type(batch if isinstance(batch, list) else odd).__name__
            how = "from_numpy" if isinstance(odd, np.ndarray) else "tensor"
            rule = "a batch must be a torch.Tensor, or a dict or tuple of them"
            raise UserError(f"{rule}, got {kind}; give torch.{how}(batch).")

        def prepared(values: Tensor) -> Tensor:
            inputs = values.to(self.device, self.precision.compute if values.is_floating_point() else values.dtype)
            last = self.channels_last and inputs.ndim == 4
            return inputs.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

        return map_tree(prepared, batch)

    def _predictor(self, name: str) -> Predictor:
        if name not in self._predictors:
            self._predictors[name] = PREDICTORS[name](name, self._banks, self._writes_inputs)
        return self._predictors[name]

    @torch.no_grad()
    def _try(self, inputs: Tree) -> None:
        """Run a model of each bank by itself: what does not work shows as that model's own error."""
        widths, size = [], len(leaves(inputs)[0])
        for bank in self._banks:
            tried = map_tree(torch.clone, inputs)
            try:
                output = scores_of(call(bank.module(0), tried))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                found = f"a batch of samples {form_of(inputs)} does not go through a model of the ensemble"
                reason = " ".join(str(error).split())[:160]
                raise UserError(f"{found} ({reason}); give inputs as in training.") from error
            if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != size:
                got = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
                rule = "models of an ensemble must give scores of classes [B, classes]"
                raise UserError(f"{rule}, got {got} for {size} inputs; choose classifiers.")
            if output.shape[1] == 1:
                raise UserError(
                    "models of an ensemble must give scores of at least two classes, got one output, of which the "
                    "softmax is always 1; take the mean of such models' outputs yourself."
                )
            if are_probabilities(output):
                self._note(_PROBABILITIES)
            widths.append(output.shape[1])
            self._writes_inputs |= any(own._version > 0 for own in leaves(tried))
        if len(set(widths)) > 1:
            rule = "models of an ensemble must tell apart the same classes"
            raise UserError(f"{rule}, got models of {sorted(set(widths))} classes; choose models of the same data.")

    def _settle(self, inputs: Tree) -> str:
        if self._executor != "auto":
            refusal = self._not_fused(self._executor, inputs) if EXECUTORS[self._executor].FUSES else None
            if refusal is not None:
                raise UserError(f"executor={self._executor} cannot run these models: {refusal}; set executor=auto.")
            return self._executor
        names = candidates(self.device)
        refusal = self._not_fused("fused", inputs)
        if refusal is not None:
            left_out = [name for name in names if EXECUTORS[name].FUSES]
            names = [name for name in names if name not in left_out]
            self._note(f"The models run without executor={' and '.join(left_out)}: {refusal}.")

        def answer(name: str) -> None:
            self._predictor(name).probabilities(inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # host–device synchronisation

        return fastest({name: partial(answer, name) for name in names})

    def _note(self, note: str) -> None:
        self.notes += [note] if note not in self.notes else []

    def _not_fused(self, name: str, inputs: Tree) -> str | None:
        """Return why an executor that fuses cannot run the models; None if it can.

        Raises CaptureError, which says what to do, where a CUDA graph cannot hold them and the executor was asked for.
        """
        try:
            self._predictor(name).probabilities(inputs)
        except FusionError as error:
            return str(error)
        except CaptureError as error:
            if self._executor != "auto":
                raise
            return f"a CUDA graph cannot hold them ({error.reason})"
        return None

    def close(self) -> None:
        """End all threads; the ensemble may be used again."""
        for predictor in self._predictors.values():
            predictor.close()
        self._predictors.clear()

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _renorms(model: nn.Module) -> bool:
    """Return whether a pass of the model in evaluation mode writes its weights, as embeddings of a largest norm do."""
    return any(getattr(layer, "max_norm", None) is not None for layer in model.modules())


def _check(models: object, executor: str, device: torch.device) -> None:
    if not isinstance(models, Sequence | nn.ModuleList):
        kind = type(models).__name__
        raise UserError(
            f"models of an ensemble must be a list of nn.Modules, got {kind}; give [model], or list(models)."
        )
    if not models:
        raise UserError("an ensemble must have at least one model, got none; give it some.")
    for model in models:
        if not isinstance(model, nn.Module):
            named = models if isinstance(models, str) else model
            how = f"crossbow_py.load_models({str(named)!r})" if isinstance(named, str | Path) else "a list of them"
            raise UserError(f"models of an ensemble must be nn.Modules, got {type(named).__name__}; give {how}.")
    if executor != "auto" and executor not in PREDICTORS:
        raise UserError(f"executor must be auto, {', '.join(PREDICTORS)}, got {executor!r}; set executor=auto.")
    if executor != "auto":
        check_executor(executor, device)


def same_architecture(models: Sequence[nn.Module]) -> list[list[int]]:
    """Return the positions of models that compute the same function of their own weights, group by group.

    Models that keep settings in objects which cannot be compared are in groups of their own.
    """
    groups: list[list[int]] = []
    for position, model in enumerate(models):
        group = next((group for group in groups if _alike(models[group[0]], model)), None)
        if group is None:
            groups.append([position])
        else:
            group.append(position)
    return groups


def _alike(model: nn.Module, other: nn.Module) -> bool:
    own, others = (dict(each.named_modules(remove_duplicate=False)) for each in (model, other))
    same_names = list(own) == list(others)
    return same_names and _tensors(model) == _tensors(other) and all(map(_alike_alone, own.values(), others.values()))


def _tensors(model: nn.Module) -> list[Any]:
    """Return name, shape, format and identity of every parameter and buffer: tied ones have several names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, int] = {}
    return [(name, tuple(value.shape), value.dtype, first.setdefault(id(value), len(first))) for name, value in named]


def _alike_alone(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules are of one class with the same settings, whatever their children are."""
    if type(module) is not type(other) or _has_hooks(module) or _has_hooks(other):
        return False
    if isinstance(module, _ONLY_IN_TRAINING):
        return True
    own, others = ({key: vars(each)[key] for key in vars(each).keys() - _EVERY_MODULES} for each in (module, other))
    return _equal(own, others)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks: a bank's modules would all call those of its first model."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _equal(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    if isinstance(value, Scaling):  # what it gives is in a buffer, of which each row has its own
        return bool(value.keys() == other.keys())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    try:
        return any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1]) and bool(value == other)
    except Exception:  # such as of arrays, which have many answers
        return False
