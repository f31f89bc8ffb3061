"""A sanitizer of Triton kernels: stray accesses, races and reads of memory that nobody wrote, each with its line.

It watches Triton's interpreter, and needs nothing else. (ttsem, which executes compiled kernels and finds the same,
wants a newer Python than this package, and patches torch for its whole process.) Within `sanitized()`:

- **Stray accesses.** Each tensor given to a kernel has addresses of its own, 2⁴⁴ apart, so whatever lies beside it in
  memory, an access through its pointer has to hit one of its values; a gap of a strided tensor is none.
- **Races.** Programs of a launch run in any order, and what one writes another sees only after this chain of events:
  the write, a barrier of the program's threads, an atomic operation that releases, an atomic operation by the other on
  the same value that acquires. So programs and values carry vector clocks, as in FastTrack (Flanagan, Freund:
  "FastTrack: efficient and precise dynamic race detection", 2009). Two accesses of which one writes, and which no such
  chain orders, are a race, also if the interpreter's order was harmless. A value that several programs read nobody may
  write. Within a program threads race if one reads or writes again, without a barrier between, what was stored; an
  atomic operation has the compiler's own barrier after it.
- **Unwritten memory.** Values of `torch.empty` and its like are unwritten, until a kernel or an operator of torch
  writes them. Reading them is an error in a kernel and in an operator.

What it cannot see: what the compiler makes of a kernel, streams, and memory that is freed while it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

_SPACE, _BASE = 44, 1 << 43  # bits of an argument's addresses; where in them its first value lies
_TRITON = str(Path(triton.__file__).parent)
_NOBODY, _SEVERAL = -1, -2
_MAKE_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# They look at a tensor and not at its values.
_LOOK = {"sym_size", "sym_stride", "is_same_size", "sym_numel", "sym_storage_offset"}


class Violation(Exception):
    """A kernel did what it must not. The message names the kind, the kernel's line and the program."""


class _Storage:
    """The memory of a tensor, byte by byte: whether it was written, and in this launch by whom and when."""

    def __init__(self, tensor: torch.Tensor, written: bool) -> None:
        self.kept, size = tensor, tensor.untyped_storage().nbytes()  # while it is kept, its address means this storage
        self.written = np.full(size, written)

    def begin_launch(self) -> None:
        size = len(self.written)
        self.writer, self.wrote, self.reader, self.read = (np.full(size, _NOBODY, np.int32) for _ in range(4))
        self.atomic = np.zeros(size, bool)


@dataclass
class _Argument:
    """A tensor given to a kernel: its storage, where it begins there, and which bytes from there on are its values."""

    name: str
    storage: _Storage
    begin: int
    values: np.ndarray


@dataclass
class _Launch:
    """The arguments, each program's clock, and what each value of atomic operations passes on."""

    num_programs: int
    arguments: list[_Argument] = field(default_factory=list)
    clocks: dict[int, np.ndarray] = field(default_factory=dict)
    released: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)


def _bytes_of(tensor: torch.Tensor, of_storage: np.ndarray) -> np.ndarray:
    """The bytes of a tensor's values [..., itemsize]: a view of an array with a value for each byte of its storage."""
    size = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        of_storage[tensor.storage_offset() * size :], (*tensor.shape, size), (*(n * size for n in tensor.stride()), 1)
    )


