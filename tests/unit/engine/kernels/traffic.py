"""Counts the bytes that kernels read and write in global memory, as Triton's interpreter runs them."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
from triton.runtime import interpreter

from crossbow_py.core import triton_launch


class Traffic:
    """Bytes by kernel; those of single values (table entries, coefficients) are counted apart as well."""

    def __init__(self):
        self.bytes, self._entries, self.kernel = Counter(), Counter(), None

    def add(self, pointers, mask):
        values = int(np.count_nonzero(np.broadcast_to(mask, pointers.data.shape)))
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.bytes[self.kernel] += values * size
        if pointers.data.size == 1:
            self._entries[self.kernel] += values * size

    def entries(self, kernel):
        return self._entries[kernel]


@contextlib.contextmanager
def counted_traffic():
    """Of the kernels launched in the block."""
    traffic, builder = Traffic(), interpreter.interpreter_builder
    kept = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    launched = triton_launch._RECORDS

    class Names(list):
        def append(self, made):
            traffic.kernel = made.kernel

    def load(pointers, mask, *rest, **named):
        traffic.add(pointers, mask.data)
        return kept["create_masked_load"](pointers, mask, *rest, **named)

    def store(pointers, value, mask, *rest, **named):
        traffic.add(pointers, mask.data)
        return kept["create_masked_store"](pointers, value, mask, *rest, **named)

    names = Names()
    launched.append(names)
    builder.create_masked_load, builder.create_masked_store = load, store
    try:
        yield traffic
    finally:
        launched[:] = [record for record in launched if record is not names]
        for name in kept:
            delattr(builder, name)
