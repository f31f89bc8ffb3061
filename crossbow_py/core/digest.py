"""Digests of values and code: the results in a folder are of what has the same one.

Of functions and classes outside torch the code counts, and what they hold; not the code that these call elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = ("torch.", "builtins.", "collections.", "abc.", "typing.", "functools.", "numpy.", "crossbow_py.")
_DEEPEST = 12


def digest_of(*values: object) -> str:
    """Return 16 hexadecimal digits that are equal for equal values, in every process."""
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(values, ()):
        found.update(part)
        found.update(b"\0")
    return found.hexdigest()


def _parts(value: Any, above: tuple[int, ...]) -> Iterator[bytes]:
    """Yield what a value is made of; `above` has the ids of what it is a part of, so that circles end."""
    yield type(value).__qualname__.encode()
    if id(value) in above or len(above) > _DEEPEST:
        return
    inside = (*above, id(value))
    if isinstance(value, Tensor):
        yield from _parts(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), inside)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    else:
        for part in _inner(value):
            if isinstance(part, str):
                yield part.encode()
            else:
                yield from _parts(part, inside)


def _inner(value: Any) -> Iterator[Any]:  # noqa: C901, PLR0912  one case a kind
    """Yield the parts of a value that is no array: text as it is, other parts to be looked into."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype():
            yield repr(value)
        case Mapping():
            yield from (part for key in sorted(value, key=str) for part in (str(key), value[key]))
        case Set():
            yield from sorted(map(repr, value))
        case Sequence():
            yield from value
        case nn.Module():
            for name, module in value.named_modules():
                kept = {key: own for key, own in vars(module).items() if not key.startswith("_") and key != "training"}
                yield from (name, type(module), kept)
            yield {**dict(value.named_parameters()), **dict(value.named_buffers())}
        case partial():
            yield from (value.func, value.args, value.keywords)
        case types.MethodType():
            yield from (value.__func__, value.__self__)
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            yield from (f"{value.__module__}.{value.__qualname__}", value.__code__, value.__defaults__, cells)
            yield value.__kwdefaults__
        case types.CodeType():
            yield from (value.co_code, value.co_names, [each for each in value.co_consts if each is not None])
        case type():
            yield f"{value.__module__}.{value.__qualname__}"
            own = [each for each in value.__mro__ if not f"{each.__module__}.".startswith(_LIBRARIES)]
            parts = [part for each in own for part in vars(each).values()]
            yield from (part.fget if isinstance(part, property) else getattr(part, "__func__", part) for part in parts
                        if isinstance(part, types.FunctionType | staticmethod | classmethod | property))  # fmt: skip
        case _ if dataclasses.is_dataclass(value):
            yield type(value)
            yield {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        case _:
            yield f"{type(value).__module__}.{type(value).__qualname__}"
            yield type(value)
            yield dict(getattr(value, "__dict__", {}))