class Sanitizer(TorchDispatchMode):
    """Of kernels and operators run while it is entered. With a seed, programs run in a drawn order.

    Attributes:
        launches: how many kernels were watched.
        programs: how many programs they had.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.launches = self.programs = 0
        self._storages: dict[int, _Storage] = {}
        self._launch: _Launch | None = None
        self._program, self._order = 0, random.Random(seed) if seed is not None else None

    # Operators of torch.

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._launch is not None:  # the interpreter's own
            return function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        if name in _MAKE_UNWRITTEN:
            made = function(*args, **kwargs)
            self._storage_of(made, written=False)
            return made
        declared = function._schema.arguments
        given = list(zip(declared, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs]
        aliases = [argument.alias_info for argument, _ in given if argument.alias_info is not None]
        if name not in _LOOK and (not aliases or any(alias.is_write for alias in aliases)):
            self._check_operator(name, given)
        return function(*args, **kwargs)

    def _check_operator(self, name, given) -> None:
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    written = _bytes_of(tensor, self._storage_of(tensor).written)
                    if is_written:
                        written[...] = True
                    elif not written.all():
                        raise Violation(f"unwritten: torch's {name} reads {(~written).sum()} bytes that nobody wrote")

    def _storage_of(self, tensor: torch.Tensor, written: bool = True) -> _Storage:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._storages:
            self._storages[address] = _Storage(tensor, written)
        return self._storages[address]

    # Launches. The methods from here on stand in place of the interpreter's.

    def run(self, executor, call, *args, **kwargs) -> None:
        """A launch, from arguments to the last program."""
        self._launch = _Launch(int(np.prod(executor.grid)))
        for name, value in (*zip(executor.arg_names, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                storage = self._storage_of(value)
                storage.begin_launch()
                begin = value.storage_offset() * value.element_size()
                values = np.zeros(len(storage.written), bool)
                _bytes_of(value, values)[...] = True
                self._launch.arguments.append(_Argument(name, storage, begin, values[begin:]))
        self.launches, self.programs = self.launches + 1, self.programs + self._launch.num_programs
        own_pointers, places = interpreter._implicit_cvt, itertools.count()
        order = np.arange(self._launch.num_programs)
        if self._order is not None:
            self._order.shuffle(order)

        def pointers(value):
            made = own_pointers(value)
            if hasattr(value, "data_ptr"):
                made.handle.data = np.array([(next(places) << _SPACE) + _BASE], np.uint64)
            return made

        builder, own_place = interpreter.interpreter_builder, type(interpreter.interpreter_builder).set_grid_idx

        def place(x, y, z):
            grid = builder.grid_dim
            self._program = int(order[(x * grid[1] + y) * grid[2] + z])
            own_place(builder, *(int(n) for n in np.unravel_index(self._program, grid)))

        try:
            with patch.object(interpreter, "_implicit_cvt", pointers), patch.object(builder, "set_grid_idx", place):
                call(executor, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause = error
            while isinstance(cause, interpreter.InterpreterError) and cause.__cause__ is not None:
                cause = cause.__cause__
            raise cause from None
        finally:
            self._launch = None

    def load(self, builder, call, ptrs, mask, *rest, **named):
        """A load with a mask."""
        return call(builder, self._access(ptrs, mask, writes=False), mask, *rest, **named)

    def store(self, builder, call, ptrs, value, mask, *rest, **named):
        """A store with a mask."""
        return call(builder, self._access(ptrs, mask, writes=True), value, mask, *rest, **named)

    def atomic(self, builder, call, operation, ptr, value, mask, sem, scope):
        """A read and a write in one, which may release and acquire what else was written."""
        argument, at, size = self._place(ptr, mask)
        own, is_wide = self._clock(), scope.name != "CTA"
        for first in at.ravel().tolist():
            key = id(argument.storage), argument.begin + first
            passed_on = self._launch.released.setdefault(key, np.zeros(self._launch.num_programs, np.int32))
            if is_wide and "ACQUIRE" in sem.name:
                np.maximum(own, passed_on, out=own)
            if is_wide and "RELEASE" in sem.name:
                np.maximum(passed_on, own, out=passed_on)
        # One thread does it, so that its own release passes it on: it counts as before the last barrier.
        real = ptr
        if argument is not None:
            real = self._checked(ptr, argument, at, size, writes=True, time=own[self._program] - 1, atomic=True)
        own[self._program] += 1
        return call(builder, operation, real, value, mask, sem, scope)

    def barrier(self, builder, call):
        """A barrier of the program's threads."""
        self._clock()[self._program] += 1
        return call(builder)

    def _clock(self) -> np.ndarray:
        if self._program not in self._launch.clocks:
            clock = self._launch.clocks[self._program] = np.zeros(self._launch.num_programs, np.int32)
            clock[self._program] = 1
        return self._launch.clocks[self._program]

    # Accesses.

    def _access(self, ptrs, mask, writes):
        argument, at, size = self._place(ptrs, mask)
        if argument is None:
            return ptrs
        return self._checked(ptrs, argument, at, size, writes, self._clock()[self._program])

    def _place(self, ptrs, mask):
        """The argument that pointers belong to, and where in it, in bytes, values of which size are accessed."""
        used = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
        if not used.size:
            return None, used, 0
        places = used >> _SPACE
        known = self._launch.arguments
        if places.min() != places.max() or not 0 <= places[0] < len(known):
            self._raise("stray", "one access to several tensors, or none")
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        return known[places[0]], (used & ((1 << _SPACE) - 1)) - _BASE, size

    def _checked(self, ptrs, argument, at, size, writes, time, atomic=False):
        """The real pointers, once the access was found to be right and was noted down."""
        at = at.ravel()
        inside = (at >= 0) & (at + size <= len(argument.values))
        if not inside.all() or not argument.values[at].all():
            worst = at[~inside][0] if not inside.all() else at[~argument.values[at]][0]
            self._raise("stray", f"value {worst / size:g} of {argument.name}")
        places = (argument.begin + at[:, None] + np.arange(size)).ravel()
        storage, own = argument.storage, self._clock()
        if writes and len(np.unique(at)) < len(at):
            self._raise("race", f"one store writes a value of {argument.name} twice")
        if (atomic or not writes) and not storage.written[places].all():
            self._raise("unwritten", f"reads {argument.name} where nobody wrote")
        writers, readers = storage.writer[places], storage.reader[places]
        if not atomic or not storage.atomic[places][writers != _NOBODY].all():
            self._check_order(writers, storage.wrote[places], own, argument)
        if writes:
            self._check_order(readers, storage.read[places], own, argument, of_reads=True)
            storage.written[places], storage.writer[places], storage.wrote[places] = True, self._program, time
            storage.reader[places], storage.atomic[places] = _NOBODY, atomic
        else:
            alone = (readers == _NOBODY) | (readers == self._program)
            storage.reader[places], storage.read[places] = np.where(alone, self._program, _SEVERAL), time
        real = argument.storage.kept.untyped_storage().data_ptr() + argument.begin
        fake = (self._launch.arguments.index(argument) << _SPACE) + _BASE
        shifted = (ptrs.data.astype(np.int64) - fake + real).astype(np.uint64)
        return interpreter.TensorHandle(shifted, ptrs.dtype)

    def _check_order(self, others, times, own, argument, of_reads=False) -> None:
        """Each access by `others` at its time is known to this program: ordered before what it does now."""
        if (others == _SEVERAL).any():
            self._raise("race", f"writes {argument.name}, which other programs read")
        # What a program's threads read they may write: the same thread does, in all kernels here.
        relevant = (others != _NOBODY) & ~((others == self._program) & of_reads)
        unordered = others[relevant][times[relevant] >= own[others[relevant]]]
        if unordered.size:
            self._raise("race", f"{argument.name}, with program {unordered[0]}")

    def _raise(self, kind, what):
        frame = sys._getframe(1)
        # The line of the kernel itself, and not of the interpreter or of this file.
        while frame.f_code.co_filename.startswith((_TRITON, __file__)):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} ({frame.f_code.co_name})"
        raise Violation(f"{kind}: {where}, program {self._program}: {what}")


@contextlib.contextmanager
def sanitized(seed: int | None = None) -> Iterator[Sanitizer]:
    """Raise Violation at the first wrong access by a kernel or an operator in the block.

    With a seed the programs of a launch run in an order drawn from it, else in that of their numbers.
    """
    watch, builder = Sanitizer(seed), type(interpreter.interpreter_builder)
    places = [
        (interpreter.GridExecutor, "__call__", watch.run), (builder, "create_masked_load", watch.load),
        (builder, "create_masked_store", watch.store), (builder, "create_atomic_rmw", watch.atomic),
        (builder, "create_barrier", watch.barrier),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, method in places:
            own = getattr(owner, name)

            def instead(self, *args, own=own, method=method, **kwargs):
                return method(self, own, *args, **kwargs)

            stack.enter_context(patch.object(owner, name, instead))
        for name in ("create_atomic_cas", "create_atomic_load", "create_atomic_store", "create_descriptor_load",
                     "create_descriptor_store", "create_descriptor_gather", "create_descriptor_scatter"):  # fmt: skip
            stack.enter_context(patch.object(builder, name, _unknown))
        stack.enter_context(watch)
        yield watch


def _unknown(*_, **__):
    raise NotImplementedError("the sanitizer does not know this kind of access")
