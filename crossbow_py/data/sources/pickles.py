"""Reading the CIFAR pickles with an unpickler that can build arrays and plain containers and nothing else.

An ordinary unpickler calls whatever function the file names, so a pickle from the network is a program. This one knows
a few names, and behind each stands a function of this file. Not even NumPy's own types are handed out: the state of a
pickled dtype can mark numbers as pointers, which NumPy would follow. It takes no more memory and time than the length
of the file accounts for.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.downloads import REPLACE


class _RefusedError(Exception):
    """The pickle asks for something a data set does not need."""


def read_pickle(content: bytes, path: object) -> Any:
    """Unpickle `content`: plain values, or a dict of plain values and read-only arrays; Python 2 text stays bytes.

    Args:
        content: the bytes of the file.
        path: names the file in errors.

    Raises:
        UserError: the pickle is truncated or damaged, or names anything but numeric arrays and plain containers.
    """
    try:
        value = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedError as error:
        raise UserError(
            f"data file {path} is refused: its pickle asks for {error}, which a data set does not need and could run "
            "code; take the file from its publisher."
        ) from error
    except Exception as error:  # damaged bytes may spell any operation and so raise anything
        raise UserError(f"data file {path} is truncated or damaged ({type(error).__name__}); {REPLACE}.") from error
    return {key: _plain(entry) for key, entry in value.items()} if isinstance(value, dict) else _plain(value)


class _Dtype:
    """Stands in for np.dtype while unpickling: a numeric type, of whose pickled state only the byte order counts."""

    def __init__(self, name: str | bytes, *_flags: object) -> None:
        self.dtype: np.dtype[Any] = np.dtype(_text(name))
        if self.dtype.kind not in "biuf":
            raise _RefusedError(f"an array of type {self.dtype}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(_text(state[1]))  # type: ignore[arg-type]


class _Array:
    """Stands in for np.ndarray while unpickling; its state makes the array."""

    values: npt.NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, is_fortran, content = state
        self.fill(content, dtype, shape, "F" if is_fortran else "C")

    def fill(self, content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> None:
        """A read-only array over `content`: not copied, as readers join the arrays of several files anyway."""
        self.values = np.frombuffer(content, dtype.dtype).reshape(shape, order=order)  # type: ignore[call-overload]


def _empty_array(_type: type, _shape: object, _dtype: object) -> _Array:
    """For NumPy's `_reconstruct`: shape and contents come later, with the state."""
    return _Array()


def _array_of_bytes(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    """For NumPy's `_frombuffer`, of protocol 5."""
    array = _Array()
    array.fill(content, dtype, shape, order)
    return array


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """For `_codecs.encode`, by which Python 3 writes bytes in protocol 2; other codecs are not needed."""
    if encoding != "latin1":
        raise _RefusedError(f"the codec {encoding!r}")
    return text.encode("latin1")


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, _Array) else value


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


# Old and new places of the same functions: NumPy 2 renamed numpy.core to numpy._core.
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1_bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array_of_bytes for core in ("core", "_core")},
}


# What writers of plain values and arrays use. Left out are persistent ids, extensions, sets and objects of classes.
_OPERATIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.LONG, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT,
    pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8,
    pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
    pickle.GET, pickle.BINGET, pickle.LONG_BINGET, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
    pickle.STACK_GLOBAL, pickle.REDUCE,
)  # fmt: skip


_PYTHONS: dict[int, Callable[[Any], None]] = {**pickle._Unpickler.dispatch}


class _ArrayUnpickler(pickle._Unpickler):
    """Python's own unpickler and not the one in C, which allocates as many memo entries as a damaged number says.

    Its operations are methods that work on `stack`: what has been read since the last mark.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code[0]: _PYTHONS[code[0]] for code in _OPERATIONS}

    def find_class(self, module: str, name: str) -> Any:
        """Only what `_ALLOWED` lists."""
        if (module, name) not in _ALLOWED:
            raise _RefusedError(f"{module}.{name}")
        return _ALLOWED[module, name]

    def _global(self) -> None:
        """Two lines; what the end of the file cuts off is no name."""
        module, name = self.readline(), self.readline()
        if not name.endswith(b"\n"):
            raise EOFError
        self.append(self.find_class(module[:-1].decode(), name[:-1].decode()))

    def _build(self) -> None:
        """The state of an array or of its type; that of a function would stay when the file is read."""
        if not isinstance(self.stack[-2], _Array | _Dtype):
            raise _RefusedError("a change of what is no array")
        _PYTHONS[pickle.BUILD[0]](self)

    def _bytearray(self) -> None:
        """Read before room is made: the length may be anything."""
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    def _dict(self) -> None:
        _check_keys(self.stack[::2])
        _PYTHONS[pickle.DICT[0]](self)

    def _set_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        _PYTHONS[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        _check_keys(self.stack[::2])
        _PYTHONS[pickle.SETITEMS[0]](self)

    dispatch |= {
        pickle.BUILD[0]: _build,
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.DICT[0]: _dict,
        pickle.GLOBAL[0]: _global,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _check_keys(keys: Iterable[object]) -> None:
    """Text only: the hash of a tuple of tuples of tuples may take years."""
    for key in keys:
        if not isinstance(key, str | bytes):
            raise _RefusedError(f"a {type(key).__name__} as a key")
