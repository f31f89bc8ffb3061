"""What torch's own Python asks of `torch._C` for CUDA, on simulated devices. torch.cuda itself is torch's."""

from __future__ import annotations

import ctypes
import itertools
import os
import types
import uuid
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_int, c_int64, c_size_t, c_void_p, py_object

import torch

from tests.simulated_cuda.memory import DeviceMemory, OutOfMemoryError, PinnedMemory
from tests.simulated_cuda.scheduler import CudaError, Event, Scheduler

_TENSOR, _DEVICE_TYPE = c_void_p, 1  # DeviceType::CUDA


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
        ("sim_begin", None, c_void_p, c_int),
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
        ("sim_set", None, _TENSOR, c_void_p, _TENSOR, c_int64),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Settings:
    """The device that is simulated, from the environment, which children inherit."""

    def __init__(self, environment=os.environ):
        self.order = environment.get("SIMULATED_CUDA_ORDER", "random")
        self.seed = int(environment.get("SIMULATED_CUDA_SEED", "0"))
        self.num_devices = int(environment.get("SIMULATED_CUDA_DEVICES", "1"))
        self.total_bytes = int(float(environment.get("SIMULATED_CUDA_GIB", "4")) * 2**30)
        self.capability = tuple(map(int, environment.get("SIMULATED_CUDA_CAPABILITY", "9.0").split(".")))


class Simulation:
    """The one simulation of a process; begun by `torch._C._cuda_init`, as CUDA is."""

    def __init__(self, library, settings):
        from tests.simulated_cuda.operators import Operators, below  # torch is complete by now

        self.library, self.settings, self.pid = library, settings, os.getpid()
        self.scheduler = Scheduler(settings.order, settings.seed)
        self.scheduler.around_work = below
        devices = range(settings.num_devices)
        self.memories = {i: DeviceMemory(i, self.scheduler, settings.total_bytes) for i in devices}
        self.memories["pinned"] = PinnedMemory(self.scheduler)
        self.scheduler.block_of = self.block_of
        self.operators = Operators(library, self.scheduler, self.memories)
        self.events = {}
        self._callbacks = self._make_callbacks()
        library.sim_begin(byref(self._callbacks), settings.num_devices)
        for index, memory in self.memories.items():
            library.sim_memory(-1 if index == "pinned" else index, memory.arena.first, memory.arena.end)
        self._register()
        torch.cuda.default_generators = tuple(library.sim_default_generator(i) for i in devices)
        torch.cuda._get_device_properties = self.properties
        _let_storages_move()
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.simulated_cuda.triton_kernels import enqueue_launches  # Triton takes a while to be imported

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
            "use_pinned_on_stream": _or(-1, lambda at, device, number: self.memories["pinned"].use_on(at, stream(device, number))),
        }
        return Callbacks(*(kind(given[name]) for name, kind in Callbacks._fields_))

    # ---- operators

    def _register(self):
        operators, aten = self.operators, torch.ops.aten
        self._everything = torch.library.Library("_", "IMPL")
        self._everything.fallback(operators.call, "CUDA")
        self._own = torch.library.Library("aten", "IMPL")
        for name in ("convolution", "convolution_backward"):  # else torch's choice of a CUDA library, which is not there
            op = getattr(aten, name).default
            self._own.impl(name, lambda *args, _op=op, **kwargs: operators.call(_op, *args, **kwargs), "CUDA")
        self._own.impl("copy_", operators.copy_, "CUDA")
        self._own.impl("record_stream", self._record_stream, "CUDA")
        self._own.impl("resize_", self._resize_, "CUDA")
        self._own.impl("set_.source_Storage_storage_offset", self._set_, "CUDA")
        self._own.impl("set_.source_Tensor", self._set_tensor, "CUDA")
        self._own.impl("set_.source_Storage", self._set_storage, "CUDA")
        self._own.impl("set_", lambda tensor: self._set_storage(tensor, torch.empty(0, device=tensor.device).untyped_storage()), "CUDA")

    def _record_stream(self, tensor, stream):
        at = self.library.sim_storage_data(tensor._cdata)
        if at:
            with self.scheduler.lock:
                self.memories[tensor.device.index].use_on(at, self.scheduler.stream(stream.device_index, stream.stream_id))

    def _resize_(self, tensor, size, memory_format=None):
        like = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
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
            shared_memory_per_block_optin=227 << 10, uuid=uuid.UUID(int=device + 1), gcnArchName="",
        )  # fmt: skip

    def memory_statistics(self, device):
        self.operators.return_freed()
        own = self.memories[device].statistics

        def kinds(current, peak):
            whole = {"current": current, "peak": peak, "allocated": 0, "freed": 0}
            return {"all": whole, "small_pool": dict(whole), "large_pool": dict(whole)}

        return {
            "allocated_bytes": kinds(own.allocated, own.most_allocated),
            "active_bytes": kinds(own.allocated, own.most_allocated),
            "requested_bytes": kinds(own.allocated, own.most_allocated),
            "reserved_bytes": kinds(own.reserved, own.most_reserved),
            "num_alloc_retries": own.num_retries,
            "num_ooms": own.num_ooms,
        }


