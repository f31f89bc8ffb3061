"""What torch's own Python asks of `torch._C` for CUDA, by name, on simulated devices. torch.cuda itself is torch's."""

from __future__ import annotations

import os
import sys
import types

import torch

from tests.simulated_cuda.cuda_objects import CudaEvent, CudaGraph, CudaStream, new_pool, raising
from tests.simulated_cuda.scheduler import CudaError
from tests.simulated_cuda.settings import Settings
from tests.simulated_cuda.torch_cuda import declare, process, simulation

_DEVICE_TYPE = 1  # DeviceType::CUDA


class DeviceProperties(types.SimpleNamespace):
    """The properties of a device."""


DeviceProperties.__name__ = "_CudaDeviceProperties"


def names(library):
    """Return what `torch._C` lacks, by name; called before the rest of torch is imported."""
    process.library, process.settings = declare(library), Settings()
    library.sim_devices(process.settings.num_devices)
    return {
        "_has_cuda": True,
        "_CudaDeviceProperties": DeviceProperties,
        "_CudaStreamBase": CudaStream,
        "_CudaEventBase": CudaEvent,
        "_CUDAGraph": CudaGraph,
        "_cudart": _runtime(),
        "_graph_pool_handle": new_pool,
        "_c10d_init": _with_nccl(torch._C._c10d_init),
        **_of_process(process.settings),
        **_of_devices(library),
        **_of_memory(),
    }


def _with_nccl(init):
    """Return a `torch._C._c10d_init` after which there is NCCL as well."""

    def called():
        done = init()
        from tests.simulated_cuda.nccl import TIMEOUT, ProcessGroupNCCL  # noqa: PLC0415  its bases are there by now

        module = sys.modules["torch._C._distributed_c10d"]
        module.ProcessGroupNCCL, module._DEFAULT_PG_NCCL_TIMEOUT = ProcessGroupNCCL, TIMEOUT
        return done

    return called


def _runtime():
    runtime = types.ModuleType("cudart")
    vars(runtime).update(
        cudaMemGetInfo=_free_and_total, cudaError=types.SimpleNamespace(success=0), cudaGetErrorString=str,
        cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0,
    )  # fmt: skip
    return runtime


def _of_process(settings):
    return {
        "_cuda_init": process.begin,
        "_cuda_isInBadFork": lambda: process.simulation is not None and process.simulation.pid != os.getpid(),
        "_cuda_getDeviceCount": lambda: settings.num_devices,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getDriverVersion": lambda: 13000,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda device, other: True,
    }


def _plain(function):
    """Return a function of C as one of Python: torch keeps those of `torch._C` in sets, and C's have no hash."""
    return lambda *args: function(*args)  # noqa: PLW0108


def _of_devices(library):
    @raising
    def exchange_device(index):
        if index >= process.settings.num_devices:
            raise CudaError(101, "invalid device ordinal")
        return library.sim_exchange_device(index)

    def set_stream(stream_id, device_index, device_type):
        library.sim_exchange_device(device_index)
        library.sim_set_stream(device_index, stream_id)

    def set_sync_debug_mode(mode):
        simulation().operators.sync_debug_mode = mode

    return {
        "_cuda_getDevice": _plain(library.sim_device),
        "_cuda_setDevice": exchange_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_synchronize": raising(lambda: simulation().scheduler.synchronize_device(library.sim_device())),
        "_cuda_getCurrentStream": lambda device: (library.sim_stream(device), device, _DEVICE_TYPE),
        "_cuda_getDefaultStream": lambda device: (0, device, _DEVICE_TYPE),
        "_cuda_getCurrentRawStream": _plain(library.sim_stream),
        "_cuda_setStream": set_stream,
        "_cuda_sleep": lambda cycles: None,  # work comes late or early by the order, not by time
        "_cuda_isCurrentStreamCapturing": lambda: simulation().operators.current_stream().capture is not None,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: simulation().operators.sync_debug_mode,
    }


def _of_memory():
    def set_fraction(fraction, device):
        simulation().memories[device].fraction = fraction

    return {
        "_cuda_emptyCache": _empty_cache,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": lambda device: simulation().memory_statistics(device),
        "_cuda_resetPeakMemoryStats": _reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: simulation().memories[device].fraction,
        "_cuda_clearCublasWorkspaces": _clear_workspaces,
    }


def _empty_cache():
    sim = process.simulation
    if sim is None:
        return
    with sim.scheduler.lock:
        sim.operators.return_freed()
        for memory in (each for index, each in sim.memories.items() if index != "pinned"):
            memory.empty_cache()


def _clear_workspaces():
    simulation().operators.clear_workspaces()


def _reset_peaks(device):
    sim = simulation()
    with sim.scheduler.lock:
        sim.operators.return_freed()
        sim.memories[device].statistics.reset_peaks()


def _free_and_total(device):
    memory = simulation().memories[device]
    return memory.total_bytes - memory.statistics.reserved, memory.total_bytes
