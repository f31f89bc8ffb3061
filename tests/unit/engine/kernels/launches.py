"""Counts what a round would launch on a GPU: kernels of our own, and torch's operators that do work."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.core import triton_launch

# Views are known by their schema; these allocate, or look at tensors without launching anything.
_NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_reshape_alias", "lift_fresh",
    "_unsafe_view", "sym_size", "sym_stride", "is_same_size", "_local_scalar_dense",
}  # fmt: skip


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        name = schema.name.split("::")[1]
        alias = schema.arguments[0].alias_info if schema.arguments else None
        is_view = alias is not None and not alias.is_write
        if not is_view and name not in _NO_LAUNCH and not _is_interpreting():
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


def _is_interpreting():
    """Whether it is Triton's interpreter that calls, which copies the arguments of kernels to and fro."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith("core/triton_launch.py"):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def counted_launches():
    """Launches in the block, by name: yields a Counter that is whole when the block is left."""
    total, operators = Counter(), _Operators()
    with triton_launch.recorded() as kernels, operators:
        yield total
    total.update(operators.names)
    total.update(made.kernel for made in kernels)
