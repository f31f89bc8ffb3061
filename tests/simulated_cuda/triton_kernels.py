"""Triton kernels on a simulated device: a launch is enqueued on the current stream, and done by Triton's interpreter.

For processes with TRITON_INTERPRET=1; without it there is no driver for Triton, as on a machine without a GPU.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton.ir import ROUNDING_MODE
from triton.runtime import interpreter

from tests.simulated_cuda.operators import tensors_in
from tests.simulated_cuda.scheduler import Work


def enqueue_launches(operators):
    """Have the interpreter do launches with tensors of a device when their stream gets there."""
    whole = interpreter.GridExecutor.__call__

    def run_now(self, *args, **kwargs):
        _patched.clear()
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # a GPU does not warn of infinities either
            warnings.simplefilter("ignore")
            whole(self, *args, **kwargs)

    def launch(self, *args, **kwargs):
        devices = {each.device for each in tensors_in([*args, *kwargs.values()])}
        if all(device.type != "cuda" for device in devices):
            return run_now(self, *args, **kwargs)
        if len(devices) > 1:
            raise ValueError(f"Pointer argument cannot be accessed from Triton ({devices})")
        operators.check_lost()
        stream = operators.current_stream(devices.pop().index)

        def on_host(value):
            return operators.on_host(value) if isinstance(value, torch.Tensor) else value

        own, named = [on_host(each) for each in args], {name: on_host(each) for name, each in kwargs.items()}
        operators.scheduler.enqueue(stream, Work(self.fn.__name__, lambda: run_now(self, *own, **named)))
        return None

    # As kernels are compiled. Kernels are tried with these checks on CPU tensors, and they take half of the time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.GridExecutor.__call__ = launch
    interpreter._convert_float = _convert_float
    interpreter.InterpretedFunction.__call__ = _call_device_function


_converted = interpreter._convert_float


def _convert_float(values, given, wanted, rounding):
    """Convert floats. Triton's own cuts float32 to bfloat16 off, and compiled kernels round it to the nearest even."""
    if (given, wanted) != (tl.float32, tl.bfloat16) or rounding == ROUNDING_MODE.RTZ:
        return _converted(values, given, wanted, rounding)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(values.shape)


_patched = set()  # modules of Triton's language that the launch under way has patched


def _call_device_function(self, *args, **kwargs):
    """Call a function from a kernel. Triton's own patches its language at every call, which takes half of the time."""
    language = self.fn.__module__.startswith("triton.")
    if language not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(language)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
