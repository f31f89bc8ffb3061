"""Side effects of a model: hooks, custom backward passes, and state that it keeps outside buffers."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.engine.modules.dropout import CounterDropout
from crossbow_py.engine.trust.compare import Difference, Values, furthest

_OF_TORCH = frozenset(vars(nn.Module()))
_DEEPEST = 5  # levels of containers and objects inside each other


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


def kept_between_passes(
    module: nn.Module, first: Values, second_pass: Callable[[], Values], draws: bool = False
) -> str | Difference | None:
    """Return what a module that has made its first pass keeps outside buffers for its second; None if nothing.

    That is the name of an attribute that the second pass changes, or the value that differs most from the first pass.
    A first pass may make things once, such as a mask.

    Args:
        module: the module.
        first: values of the first pass.
        second_pass: makes another on the same batch, with the same buffers and random numbers, and returns its values.
        draws: whether it may draw other random numbers, so that its values differ.
    """
    state = python_state(module)
    again = second_pass()
    if (changed := changed_state(state, python_state(module))) is not None:
        return changed
    if reshaped := [name for name, value in first.items() if name not in again or again[name].shape != value.shape]:
        return Difference(reshaped[0], math.inf)
    if draws:
        return None
    # The same operators on the same values: any difference was made by the first pass.
    return furthest(again, first, lambda: first, torch.float32)


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


_FINGERPRINTS: list[tuple[Any, Callable[[Any], str]]] = [
    (int | float | str | bytes | np.generic | itertools.count | None, repr),
    (np.ndarray, lambda value: str(hash(value.tobytes()))),
    (random.Random, lambda value: str(hash(value.getstate()))),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: str(hash(pickle.dumps(value.get_state())))),
    (torch.Generator, lambda value: str(hash(value.get_state().cpu().numpy().tobytes()))),
]