def _let_storages_move():
    """Have storages made, cloned and copied to the host by tensors: a CPU build knows no storage on CUDA by name."""
    clone, to_host = torch.UntypedStorage.clone, torch.UntypedStorage.cpu

    def bytes_of(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))

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


_begun = None


def simulation():
    """The simulation of this process; CUDA is initialised if it is not."""
    torch.cuda.init()
    return _begun


def names(library, settings):
    """Return what `torch._C` lacks, by name; called before the rest of torch is imported."""
    c = torch._C

    def init():
        global _begun
        _begun = Simulation(declare(library), settings)

    def stream_of(device, number):
        return simulation().scheduler.stream(device, number)

    def raising(function):
        """Errors of the runtime as torch raises them."""

        def called(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except CudaError as error:
                raised = torch.AcceleratorError(str(error))
                raised.error_code = error.code
                raise raised from None

        return called

    class _CudaStreamBase(c.Stream):
        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0, stream_ptr=0, **_):
            torch.cuda._lazy_init()
            if stream_id or device_index or device_type:
                return c.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return c.Stream.__new__(cls, device=torch.device("cuda", library.sim_device()), priority=priority)

        def __init__(self, *args, **kwargs):
            pass

        cuda_stream = property(lambda self: self.stream_id)
        _own = property(lambda self: stream_of(self.device_index, self.stream_id))
        query = raising(lambda self: simulation().scheduler.query_stream(self._own))
        synchronize = raising(lambda self: simulation().scheduler.synchronize_stream(self._own))

    class _CudaEventBase:
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            made = object.__new__(cls)
            made.timing, made.event, made.device = enable_timing, Event(), None
            made.cuda_event = id(made.event)
            return made

        def __init__(self, *args, **kwargs):
            pass

        record = raising(lambda self, stream: simulation().scheduler.record(self.event, stream._own))
        wait = raising(lambda self, stream: simulation().scheduler.wait(stream._own, self.event))
        query = raising(lambda self: simulation().scheduler.query(self.event))
        synchronize = raising(lambda self: simulation().scheduler.synchronize_event(self.event))

        def elapsed_time(self, end):
            if not (self.timing and end.timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.event.time_s is None or end.event.time_s is None:
                raise ValueError("Both events must be completed before calculating elapsed time.")
            return (end.event.time_s - self.event.time_s) * 1000

    class _CUDAGraph:
        def __new__(cls, keep_graph=False):
            made = object.__new__(cls)
            made._graph = made._pool = made._capture = None
            return made

        def __init__(self, *args, **kwargs):
            pass

        @raising
        def capture_begin(self, pool=None, capture_error_mode="global"):
            sim = simulation()
            stream = sim.operators.current_stream()
            self._pool = pool or (0, next(_POOLS))
            memory = sim.memories[stream.device]
            self._capture = sim.scheduler.begin_capture(stream, self._pool, capture_error_mode)
            memory.pools[self._pool] = memory.pools.get(self._pool, 0) + 1
            memory.underway.append(self._pool)
            self._memory, self._stream = memory, stream

        @raising
        def capture_end(self):
            sim = simulation()
            stream = sim.operators.current_stream()
            if stream is not self._stream:
                raise RuntimeError("Capture must end on the same stream it began on.")
            graph = sim.scheduler.end_capture(stream)  # if it raises, the allocator believes for good that it goes on
            self._memory.underway.remove(self._pool)
            self._graph = graph
            self._draws = getattr(self._capture, "draws", None)
            sim.operators.return_freed()
            self._held = self._memory.held_by(graph, self._pool)

        @raising
        def replay(self):
            if self._graph is None:
                raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
            sim = simulation()
            sim.operators.return_freed()
            if self._memory.freed_of(self._held):
                name = f"graph of {self._graph.name}"
                sim.scheduler.races.found[name, "freed"] = f"{name} uses memory that was freed since its capture"
            sim.scheduler.replay(self._graph, sim.operators.current_stream(), self._drawing())

        def _drawing(self):
            if self._draws is None:
                return None
            generator = torch.cuda.default_generators[self._stream.device]
            base = generator.initial_seed(), generator.get_offset()
            generator.set_offset(base[1] + self._draws["count"])
            return lambda: self._draws.update(base=base)

        def reset(self):
            if self._pool is not None and self._capture is not None:
                with simulation().scheduler.lock:
                    self._memory.pools[self._pool] -= 1
            self._graph = self._capture = None

        def __del__(self):
            try:
                self.reset()
            except Exception:
                pass  # the interpreter is on its way out

        def pool(self):
            return self._pool

        def register_generator_state(self, generator):
            pass

        def enable_debug_mode(self):
            pass

    def current_stream(device):
        return library.sim_stream(device), device, _DEVICE_TYPE

    def set_stream(stream_id, device_index, device_type):
        library.sim_exchange_device(device_index)
        library.sim_set_stream(device_index, stream_id)

    def with_memory(change):
        def called(device, *args):
            sim = simulation()
            with sim.scheduler.lock:
                sim.operators.return_freed()
                return change(sim.memories[device], *args)

        return called

    def empty_cache():
        if _begun is not None:
            with _begun.scheduler.lock:
                _begun.operators.return_freed()
                for memory in (each for index, each in _begun.memories.items() if index != "pinned"):
                    memory.empty_cache()

    def reset_peaks(memory):
        own = memory.statistics
        own.most_allocated, own.most_reserved = own.allocated, own.reserved

    def free_and_total(device):
        memory = simulation().memories[device]
        return memory.total_bytes - memory.statistics.reserved, memory.total_bytes

    class _Properties(types.SimpleNamespace):
        pass

    _Properties.__name__ = "_CudaDeviceProperties"
    runtime = types.ModuleType("cudart")
    vars(runtime).update(
        cudaMemGetInfo=free_and_total, cudaError=types.SimpleNamespace(success=0), cudaGetErrorString=str,
        cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0,
    )  # fmt: skip
    return {
        "_has_cuda": True,
        "_CudaDeviceProperties": _Properties,
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CUDAGraph": _CUDAGraph,
        "_cudart": runtime,
        "_graph_pool_handle": lambda: (0, next(_POOLS)),
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: _begun is not None and _begun.pid != os.getpid(),
        "_cuda_getDeviceCount": lambda: settings.num_devices,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getDriverVersion": lambda: 13000,
        "_cuda_getDevice": lambda: library.sim_device(),
        "_cuda_setDevice": lambda device: library.sim_exchange_device(device),
        "_cuda_exchangeDevice": lambda device: library.sim_exchange_device(device),
        "_cuda_maybeExchangeDevice": lambda device: library.sim_exchange_device(device),
        "_cuda_synchronize": raising(lambda: simulation().scheduler.synchronize_device(library.sim_device())),
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": lambda device: (0, device, _DEVICE_TYPE),
        "_cuda_getCurrentRawStream": lambda device: library.sim_stream(device),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: simulation().operators.current_stream().capture is not None,
        "_cuda_emptyCache": empty_cache,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": lambda device: simulation().memory_statistics(device),
        "_cuda_resetPeakMemoryStats": with_memory(reset_peaks),
        "_cuda_resetAccumulatedMemoryStats": with_memory(lambda memory: None),
        "_cuda_setMemoryFraction": lambda fraction, device: setattr(simulation().memories[device], "fraction", fraction),
        "_cuda_getMemoryFraction": lambda device: simulation().memories[device].fraction,
        "_cuda_clearCublasWorkspaces": lambda: simulation().operators.clear_workspaces(),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(simulation().operators, "sync_debug_mode", mode),
        "_cuda_get_sync_debug_mode": lambda: simulation().operators.sync_debug_mode,
        "_cuda_canDeviceAccessPeer": lambda device, other: True,
    }


_POOLS = itertools.count(1)
_ = ctypes, POINTER
