"""Whether another way to run a model gives the model's own numbers, on this model, its data and this machine.

Exported graphs, kernels, compiled code and copies are trusted where they were compared with the module as the user
wrote it, run by eager autograd, and refused by name elsewhere. What autograd does only backwards, such as a custom
backward or a hook, is in no exported graph, and nothing but a comparison of gradients shows that.

Two ways round differently, and a model may enlarge that. So where values are further apart than rounding alone puts
them, a control decides: the module is run again with weights moved by about one rounding. What that moves, rounding may
move as well.
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

from crossbow_py.engine.modules.dropout import CounterDropout

Values = Mapping[str, Tensor]

# Relative norm of a difference that rounding alone explains.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
# Weights are moved so far, relatively, by the control.
_MOVED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
_CHAOS, _CHAOS_ALIKE = 10.0, 2.0  # times what the control moves
_NOISE = 0.1  # of a value that the control moves by as much
# What rounding leaves of a gradient that is zero, such as a bias before BatchNorm has, of the norm of all gradients.
_RESIDUE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
_OF_TORCH = frozenset(vars(nn.Module()))
_DEEPEST = 5  # containers and objects in each other
_LEAST = 1e-2  # of that residue: the last digit of the whole gradient
_DEVIATES = 4093  # a prime: what repeats is nowhere in step with a layer
_SMALL = 1e-12  # below, squares of float32 values vanish


@dataclass(frozen=True)
class Difference:
    """The value that is furthest off, by which relative distance."""

    name: str
    distance: float

    def __str__(self) -> str:
        return f"{self.name} is off by {self.distance:.0%}" if self.distance > 0.01 else f"{self.name} differs"


def furthest(
    found: Values, expected: Values, control: Callable[[], Values], compute: torch.dtype, alike: bool = False
) -> Difference | None:
    """Return the value that differs most, or None where rounding explains all of them.

    Args:
        found, expected: by name; those of one name have one shape.
        control: gives the expected values once more, after `moved_weights`; called only where it decides.
        compute: what both were computed in.
        alike: whether both ran the same operators, so that only the order of some sums is left to rounding.
    """
    compute = digits_of(compute, next(iter(expected.values())).device)
    few = max(_ROUNDING[torch.float32], 4 * _MOVED[compute])  # roundings
    rounding, chaos = (few, _CHAOS_ALIKE) if alike else (_ROUNDING[compute], _CHAOS)
    residue = _RESIDUE[compute] * _norm([value for name, value in expected.items() if name.startswith("the gradient")])
    distances = {name: _distance(found[name], expected[name]) for name in expected}
    norms = {name: _norm([value]) for name, value in expected.items()}

    far = [name for name in expected if not distances[name] <= rounding * norms[name]]  # NaN is far
    if far:
        moved = control()
        by = {name: _distance(moved[name], expected[name]) for name in far}
        # What a rounding changes by much of itself is nothing but rounding: the rest of a sum that is zero.
        least = residue * _LEAST if compute in (torch.float64, torch.float32) else 0.0
        residues = {name: residue if by[name] >= _NOISE * norms[name] else least for name in far}
        allowed = {name: max(chaos * by[name], residues[name]) for name in far}
        far = [name for name in far if not distances[name] <= allowed[name]]
    relative = {name: distances[name] / max(norms[name], torch.finfo(torch.float64).tiny) for name in far}
    worst = max(relative, key=lambda name: relative[name], default=None)
    return None if worst is None else Difference(worst, relative[worst])


def digits_of(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a format with the digits that products have: on CUDA those of float32 may be TF32's, float16's number."""
    return torch.float16 if device.type == "cuda" and compute == torch.float32 else compute


def _norm(values: Sequence[Tensor]) -> float:
    """Return the norm of what is finite: masks may hold infinity."""
    return math.hypot(*(_length(value) for value in values))


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _length(value: Tensor) -> float:
    return _norm_of(_real(value), lambda own: own.nan_to_num(0, 0, 0))


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference; it is not finite where only one of the two values is."""
    found, expected = _real(found), _real(expected)
    fine = torch.promote_types(expected.dtype, torch.float32)
    difference = found.to(fine) - expected.to(fine)
    return _norm_of(
        difference,
        lambda own: own.masked_fill((found == expected) | (found.isnan() & expected.isnan()), 0),
    )


def _norm_of(value: Tensor, mended: Callable[[Tensor], Tensor]) -> float:
    """Return a norm; where squares overflow or vanish, in float64 that of what `mended` makes of the value."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))  # integers too
    found = float(torch.linalg.vector_norm(value))
    if math.isfinite(found) and (found > _SMALL or not value.any()):
        return found
    return float(mended(value.double()).norm())


def gradients_of(loss: Tensor, module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return `values_of` a loss, with its gradients by the named parameters of the module that it came from."""
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return values_of(loss, dict(zip(names, gradients, strict=True)), module)


def projection(outputs: Tensor) -> Tensor:
    """Return one number of outputs, for autograd, that depends on all of them."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs.device)
    return (outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * weights).mean()


def values_of(value: Tensor, gradients: Mapping[str, Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """Return what two ways are compared by, under names for messages; a missing gradient is left out as zero."""
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
    """Put back what passes of the block write to the modules' buffers."""
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextlib.contextmanager
def moved_weights(parameters: Sequence[Tensor], compute: torch.dtype) -> Iterator[None]:
    """Have the block run with weights moved by about one rounding, always the same way."""
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
    """Multiply values by 1 + `share` times normal deviates, always the same; draws nothing from torch's generators.

    Tensors of one shape are moved differently, so that those that ought to share memory can be told apart.
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
    """Return the custom autograd functions, but for torch's own, behind a value, with where each is defined."""
    found: dict[str, None] = {}
    for node in graph_nodes(value):
        own = getattr(type(node), "_forward_cls", None)
        if own is not None and not own.__module__.startswith("torch."):
            found[f"{own.__qualname__}{_defined(own)}"] = None
    return list(found)


def _defined(thing: type) -> str:
    with contextlib.suppress(OSError, TypeError):
        path = inspect.getsourcefile(thing)
        return f" ({Path(path).name}:{inspect.getsourcelines(thing)[1]})" if path else ""
    return ""


def backward_hook(model: nn.Module) -> str | None:
    """Return the name of a module with a hook on its backward pass; "every module" where one is registered for all."""
    everywhere = nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        return "every module"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return name or type(module).__name__
    return None


def python_state(model: nn.Module) -> dict[str, str]:
    """Return what modules and their classes keep in attributes of Python, as text: numbers, containers, generators.

    Tensors are left out: many models keep some to look at. Whether one matters a second pass shows.
    """
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | CounterDropout):
            continue  # attributes of TorchScript are made anew when they are looked at; a learner's numbers are known
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                state[f"{name}.{key}".lstrip(".")] = fingerprint(value)
    for kind in {type(module) for module in model.modules()}:
        for own in kind.__mro__:
            if not own.__module__.startswith(("torch.", "builtins")):
                state |= {f"{own.__qualname__}.{key}": fingerprint(value) for key, value in vars(own).items()}
    return state


def changed_state(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return the first attribute of `python_state` that is another than before."""
    return next((name for name in after if before.get(name) != after[name]), None)


def fingerprint(value: Any, depth: int = _DEEPEST) -> str:
    """Return a text that changes with the value; empty for tensors, modules, functions, and what lies too deep."""
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
