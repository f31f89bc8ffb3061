"""Metrics: functions of a batch, and metrics with states, as torchmetrics has them, of a whole evaluation.

A metric with states has `reset()`, `update(outputs, targets)` for every batch, and `compute()`. So it may be what is no
mean over batches: macro F1, the area under a curve, the intersection over union. The user's object is never written;
every evaluation of a model has a copy of its own.

With several ranks each rank updates a copy with its share of the batches, and the states of all are put together by the
reductions that the metric declares, in `_reductions`: names of states, and `dim_zero_sum` and its like of torchmetrics.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import CrossbowError, UserError, one_line
from crossbow_py.core.settings import shown
from crossbow_py.core.targets import import_target
from crossbow_py.core.trees import Tree, map_tree, shape_of
from crossbow_py.data.datasets import counted
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.modules.losses import is_classification, scores_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in typing from Python 3.13 on

TAKEN = ("loss", "accuracy", "perplexity")  # names of what every evaluation measures where it can

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dim_zero_sum": lambda every: every.sum(0),
    "dim_zero_max": lambda every: every.amax(0),
    "dim_zero_min": lambda every: every.amin(0),
    "dim_zero_mean": lambda every: every[0],  # only of a state that never changes, see `check_mergeable`
}
_JOINS = (None, "dim_zero_cat")  # of states that are lists, which are put one behind the other
_ON_ONE = "compute it from result.model after the run, or train on one device"


class StatefulMetric(Protocol):
    """The interface of a metric of torchmetrics, as far as it is used."""

    def update(self, preds: Any, target: Any) -> None:
        """Add a batch."""

    def compute(self) -> Any:
        """Return the value over all batches: a number, a vector, or a mapping of such."""

    def reset(self) -> None:
        """Forget all batches."""


Metric = Callable[[Any, Tensor], Tensor | float] | StatefulMetric


def has_states(metric: object) -> TypeIs[StatefulMetric]:
    """Return whether a metric has states, and is no function of one batch."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def checked_metrics(metrics: Mapping[str, Metric] | None, num_ranks: int) -> dict[str, Metric]:
    """Return the metrics by name, with the members of a collection (`MetricCollection`) one by one.

    Raises UserError for what is no metric, for a name that is taken, and for a metric whose states cannot be put
    together if there are several ranks.
    """
    if not isinstance(metrics, Mapping | None):
        raise UserError(f"metrics must be a mapping of names and metrics, got {shown(metrics)}; give {{name: metric}}.")
    found: dict[str, Metric] = {}
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not name or name in TAKEN:
            raise UserError(
                f"metrics must have names of their own, other than {', '.join(TAKEN)}, got {name!r}; call it something "
                "else."
            )
        if isinstance(metric, type):
            raise UserError(
                f"metrics[{name!r}] must be an object, got the class {metric.__name__}; give {metric.__name__}(...)."
            )
        if has_states(metric):
            found |= {f"{name}/{member}": own for member, own in _members(metric)} or {name: metric}
        elif callable(metric):
            found[name] = metric
        else:
            raise UserError(
                f"metrics[{name!r}] must be a function of (outputs, targets), or have update, compute and reset as the "
                f"metrics of torchmetrics have, got {shown(metric)}; give such a one."
            )
    for name, metric in found.items() if num_ranks > 1 else ():
        if has_states(metric):
            _check_states(name, metric)
    return found


def _members(metric: object) -> Iterable[tuple[str, Any]]:
    return metric.items() if isinstance(metric, nn.ModuleDict) else ()


