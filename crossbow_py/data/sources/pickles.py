"""Reading the CIFAR pickles: an unpickler that knows a short list of names, so that no file can run code."""

from __future__ import annotations

import codecs
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.downloads import REPLACE


class _RefusedError(Exception):
    """The pickle asks for something a data set does not need."""


def read_pickle(content: bytes, path: object) -> Any:
    """Unpickle plain values and numeric arrays; text that Python 2 wrote stays bytes.

    Args:
        content: the bytes of the file, whose published hash has been checked.
        path: names the file in errors.

    Raises:
        UserError: the pickle is truncated or damaged, or names anything but numeric arrays and plain containers.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedError as error:
        asks = f"its pickle asks for {error}, which could run code"
        raise UserError(f"data file {path} is refused: {asks}; take the file from its publisher.") from error
    except Exception as error:  # damaged bytes may spell any operation and so raise anything
        raise UserError(f"data file {path} is truncated or damaged ({type(error).__name__}); {REPLACE}.") from error


def _number_type(name: str | bytes, *_flags: object) -> np.dtype[Any]:
    """Return NumPy's constant of a numeric type. It ignores the pickled state, which could mark numbers as pointers."""
    dtype = np.dtype(name)  # type: ignore[arg-type]  # bytes, where Python 2 wrote it
    if dtype.kind not in "biuf":
        raise _RefusedError(f"an array of type {dtype}")
    return np.dtype(dtype.type)


# The functions behind an array's pickle; NumPy 2 renamed numpy.core to numpy._core, and files have either.
_RECONSTRUCT: Any
_FROM_BUFFER: Any
_RECONSTRUCT, _FROM_BUFFER = (np.empty(0).__reduce_ex__(protocol)[0] for protocol in (2, 5))
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _number_type,
    ("_codecs", "encode"): codecs.encode,  # bytes in protocol 2 of Python 3
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FROM_BUFFER for core in ("core", "_core")},
}


class _ArrayUnpickler(pickle._Unpickler):
    """Python's own unpickler; the one in C allocates as many memo entries as a damaged number says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return _ALLOWED[module, name]
