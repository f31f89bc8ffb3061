"""Run a Python module with a simulated CUDA device, on a machine without a GPU:

    python -m tests.simulated_cuda pytest -m gpu tests/gpu
    python -m tests.simulated_cuda crossbow_py.train +experiment=digits device=cuda

Settings come from the environment: SIMULATED_CUDA_ORDER (earliest, latest or random), _SEED, _DEVICES, _GIB and
_CAPABILITY, and CUDA_VISIBLE_DEVICES. With _STRICT=1 a process in which accesses raced names them and ends with exit
code 86. With TRITON_INTERPRET=1 Triton's kernels run as well, which is slow.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.simulated_cuda.settings import Settings

HERE = Path(__file__).resolve().parent
SUPPORTED = "2.13."  # what `device.cpp` registers differs between versions of torch
_SOURCE = HERE / "device.cpp"
_COMPILERS = ("g++", "c++", "clang++")


def refusal() -> str | None:
    """Return why there can be no simulated device here, None if there can."""
    version = importlib.metadata.version("torch")
    if not version.startswith(SUPPORTED):
        return f"it is made for torch {SUPPORTED}x, and this is {version}"
    if not (_torch() / "lib" / "libtorch_cpu.so").exists() or (_torch() / "lib" / "libc10_cuda.so").exists():
        return "torch is not a CPU build for Linux"
    if _compiler() is None and not _built().exists():
        return "there is no C++ compiler"
    return None


def library() -> Path:
    """Return the library, compiled if it is not there yet."""
    found = _built()
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        partial = found.with_suffix(f".{os.getpid()}")
        torch, headers = _torch(), sysconfig.get_paths()["include"]
        places = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{headers}", f"-L{torch}/lib"]
        names = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{torch}/lib"]
        command = [_compiler(), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", _SOURCE, "-o", partial, *places, *names]
        subprocess.run(list(map(str, command)), check=True)
        partial.replace(found)
    return found


def environment(**settings: str) -> dict[str, str]:
    """Return an environment in which Python and its children have a simulated device."""
    paths = [str(HERE / "site"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    joined = os.pathsep.join(path for path in paths if path)
    own = {
        "SIMULATED_CUDA_LIBRARY": str(library()),
        "TORCH_DISABLE_NATIVE_JIT": "1",  # torch's own kernels in Triton, as of bmm, need a GPU
        "PYTHONPATH": joined,
    }
    return {**os.environ, **own, **settings}


def _built() -> Path:
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(_SOURCE.read_bytes() + version.encode() + sys.version.encode()).hexdigest()[:16]
    return HERE / "build" / f"{key}.so"


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is installed"
    assert spec.origin is not None, "and not only a folder"
    return Path(spec.origin).parent


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for name in (named, *_COMPILERS) if name and (path := shutil.which(name))), None)


if __name__ == "__main__":
    try:
        Settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if not sys.argv[1:]:
        print("usage: python -m tests.simulated_cuda MODULE [ARGUMENTS]", file=sys.stderr)
        sys.exit(2)
    if reason := refusal():
        print(f"skipped: no simulated CUDA device, because {reason}.")
        sys.exit(0)
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], environment())
