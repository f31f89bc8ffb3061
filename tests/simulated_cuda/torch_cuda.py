"""The simulation of a process: its devices, and what C++ asks of them."""

from __future__ import annotations

import atexit
import os
import sys
import uuid
from ctypes import CFUNCTYPE, Structure, byref, c_int, c_int64, c_size_t, c_void_p, py_object

import torch

from tests.simulated_cuda.memory import DeviceMemory, OutOfMemoryError, PinnedMemory
from tests.simulated_cuda.scheduler import CudaError, Event, Scheduler

_TENSOR = c_void_p
_RACES = 86  # the exit code of a process in which accesses raced, with SIMULATED_CUDA_STRICT=1


class Callbacks(Structure):
    """The functions that `device.cpp` asks; in its order."""

    _fields_ = (
        ("allocate", CFUNCTYPE(c_void_p, c_int, c_size_t, c_int64)),
        ("allocate_pinned", CFUNCTYPE(c_void_p, c_size_t)),
        ("record", CFUNCTYPE(c_int, c_int64, c_int, c_int64)),
        ("wait", CFUNCTYPE(c_int, c_int64, c_int, c_int64)),
        ("query", CFUNCTYPE(c_int, c_int64)),
        ("synchronize_event", CFUNCTYPE(c_int, c_int64)),
        ("query_stream", CFUNCTYPE(c_int, c_int, c_int64)),
        ("synchronize_stream", CFUNCTYPE(c_int, c_int, c_int64)),
        ("synchronize_device", CFUNCTYPE(c_int, c_int)),
        ("use_on_stream", CFUNCTYPE(c_int, c_void_p, c_int, c_int64)),
        ("use_pinned_on_stream", CFUNCTYPE(c_int, c_void_p, c_int, c_int64)),
    )


