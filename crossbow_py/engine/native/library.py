"""Compiles C code, such as update.c, once on a machine and loads it.

The C compiler is `$CC` or `cc`. The library is kept in the user's cache under a name made of the source, the flags, the
processor and the compiler, so that different machines may share a home folder, and of its own bytes, so that a damaged
one is noticed and compiled again. A library that others could have written is not loaded. If the cache cannot be
written, or is open to others, the library is compiled for this process only. Without a compiler only speed is lost:
callers fall back to torch operators.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from crossbow_py.core.files import own_file, sync
from crossbow_py.core.measured import user_cache

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_S, _VERSION_S = 60.0, 10.0
_PRIVATE = 0o700  # the mode of the folder and its files
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TILE = 16  # the columns of products in C are padded to a multiple of it
_INSTALL = "install gcc, or name a C compiler in CC"


IN_USE: ContextVar[bool] = ContextVar("layers and losses run in C; where not, by torch's operators", default=True)
RECORDING: ContextVar[bool] = ContextVar("operators are recorded, which C code would be missing from", default=False)


class NativeError(Exception):
    """There is no native library here; the message says why, as part of a sentence, and `remedy` what to do."""

    def __init__(self, reason: str, remedy: str = _INSTALL) -> None:
        super().__init__(reason)
        self.remedy = remedy


class Vector(Structure):
    """The struct of the same name in update.c."""

    _fields_ = [  # the protocol of ctypes
        ("weights", c_void_p),
        ("gradients", c_void_p),
        ("state", c_void_p * 2),
        ("total", c_void_p),
        ("z", c_void_p),
        ("z_prev", c_void_p),
        ("shadow", c_void_p),
        ("count", c_int64),
        ("stride", c_int64),
        ("gradient_stride", c_int64),
        ("decays", c_int64),
        ("group", c_int64),
    ]


class Learner(Structure):
    """The struct of the same name in update.c, with up to eight values."""

    _fields_ = [
        *((name, c_int64) for name in ("skipped", "function")),
        *((name, c_float) for name in ("gradient_scale", "decay")),
        ("values", c_float * 8),
    ]


class Averaging(Structure):
    """The struct of the same name in update.c, all zero in a round that does not average."""

    _fields_ = [
        *((name, c_int64) for name in ("averages", "moves", "follows")),
        *((name, c_float) for name in ("correction", "momentum", "share")),
    ]


@dataclass(frozen=True, eq=False)
class Code:
    """A source file beside this one.

    Attributes:
        name: of the file, without `.c`.
        functions: the types of their arguments, of which the last is a number of threads; they return nothing.
        flags: of the compiler, beyond those of all code.
        headers: the files beside it that it includes.
    """

    name: str
    functions: Mapping[str, tuple[Any, ...]]
    flags: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """Return the path of the file."""
        return Path(__file__).with_name(f"{self.name}.c")

    @property
    def bytes_of_all(self) -> list[bytes]:
        """Return what its files hold."""
        return [self.source.with_name(name).read_bytes() for name in (self.source.name, *self.headers)]


_VECTORS, _LEARNERS = (POINTER(Vector), c_int64), (POINTER(Learner), c_int64)
UPDATE = Code(
    "update",
    {
        "crossbow_update": (*_VECTORS, *_LEARNERS, POINTER(Averaging), c_int64),
        "crossbow_sums_of_squares": (*_VECTORS, POINTER(c_double), c_int64, c_int64, c_int64),
        "crossbow_sum": (c_void_p, POINTER(c_void_p), c_int64, c_int64, c_int64),
        "crossbow_move": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64),
    },
    # A result is rounded where the torch operators of the reference round it.
    flags=("-ffp-contract=off",),
)


def require_called() -> None:
    """Raise NativeError while operators are recorded: a recording would leave out what C code computes."""
    if RECORDING.get():
        raise NativeError("C code cannot be recorded", "call it")


@cache
def loaded(code: Code) -> ctypes.CDLL | None:
    """Return the library, or None where there is none; the choice of the update says why to the user."""
    try:
        return load(code=code)
    except NativeError:
        return None


def serves(code: Code, *tensors: torch.Tensor) -> bool:
    """Return whether C code for float32 on CPUs runs here with these values, and with as many threads as torch."""
    plain = all(own.device.type == "cpu" and own.dtype == torch.float32 for own in tensors)
    found = loaded(code) if plain and IN_USE.get() else None
    return found is not None and (bool(found.crossbow_has_threads()) or torch.get_num_threads() == 1)


def num_threads(learners: int) -> int:
    """Return all of torch's threads or one: a smaller team would end the others, which torch would start again."""
    return torch.get_num_threads() if learners > 1 else 1


