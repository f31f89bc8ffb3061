"""Gives a simulated CUDA device to a Python process and its children, before torch is imported.

Python imports this module at its start if the folder is on PYTHONPATH; see `tests/simulated_cuda/__main__.py`.
"""

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path


class _TorchC(MetaPathFinder):
    """Loads the library before `torch._C`, whose dispatcher else has no CUDA, and adds to it what CUDA builds have."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch._C":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        folder = Path(spec.origin).parent / "lib"
        for each in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
            ctypes.CDLL(str(folder / each), mode=ctypes.RTLD_GLOBAL)
        library, execute = ctypes.PyDLL(os.environ["SIMULATED_CUDA_LIBRARY"]), spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.modules["torch"]._C = module
            from tests.simulated_cuda.names import names  # noqa: PLC0415  torch._C is there by now

            vars(module).update(names(library))

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SIMULATED_CUDA_LIBRARY"):
    sys.meta_path.insert(0, _TorchC())
