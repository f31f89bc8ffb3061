"""The comparison of another way to run a model with the model itself, on its data and this machine.

Exported graphs, kernels, compiled code and copies are trusted only after they were compared with the module as the user
wrote it, run by eager autograd. What autograd does only in the backward pass, such as a custom backward or a hook, is
in no exported graph, and only a comparison of gradients shows it.

Two ways round differently, and a model may amplify this. If values differ by more than rounding explains, a control
decides: the module is run again with weights moved by about one rounding. Values that are sensitive to that may differ
as much by rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.core.trees import Tree, leaves
from crossbow_py.engine.modules.dropout import CounterDropout

Values = Mapping[str, Tensor]

# The relative norm of a difference that rounding alone explains.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
# How far the control moves weights, relatively.
_MOVED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
_CHAOS, _CHAOS_SAME = 10.0, 2.0  # times what the control moves: allowed differences, of other and of the same operators
_CHANCE = 3.0  # times as far from float32 as another way in the same format: allowed
_NOISE = 0.1  # a value of which the control moves this share is nothing but rounding
# What rounding leaves of a gradient that is zero, such as that of a bias before BatchNorm, relative to all gradients.
_RESIDUE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
_OF_TORCH = frozenset(vars(nn.Module()))
_DEEPEST = 5  # levels of containers and objects inside each other
_LEAST = 1e-2  # the share of that residue that is always allowed: the last digit of the whole gradient
_DEVIATES = 4093  # a prime, so that repetitions are never in step with a layer
_SMALL = 1e-12  # norms below this lose squares of float32 values


@dataclass(frozen=True)
class Difference:
    """The value that differs most, and its relative distance."""

    name: str
    distance: float

    def __str__(self) -> str:
        return f"{self.name} is off by {self.distance:.0%}" if self.distance > 0.01 else f"{self.name} differs"


def furthest(
    found: Values, expected: Values, control: Callable[[], Values], compute: torch.dtype, same_operators: bool = False
) -> Difference | None:
    """Return the value that differs most, or None if rounding explains all differences.

    Args:
        found, expected: values by name, in pairs of the same shape.
        control: returns the expected values again, under `moved_weights`; called only if needed.
        compute: the dtype that both were computed in.
        same_operators: whether both ran the same operators, and may differ only in the order of some sums.
    """
    compute = digits_of(compute, next(iter(expected.values())).device)
    few = max(_ROUNDING[torch.float32], 4 * _MOVED[compute])  # roundings
    rounding, chaos = (few, _CHAOS_SAME) if same_operators else (_ROUNDING[compute], _CHAOS)
    residue = _RESIDUE[compute] * _norm([value for name, value in expected.items() if name.startswith("the gradient")])
    distances = {name: _distance(found[name], expected[name]) for name in expected}
    norms = {name: _norm([value]) for name, value in expected.items()}

    far = [name for name in expected if not distances[name] <= rounding * norms[name]]  # NaN is far
    if far:
        moved = control()
        by = {name: _distance(moved[name], expected[name]) for name in far}
        # A value that one rounding changes by a large share is the residue of a sum that is zero.
        least = residue * _LEAST if compute in (torch.float64, torch.float32) else 0.0
        residues = {name: residue if by[name] >= _NOISE * norms[name] else least for name in far}
        allowed = {name: max(chaos * by[name], residues[name]) for name in far}
        far = [name for name in far if not distances[name] <= allowed[name]]
    relative = {name: distances[name] / max(norms[name], torch.finfo(torch.float64).tiny) for name in far}
    worst = max(relative, key=lambda name: relative[name], default=None)
    return None if worst is None else Difference(worst, relative[worst])


def least_precise(found: Values, other: Values, precise: Values, compute: torch.dtype) -> Difference | None:
    """Return the gradient that is the furthest from float32's, if `other`, in the same format, comes much closer.

    One rounding of the weights moves the gradients of a deep model in bfloat16 by a tenth and more, so that `furthest`
    lets nearly anything pass there. But two ways in one format should be about as far from float32.

    Args:
        found, other, precise: values by name, `precise` computed in float32.
        compute: the dtype that the first two were computed in.
    """
    names = [name for name in precise if name.startswith("the gradient")]
    norms = {name: _norm([precise[name]]) for name in names}
    ours, theirs = ({name: _distance(each[name], precise[name]) for name in names} for each in (found, other))
    usual = float(np.median([theirs[name] / norms[name] for name in names if norms[name]] or [0.0]))
    residue = _RESIDUE[compute] * math.hypot(*norms.values())
    far = {
        name: ours[name] / max(norms[name], residue) for name in names
        if not ours[name] <= max(_CHANCE * theirs[name], _CHANCE * usual * norms[name], residue)
    }  # fmt: skip
    worst = max(far, key=lambda name: far[name], default=None)
    return None if worst is None else Difference(worst, far[worst])


def digits_of(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a dtype with as many digits as products have: on CUDA float32 may be TF32, with those of float16."""
    return torch.float16 if device.type == "cuda" and compute == torch.float32 else compute


def _norm(values: Sequence[Tensor]) -> float:
    """Return the norm of the finite values: masks may hold infinity."""
    return math.hypot(*(_norm_of(_real(value), lambda own: own.nan_to_num(0, 0, 0)) for value in values))


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference; it is not finite if only one of two values is."""
    found, expected = _real(found), _real(expected)
    fine = torch.promote_types(expected.dtype, torch.float32)
    difference = found.to(fine) - expected.to(fine)
    return _norm_of(
        difference, lambda own: own.masked_fill((found == expected) | (found.isnan() & expected.isnan()), 0)
    )


def _norm_of(value: Tensor, mended: Callable[[Tensor], Tensor]) -> float:
    """Return a norm; if squares overflow or vanish, that of `mended(value)` in float64."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))  # integers too
    found = float(torch.linalg.vector_norm(value))
    if math.isfinite(found) and (found > _SMALL or not value.any()):
        return found
    return float(mended(value.double()).norm())