def declare(library):
    """Say what the functions of `device.cpp` take and return."""
    for name, result, *arguments in (
        ("sim_devices", None, c_int),
        ("sim_begin", None, c_void_p),
        ("sim_memory", None, c_int, c_void_p, c_void_p),
        ("sim_next_freed", c_int, c_void_p, c_void_p),
        ("sim_device", c_int),
        ("sim_exchange_device", c_int, c_int),
        ("sim_stream", c_int64, c_int),
        ("sim_set_stream", None, c_int, c_int64),
        ("sim_new_event", c_int64),
        ("sim_default_generator", py_object, c_int),
        ("sim_storage_bytes", c_size_t, _TENSOR),
        ("sim_storage_data", c_void_p, _TENSOR),
        ("sim_host", py_object, _TENSOR),
        ("sim_meta", py_object, _TENSOR),
        ("sim_new", py_object, c_void_p, c_size_t, c_int, _TENSOR),
        ("sim_view", py_object, _TENSOR, _TENSOR),
        ("sim_resize", None, _TENSOR, _TENSOR, c_void_p, c_size_t),
        ("sim_as_number", None, _TENSOR),
        ("sim_set", None, _TENSOR, c_void_p, _TENSOR, c_int64),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Simulation:
    """The one simulation of a process; begun by `torch._C._cuda_init`, as CUDA is."""

    def __init__(self, library, settings):
        from tests.simulated_cuda.operators import Operators, below  # noqa: PLC0415  torch is complete by now

        self.library, self.settings, self.pid = library, settings, os.getpid()
        self.scheduler = Scheduler(settings.order, settings.seed)
        self.scheduler.around_work = below
        devices = range(settings.num_devices)
        self.memories = {i: DeviceMemory(i, self.scheduler, settings.total_bytes) for i in devices}
        self.memories["pinned"] = PinnedMemory(self.scheduler)
        self.scheduler.block_of = self.block_of
        self.operators = Operators(library, self.scheduler, self.memories)
        self.scheduler.races.is_pinned = self.memories["pinned"].arena.holds
        self.events = {}
        self._callbacks = self._make_callbacks()
        library.sim_begin(byref(self._callbacks))
        for index, memory in self.memories.items():
            library.sim_memory(-1 if index == "pinned" else index, memory.arena.first, memory.arena.end)
        self._register()
        torch.cuda.default_generators = tuple(library.sim_default_generator(i) for i in devices)
        torch.cuda._get_device_properties = self.properties
        _let_storages_move()
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.simulated_cuda.triton_kernels import enqueue_launches  # noqa: PLC0415  which takes a while

            enqueue_launches(self.operators)

    def block_of(self, at):
        return next(m.arena for m in self.memories.values() if m.arena.first <= at < m.arena.end).block_of(at)

    # ---- what C++ asks; an exception becomes -1, as there is nobody to catch it on the way

    def _make_callbacks(self):
        scheduler, stream = self.scheduler, self.scheduler.stream

        def event(handle):
            return self.events.setdefault(handle, Event())

        def allocate(device, size, number):
            try:
                return self.operators.allocate(device, size, stream(device, number))
            except (torch.OutOfMemoryError, OutOfMemoryError, CudaError):
                return None

        def allocate_pinned(size):
            with scheduler.lock:
                scheduler.forbid_in_capture()
                self.operators.return_freed()
                return self.memories["pinned"].allocate(size)

        def use_on(memory, device, number):
            self.memories[device].use_on(memory, stream(device, number))

        def use_pinned_on(memory, device, number):
            return self.memories["pinned"].use_on(memory, stream(device, number))

        given = {
            "allocate": allocate,
            "allocate_pinned": _or(None, allocate_pinned),
            "record": _or(-1, lambda handle, device, number: scheduler.record(event(handle), stream(device, number))),
            "wait": _or(-1, lambda handle, device, number: scheduler.wait(stream(device, number), event(handle))),
            "query": _or(-1, lambda handle: scheduler.query(event(handle))),
            "synchronize_event": _or(-1, lambda handle: scheduler.synchronize_event(event(handle))),
            "query_stream": _or(-1, lambda device, number: scheduler.query_stream(stream(device, number))),
            "synchronize_stream": _or(-1, lambda device, number: scheduler.synchronize_stream(stream(device, number))),
            "synchronize_device": _or(-1, scheduler.synchronize_device),
            "use_on_stream": _or(-1, use_on),
            "use_pinned_on_stream": _or(-1, use_pinned_on),
        }
        return Callbacks(*(kind(given[name]) for name, kind in Callbacks._fields_))

    # ---- operators

    def _register(self):
        operators, aten = self.operators, torch.ops.aten
        self._everything = torch.library.Library("_", "IMPL")
        self._everything.fallback(operators.call, "CUDA")
        self._own = torch.library.Library("aten", "IMPL")
        for name in ("convolution", "convolution_backward"):  # else torch chooses a CUDA library, which is not there
            op = getattr(aten, name).default
            self._own.impl(name, lambda *args, _op=op, **kwargs: operators.call(_op, *args, **kwargs), "CUDA")
        self._own.impl("copy_", operators.copy_, "CUDA")
        self._own.impl("record_stream", self._record_stream, "CUDA")
        self._own.impl("resize_", self._resize_, "CUDA")
        self._own.impl("set_.source_Storage_storage_offset", self._set_, "CUDA")
        self._own.impl("set_.source_Tensor", self._set_tensor, "CUDA")
        self._own.impl("set_.source_Storage", self._set_storage, "CUDA")
        self._own.impl("set_", self._set_nothing, "CUDA")

    def _record_stream(self, tensor, stream):
        at, user = self.library.sim_storage_data(tensor._cdata), (stream.device_index, stream.stream_id)
        if at:
            with self.scheduler.lock:
                self.memories[tensor.device.index].use_on(at, self.scheduler.stream(*user))

    def _resize_(self, tensor, size, memory_format=None):
        memory_format = memory_format or torch.contiguous_format
        like = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format)
        self.operators.resize(tensor, like)
        return tensor

    def _set_(self, tensor, storage, offset, size, stride=()):
        stride = stride or torch.empty(size, device="meta").stride()
        like = torch.empty_strided(size, stride, device="meta")
        self.library.sim_set(tensor._cdata, storage._cdata, like._cdata, offset)
        return tensor

    def _set_tensor(self, tensor, source):
        return self._set_(tensor, source.untyped_storage(), source.storage_offset(), source.shape, source.stride())

    def _set_storage(self, tensor, storage):
        return self._set_(tensor, storage, 0, (storage.nbytes() // tensor.element_size(),))

    def _set_nothing(self, tensor):
        return self._set_storage(tensor, torch.empty(0, device=tensor.device).untyped_storage())

    # ---- facts

    def properties(self, device):
        major, minor = self.settings.capability
        if not 0 <= device < self.settings.num_devices:
            raise AssertionError("Invalid device id")
        return torch._C._CudaDeviceProperties(
            name="simulated CUDA device", major=major, minor=minor, total_memory=self.settings.total_bytes,
            multi_processor_count=132, is_integrated=False, is_multi_gpu_board=False, warp_size=32,
            max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
            shared_memory_per_block=48 << 10, shared_memory_per_multiprocessor=228 << 10,
            shared_memory_per_block_optin=227 << 10, gcnArchName="",
            uuid=uuid.UUID(int=self.settings.visible[device] + 1),
        )  # fmt: skip

    def memory_statistics(self, device):
        self.operators.return_freed()
        own = self.memories[device].statistics

        def total(current=0, peak=0):
            return {"current": current, "peak": peak, "allocated": 0, "freed": 0}

        def kinds(*counts):
            return {pool: total(*counts) for pool in ("all", "small_pool", "large_pool")}

        return {
            "allocated_bytes": kinds(own.allocated, own.most_allocated),
            "active_bytes": kinds(own.allocated, own.most_allocated),
            "requested_bytes": kinds(own.allocated, own.most_allocated),
            "reserved_bytes": kinds(own.reserved, own.most_reserved),
            "allocation": kinds(own.blocks, own.most_blocks),
            "active": kinds(own.blocks, own.most_blocks),
            "segment": kinds(own.segments, own.most_segments),
            **dict.fromkeys(("inactive_split", "inactive_split_bytes"), kinds()),  # blocks are never split
            **dict.fromkeys(("oversize_allocations", "oversize_segments"), total()),
            "num_alloc_retries": own.num_retries,
            "num_ooms": own.num_ooms,
        }


def _let_storages_move():
    """Have storages cloned and moved as tensors are: a CPU build makes no storage on CUDA by itself."""
    clone, to_host, move = torch.UntypedStorage.clone, torch.UntypedStorage.cpu, torch.UntypedStorage.to

    def bytes_of(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))

    def moved(self, *, device, non_blocking=False):
        if self.is_cuda or torch.device(device).type == "cuda":
            return bytes_of(self).to(device, non_blocking=non_blocking).untyped_storage()
        return move(self, device=device, non_blocking=non_blocking)

    def to_device(self, device=None, non_blocking=False):
        return moved(self, device=torch.device("cuda") if device is None else device, non_blocking=non_blocking)

    torch.UntypedStorage.to, torch.UntypedStorage.cuda = moved, to_device
    torch.UntypedStorage.clone = lambda self: bytes_of(self).clone().untyped_storage() if self.is_cuda else clone(self)
    torch.UntypedStorage.cpu = lambda self: bytes_of(self).cpu().untyped_storage() if self.is_cuda else to_host(self)


def _or(failed, function):
    """The function, with its exceptions as a number: 0 for None, 0 or 1 for a bool."""

    def called(*args):
        try:
            found = function(*args)
        except (CudaError, RuntimeError, AssertionError):
            return failed
        return found if failed is None else int(found or 0)

    return called


class _Process:
    """What there is once in a process: the C++ half, the settings, and the simulation once CUDA is initialised."""

    library = settings = simulation = None

    def begin(self):
        if not self.settings.num_devices:
            raise RuntimeError("No CUDA GPUs are available")
        self.simulation = Simulation(self.library, self.settings)
        if self.settings.is_strict:
            atexit.register(_end_with_races, self.simulation)


process = _Process()


def simulation():
    """The simulation of this process; CUDA is initialised if it is not."""
    torch.cuda.init()
    return process.simulation


def _end_with_races(simulation):
    """Name the accesses that raced, if any did, and end with the exit code that says so."""
    if simulation.pid != os.getpid():
        return  # a fork, which has no device
    if found := simulation.scheduler.races.take():
        print(*(f"race: {each}" for each in found), sep="\n", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(_RACES)
