"""Compiles update.c once a machine and loads it.

The C compiler is whatever `$CC` or `cc` is. The library is kept in the user's cache under a name that follows from the
source, the flags, the compiler and the processor, so that a home folder may be shared among unlike machines. Without a
compiler nothing is lost but speed: callers fall back to torch operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from pathlib import Path

_SOURCE = Path(__file__).with_name("update.c")
# Contraction is off so that a result is rounded where the torch operators of the reference round it.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_S = 60.0


class NativeError(Exception):
    """There is no native library here; the message says why, as half a sentence."""


class Vector(Structure):
    """The struct of the same name in update.c."""

    _fields_ = [  # the protocol of ctypes
        ("weights", c_void_p),
        ("gradients", c_void_p),
        ("state", c_void_p * 2),
        ("corrections", c_void_p),
        ("z", c_void_p),
        ("shadow", c_void_p),
        ("count", c_int64),
        ("stride", c_int64),
        ("gradient_stride", c_int64),
        ("decays", c_int64),
    ]


class Learner(Structure):
    """The struct of the same name in update.c; up to eight values."""

    _fields_ = [
        ("skipped", c_int64),
        ("gradient_scale", c_float),
        ("decay", c_float),
        ("values", c_float * 8),
    ]


def load(cache: Path | None = None) -> ctypes.CDLL:
    """The library, compiled if need be. Its functions release the interpreter lock. Raises NativeError."""
    cache = cache or Path.home() / ".cache" / "crossbow_py" / "native"
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or shutil.which(command[0]) is None:
        raise NativeError(f"there is no C compiler ({command[0] if command else '$CC is empty'})")
    path = cache / f"update-{_fingerprint(command)}.so"
    try:
        if path.exists():
            with suppress(OSError):  # damaged: made anew
                return _declare(ctypes.CDLL(str(path)))
        _compile(command, path)
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeError(f"{path} could not be written or loaded ({error.strerror or error})") from error


def _fingerprint(command: list[str]) -> str:
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, timeout=_COMPILE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the C compiler {command[0]} does not answer") from error
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, platform.machine().encode(), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """What `-march=native` depends on: model and flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(line for line in lines if line.startswith(("model", "vendor_id", "flags", "Features"))).encode()


def _compile(command: list[str], path: Path) -> None:
    """Into a folder of its own first, then renamed: several processes may be at it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            done = subprocess.run(
                [*command, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"],
                capture_output=True,
                text=True,
                timeout=_COMPILE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeError(f"{command[0]} took more than {_COMPILE_S:.0f} s") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NativeError(f"{command[0]} failed: {reason[:200]}")
        made.replace(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    vector, vectors = c_void_p, POINTER(Vector)
    signatures = {
        "crossbow_update": (vectors, c_int64, POINTER(Learner), c_int64, c_int64, c_float, c_int64, c_int64),
        "crossbow_sums_of_squares": (vectors, c_int64, POINTER(c_double), c_int64, c_int64, c_int64),
        "crossbow_sum": (vector, POINTER(c_void_p), c_int64, c_int64),
        "crossbow_move": (vector, vector, vector, c_float, c_int64),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