def gradients_of(loss: Tensor, module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return `values_of` a loss and its gradients with respect to the named parameters of its module."""
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return values_of(loss, dict(zip(names, gradients, strict=True)), module)


def projection(outputs: Tree) -> Tensor:
    """Return a scalar for autograd that depends on all outputs."""
    return torch.stack([_projection(own) for own in leaves(outputs) if own.is_floating_point()]).sum()


def _projection(outputs: Tensor) -> Tensor:
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs.device)
    return (outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * weights).mean()


def outputs_by_name(outputs: Tree) -> dict[str, Tensor]:
    """Return the tensors of a model's output, under names for messages."""
    if isinstance(outputs, Tensor):
        return {"the output": outputs}
    return {f"output {place}": own for place, own in enumerate(leaves(outputs))}


def values_of(value: Tensor, gradients: Mapping[str, Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """Return the values by which two ways are compared, under names for messages; a missing gradient is zero."""
    parameters = dict(module.named_parameters())
    return {
        "the loss": value.detach().clone(),
        **{
            f"the gradient of {name}": torch.zeros_like(parameters[name]) if own is None else own.detach().to_dense()
            for name, own in gradients.items()
        },
        **{f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()},
    }


@contextlib.contextmanager
def kept_buffers(*modules: nn.Module) -> Iterator[None]:
    """Restore the modules' buffers after the block."""
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextlib.contextmanager
def moved_weights(parameters: Sequence[Tensor], compute: torch.dtype) -> Iterator[None]:
    """Have the block run with weights moved by about one rounding, in the same way each time."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            move(parameters, _MOVED[digits_of(compute, parameters[0].device)])
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)


@torch.no_grad()
def move(tensors: Sequence[Tensor], share: float) -> None:
    """Multiply values by 1 + `share` times normal deviates, the same each time; draws nothing from torch's generators.

    Tensors of the same shape are moved differently, which shows if tensors that should share memory do not.
    """
    factors = 1 + share * torch.randn(_DEVIATES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for index, tensor in enumerate(tensors):
        own = factors.roll(index).to(tensor.device, tensor.dtype)
        repeated = own.repeat(1 + tensor.numel() // _DEVIATES)
        tensor.mul_(repeated[: tensor.numel()].view(tensor.shape))


def graph_nodes(value: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph behind a value, each once."""
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]
            yield node


def custom_backwards(value: Tensor) -> list[str]:
    """Return the custom autograd functions behind a value, except torch's own, with the file and line of each."""
    found: dict[str, None] = {}
    for node in graph_nodes(value):
        own = getattr(type(node), "_forward_cls", None)
        if own is not None and not own.__module__.startswith("torch."):
            place = ""
            with contextlib.suppress(OSError, TypeError):  # its source may be nowhere
                if path := inspect.getsourcefile(own):
                    place = f" ({Path(path).name}:{inspect.getsourcelines(own)[1]})"
            found[f"{own.__qualname__}{place}"] = None
    return list(found)


def backward_hook(model: nn.Module) -> str | None:
    """Return the name of a module with a hook on its backward pass, "every module" for a global hook, or None."""
    everywhere = nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        return "every module"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return name or type(module).__name__
    return None


def python_state(model: nn.Module) -> dict[str, str]:
    """Return the Python attributes of modules and their classes as text: numbers, containers, generators.

    Tensors are left out, because many models keep some only to inspect them; a second pass shows whether one matters.
    """
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | CounterDropout):
            continue  # TorchScript makes attributes when they are read; CounterDropout draws a learner's known numbers
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                state[f"{name}.{key}".lstrip(".")] = fingerprint(value)
    for kind in {type(module) for module in model.modules()}:
        for own in kind.__mro__:
            if not own.__module__.startswith(("torch.", "builtins")):
                state |= {f"{own.__qualname__}.{key}": fingerprint(value) for key, value in vars(own).items()}
    return state


def changed_state(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return the first attribute of `python_state` that has changed, or None."""
    return next((name for name in after if before.get(name) != after[name]), None)


def fingerprint(value: Any, depth: int = _DEEPEST) -> str:
    """Return a text that changes with the value; "" for tensors, modules, functions and deeply nested values."""
    if isinstance(value, Tensor | nn.Module | type | logging.Logger) or depth == 0:
        return ""
    if isinstance(value, Mapping):
        return repr([(repr(key), fingerprint(each, depth - 1)) for key, each in value.items()])
    if isinstance(value, list | tuple | set | deque):
        return repr([fingerprint(each, depth - 1) for each in value])
    for kinds, text in _FINGERPRINTS:
        if isinstance(value, kinds):
            return text(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return ""
    return fingerprint(vars(value), depth - 1)


def _hashed(value: object) -> str:
    return str(hash(value))


_FINGERPRINTS: list[tuple[Any, Callable[[Any], str]]] = [
    (int | float | str | bytes | np.generic | itertools.count | None, repr),
    (np.ndarray, lambda value: _hashed(value.tobytes())),
    (random.Random, lambda value: _hashed(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: _hashed(pickle.dumps(value.get_state()))),
    (torch.Generator, lambda value: _hashed(value.get_state().cpu().numpy().tobytes())),
]