def metrics_of(targets: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics that the command line names by their targets, with the keys beside each as its arguments.

    A class is called with them. A function is a metric itself, and takes them beside outputs and targets.

    Raises UserError.
    """
    found: dict[str, Metric] = {}
    for name, entry in targets.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("target"), str):
            raise UserError(
                f"metrics.{name} must have a target, the dotted name of a metric, got {shown(entry)}; set "
                f"metrics.{name}.target=package.module.name."
            )
        given = {key: value for key, value in entry.items() if key != "target"}
        found[name] = _metric_of(f"metrics.{name}", entry["target"], given)
    return found


def _metric_of(key: str, path: str, given: dict[str, Any]) -> Metric:
    target = import_target(f"{key}.target", path)
    try:
        if not isinstance(target, type):
            return _with_arguments(target, given)
        metric: Metric = target(**given)
    except Exception as error:
        words = ", ".join(f"{key}.{name}" for name in given) or "no arguments"
        raise UserError(
            f"{key}.target={path} cannot be made with {words} ({one_line(error)}); correct the keys beside "
            f"{key}.target, or name a metric: a function of (outputs, targets), or a class such as "
            "torchmetrics.classification.MulticlassF1Score."
        ) from error
    if not has_states(metric) and not callable(metric):
        raise UserError(
            f"{key}.target={path} must be a metric, got {type(metric).__name__}; name a function of (outputs, "
            "targets), or a class such as torchmetrics.classification.MulticlassF1Score."
        )
    return metric


def _with_arguments(metric: Callable[..., Any], given: dict[str, Any]) -> Metric:
    """Return a function with arguments beside outputs and targets, or a metric as it is. Raises TypeError."""
    if not given:
        return metric
    if has_states(metric):
        raise TypeError("it is an object already, which takes none")
    inspect.signature(metric).bind(None, None, **given)
    return partial(metric, **given)


def _fresh_copy(metric: StatefulMetric, device: torch.device) -> Any:
    """Return a copy without any batch, on the device, that leaves other ranks alone."""
    own: Any = copy.deepcopy(metric)
    own.reset()
    for each in own.modules() if isinstance(own, nn.Module) else (own,):
        if hasattr(each, "sync_on_compute"):  # torchmetrics would sum over the ranks of the process group by itself
            each.sync_on_compute = each._to_sync = False
    return own.to(device) if isinstance(own, nn.Module) else own


class RunningMetrics:
    """Copies of the metrics with states, of one model in one evaluation.

    Args:
        metrics: metrics by name; those without states are left out.
        device: the device of outputs and targets.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        own = {name: metric for name, metric in metrics.items() if has_states(metric)}
        self._device, self._copies = device, {name: _fresh_copy(metric, device) for name, metric in own.items()}

    def update(self, outputs: Tree, targets: Tensor, ignored: int | None) -> None:
        """Add a batch of what the loss compares. Samples or tokens of the class `ignored` are left out.

        Raises UserError if a metric fails.
        """
        if not self._copies:
            return
        outputs = scores_of(outputs)
        if ignored is not None and is_classification(outputs, targets):
            kept = counted(targets, ignored)
            outputs, targets = outputs[kept], targets[kept]  # host–device synchronisation on CUDA
            if not len(targets):
                return
        for name, metric in self._copies.items():
            # Clones, as a metric may keep what it is given, and a loss may write to it.
            own = map_tree(torch.clone, outputs), targets.clone()
            _asked(name, partial(metric.update, *own), f"output {shape_of(outputs)} with targets {list(targets.shape)}")

    def merge(self, ranks: Ranks) -> None:
        """Put the states of all ranks together. All ranks together."""
        for metric in self._copies.values() if ranks.num_ranks > 1 else ():
            _merge(metric, ranks, self._device)

    def values(self, class_names: Sequence[str] = ()) -> dict[str, float]:
        """Return the values over all batches, see `named_values`. Raises UserError if a metric fails."""
        found: dict[str, float] = {}
        for name, metric in self._copies.items():
            values = named_values(name, _asked(name, metric.compute, "outputs, all together"), class_names)
            if both := found.keys() & values.keys():
                raise UserError(f"metrics has two values of the name {min(both)!r}; give one of them another name.")
            found |= values
        return found


def try_metric(
    name: str,
    metric: StatefulMetric,
    outputs: Tree,
    targets: Tensor,
    ignored: int | None,
    class_names: Sequence[str] = (),
    num_ranks: int = 1,
) -> None:
    """Try a metric on a small batch. Raises UserError if it fails, or if several ranks could not share its work."""
    running = RunningMetrics({name: metric}, targets.device)
    own = running._copies[name]
    before = _numbers(own)
    with warnings.catch_warnings():  # that so few samples have no positive one, say
        warnings.simplefilter("ignore")
        running.update(outputs, targets, ignored)
        if ignored is None or counted(targets, ignored).any():
            running.values(class_names)
    changed = [state for state, value in _numbers(own).items() if state in before and not _equal(value, before[state])]
    reductions = getattr(own, "_reductions", {})
    for state in changed if num_ranks > 1 else ():
        if state not in reductions or _name(reductions[state]) == "dim_zero_mean":
            raise UserError(
                f"metrics[{name!r}] changes its {state}, which cannot be put together over {num_ranks} ranks, as it is "
                "no sum, extreme or list of a state; declare it with "
                f"add_state({state!r}, ..., dist_reduce_fx='sum'), or {_ON_ONE}."
            )


def named_values(name: str, value: Any, class_names: Sequence[str] = ()) -> dict[str, float]:
    """Return a metric's values by name: `name` for a number, `name/key` for what is in a mapping, `name/0` in a vector.

    A vector that has a value for each class has their names, if those differ. Raises UserError for anything else.
    """
    if isinstance(value, Mapping):
        nested = (named_values(f"{name}/{key}", own, class_names) for key, own in value.items())
        return {key: own for each in nested for key, own in each.items()}
    if not isinstance(value, Sequence):
        try:
            value = torch.as_tensor(value).detach().double()
        except (TypeError, ValueError, RuntimeError):
            value = type(value).__name__
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: float(value)}  # host–device synchronisation on CUDA
    if isinstance(value, Tensor) and value.ndim == 1:
        are_names = len(class_names) == len(value) == len(set(class_names))
        labels = class_names if are_names else range(len(value))
        return {f"{name}/{label}": own for label, own in zip(labels, value.tolist(), strict=True)}
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
    raise UserError(
        f"metrics[{name!r}] must compute a number, a vector of them or a mapping, got {given}; give one that does, "
        "such as one with average='macro', and compute curves and matrices from result.model."
    )


