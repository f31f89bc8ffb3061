"""Digests of values and code: the results in a folder are of what has the same one.

Of functions and classes outside torch the code counts, what they hold, and what they name: globals, and functions and
classes of the user's own modules, however deep. What they name of installed packages is not looked into.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = ("torch.", "builtins.", "collections.", "abc.", "typing.", "functools.", "numpy.", "crossbow_py.")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PLAIN = (
    bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray, np.generic, Tensor,
    types.SimpleNamespace, argparse.Namespace,
)  # fmt: skip
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, type)
_DEEPEST = 12


def digest_of(*values: object) -> str:
    """Return 16 hexadecimal digits that are equal for equal values, in every process."""
    found = hashlib.blake2b(digest_size=8)
    code: list[Any] = [values]
    for each in code:  # which grows by the functions and classes that are met on the way
        for part in _inside(each, (), code):
            found.update(part)
            found.update(b"\0")
    return found.hexdigest()


def _parts(value: Any, above: tuple[int, ...], code: list[Any]) -> Iterator[bytes]:
    """Yield what a value is made of; `above` has the ids of what it is a part of, so that circles end.

    Of functions and classes their place in `code`, the list of those that are looked into once and later.
    """
    yield type(value).__qualname__.encode()
    if id(value) in above or len(above) > _DEEPEST:
        return
    if isinstance(value, types.FunctionType | type):
        place = next((place for place, each in enumerate(code) if each is value), len(code))
        code += [value] if place == len(code) else []
        yield str(place).encode()
    elif isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        yield from _parts(plain, above, code)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    else:
        yield from _inside(value, above, code)


def _inside(value: Any, above: tuple[int, ...], code: list[Any]) -> Iterator[bytes]:
    for part in _inner(value):
        if isinstance(part, str):
            yield part.encode()
        else:
            yield from _parts(part, (*above, id(value)), code)


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
            yield from (value.__kwdefaults__, vars(value))
            yield {} if _is_installed(value.__module__) else _named(value.__code__, value.__globals__)
        case types.ModuleType():
            yield value.__name__
        case types.CodeType():
            yield from (value.co_code, value.co_names, [each for each in value.co_consts if each is not None])
        case type():
            yield f"{value.__module__}.{value.__qualname__}"
            own = [each for each in value.__mro__ if not f"{each.__module__}.".startswith(_LIBRARIES)]
            parts = [part for each in own for part in vars(each).values()]
            yield from (part.fget if isinstance(part, property) else getattr(part, "__func__", part) for part in parts
                        if isinstance(part, types.FunctionType | staticmethod | classmethod | property))  # fmt: skip
            yield {key: part for each in reversed(own) for key, part in vars(each).items()
                   if isinstance(part, _PLAIN) and not key.startswith("__")}  # fmt: skip
        case _ if dataclasses.is_dataclass(value):
            yield type(value)
            yield {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        case _:
            yield f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__name__', '')}"
            yield type(value)
            yield dict(getattr(value, "__dict__", {}))


def _named(code: types.CodeType, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what code names of `names`, those of its module, and of other modules of the user's that it names."""
    found, attributes = dict[str, Any](), set[str]()
    for own in _with_inner(code):
        attributes.update(own.co_names)
        for each in dis.get_instructions(own):
            if each.opname == "LOAD_GLOBAL" and each.argval in names:
                found[each.argval] = names[each.argval]
    for name, value in list(found.items()):
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            found |= {f"{name}.{key}": part for key, part in vars(value).items() if key in attributes}
    return {name: value for name, value in found.items() if _counts(value)}


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _with_inner(each)


def _counts(value: Any) -> bool:
    """Return whether a global is a value or code, not a module or a tool of a package, such as a logger."""
    if isinstance(value, _CODE):
        return not _is_installed(value.__module__ or "") if isinstance(value, types.FunctionType | type) else True
    return isinstance(value, (*_PLAIN, nn.Module)) or not _is_installed(type(value).__module__)


def _is_installed(module: str) -> bool:
    """Return whether a module is Python's, of an installed package, or ours."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return f"{module}.".startswith(_LIBRARIES) or module in sys.builtin_module_names or file.startswith(_INSTALLED)