def padded(width: int) -> int:
    """Return the columns that small.h keeps of so many."""
    return -(-width // _TILE) * _TILE


def load(cache: Path | None = None, code: Code = UPDATE) -> ctypes.CDLL:
    """Return the library, compiled if necessary. Its functions release the interpreter lock. Raises NativeError."""
    given = os.environ.get("CC", "cc")
    try:
        command = shlex.split(given)
    except ValueError as error:  # a quote without its end
        raise NativeError(f"CC={given} is no command ({error})") from error
    try:
        cache = cache or user_cache() / "native"
        _make_private(cache)
        return _load_from(cache, command, code)
    except OSError:
        pass  # the cache cannot be written, is open to others, or is mounted noexec
    try:
        with tempfile.TemporaryDirectory() as folder:  # a loaded library outlives its file
            return _load_from(Path(folder), command, code)
    except OSError as error:
        raise NativeError(
            f"neither {cache} nor {tempfile.gettempdir()} can hold the compiled code ({error.strerror or error})",
            "make room there, or name another folder in TMPDIR",
        ) from error


def _load_from(cache: Path, command: list[str], code: Code) -> ctypes.CDLL:
    """Return the library for this machine, from the cache or compiled to it. Raises OSError and NativeError."""
    flags = " ".join(_FLAGS + code.flags)
    parts = [*code.bytes_of_all, flags.encode(), platform.machine().encode(), _processor()]
    stem = f"{code.name}-{_digest(*parts)}"
    has_compiler = bool(command) and shutil.which(command[0]) is not None
    if has_compiler:
        try:
            answer = subprocess.run([*command, "--version"], capture_output=True, timeout=_VERSION_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeError(f"the C compiler {command[0]} does not answer") from error
        stem = f"{stem}-{_digest(answer.stdout)}"
    for path in sorted(cache.glob(f"{stem}-*.so")):  # without a compiler, that of any
        if _is_whole(path):
            with suppress(OSError, AttributeError):  # it cannot be loaded, or lacks a function
                return _declare(ctypes.CDLL(str(path)), code)
        with suppress(OSError):
            path.unlink()
    if not has_compiler:
        raise NativeError(f"there is no C compiler ({command[0] if command else '$CC is empty'})")
    try:
        return _declare(ctypes.CDLL(str(_compile([*command, "-fopenmp"], cache, stem, code))), code)
    except (OSError, NativeError):  # as where clang has no OpenMP, or none that can be loaded
        return _declare(ctypes.CDLL(str(_compile(command, cache, stem, code))), code)


def _make_private(cache: Path) -> None:
    """Make the folder, or check that no one else can put a library there. Raises OSError if someone can."""
    cache.mkdir(parents=True, mode=_PRIVATE, exist_ok=True)
    found = cache.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", str(cache))
    if found.st_mode & _OTHERS_WRITE:  # made by an earlier version under some umasks
        for path in cache.glob("*.so"):  # of unknown origin
            path.unlink()
        cache.chmod(_PRIVATE)


def _is_whole(path: Path) -> bool:
    """Return whether it is this user's own file with the bytes that were compiled. A torn one would end the process."""
    try:
        with open(path, "rb", opener=own_file) as file:
            found = os.fstat(file.fileno())
            is_private = found.st_uid == os.getuid() and not found.st_mode & _OTHERS_WRITE
            return is_private and _digest(file.read()) == path.stem.rpartition("-")[2]
    except OSError:
        return False


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _processor() -> bytes:
    """Return what `-march=native` depends on: the model and the flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(line for line in lines if line.startswith(("model", "vendor_id", "flags", "Features"))).encode()


def _compile(command: list[str], cache: Path, stem: str, code: Code) -> Path:
    """Compile in a new folder and then rename, because several processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / f"{stem}.so"
        words = [*command, *_FLAGS, *code.flags, "-o", str(made), str(code.source), "-lm"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NativeError(f"{command[0]} took more than {_COMPILE_S:.0f} s") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NativeError(f"{command[0]} failed: {reason[:200]}")
        made.chmod(_PRIVATE)
        sync(made)
        path = cache / f"{stem}-{_digest(made.read_bytes())}.so"
        made.replace(path)
        sync(cache)
        return path


def _declare(library: ctypes.CDLL, code: Code) -> ctypes.CDLL:
    for name, arguments in code.functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