def _asked(name: str, call: Callable[[], Any], what: str) -> Any:
    """Return what a metric returns. Raises UserError if it fails, except for want of memory."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, CrossbowError) or is_out_of_memory(error):
            raise
        raise UserError(
            f"metrics[{name!r}] cannot take the model's {what} ({one_line(error)}); give a metric for such outputs and "
            "targets, or derive one whose update(preds, target) brings them into its form."
        ) from error


def _check_states(name: str, metric: StatefulMetric) -> None:
    """Raise UserError for a metric whose states cannot be put together."""
    given = f"metrics[{name!r}], a {type(metric).__name__},"
    reductions = getattr(metric, "_reductions", None)
    inner = [each for each in metric.modules() if has_states(each)] if isinstance(metric, nn.Module) else [metric]
    if not reductions or len(inner) > 1:
        why = "holds other metrics" if len(inner) > 1 else "does not say how its states are put together"
        raise UserError(
            f"{given} {why}, which several ranks have to know; give one of torchmetrics with states of its own, "
            f"or {_ON_ONE}."
        )
    for state, reduction in reductions.items():
        value = getattr(metric, state)
        known = _JOINS if isinstance(value, list) else _REDUCTIONS if isinstance(value, Tensor) else ()
        if _name(reduction) not in known:
            raise UserError(
                f"{given} has the state {state}, which cannot be put together over ranks by {_name(reduction)}: only "
                f"sums, extremes and lists can; give another metric, or {_ON_ONE}."
            )


def _name(reduction: object) -> str | None:
    return None if reduction is None else str(getattr(reduction, "__name__", reduction))


def _merge(metric: Any, ranks: Ranks, device: torch.device) -> None:
    for state, reduction in metric._reductions.items():
        own = getattr(metric, state)
        every = ranks.gather_tensors(own if isinstance(own, list) else [own])
        if isinstance(own, list):
            setattr(metric, state, [each.to(device) for parts in every for each in parts])
        else:
            stacked = torch.stack([each for parts in every for each in parts])
            setattr(metric, state, _REDUCTIONS[str(_name(reduction))](stacked).to(own))


def _numbers(metric: Any) -> dict[str, float | Tensor]:
    """Return the numbers and tensors that a metric holds, states included, but not what torchmetrics counts itself."""
    own = {name: value for name, value in vars(metric).items() if not name.startswith("_")}
    own |= dict(metric.named_buffers()) if isinstance(metric, nn.Module) else {}
    numbers = {name: value for name, value in own.items() if isinstance(value, int | float | Tensor)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}


def _equal(one: float | Tensor, other: float | Tensor) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
