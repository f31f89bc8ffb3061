"""The load of the machine: memory and CPU from Linux's /proc and cgroups, GPUs by NVML, sampled a few times a minute.

A quantity that is not available, on another system or on a GPU without a power sensor, is left out; nothing here stops
a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pynvml

from crossbow_py.core.host import HostPaths, read_host

_GIB = 2**30
_GPU = re.compile(r"gpu/\d+/(\w+)")


class GpuLoad(NamedTuple):
    """The load of a node's GPUs in a few numbers, which ranks send each other. Without known GPUs all are zero.

    Attributes:
        num_gpus: GPUs whose utilization is known.
        lowest_percent, sum_percent: the lowest utilization, and the sum.
        most_memory_gib: of the GPU on which most is taken.
        power_w: of all of them.
    """

    num_gpus: float = 0.0
    lowest_percent: float = 0.0
    sum_percent: float = 0.0
    most_memory_gib: float = 0.0
    power_w: float = 0.0


def gpu_load(sample: Mapping[str, float]) -> GpuLoad:
    """Return the load of the GPUs in a sample of `SystemMonitor`."""
    values: dict[str, list[float]] = {}
    for tag, value in sample.items():
        if found := _GPU.fullmatch(tag):
            values.setdefault(found[1], []).append(value)
    percents = values.get("utilization_percent", [])
    return GpuLoad(
        num_gpus=len(percents),
        lowest_percent=min(percents, default=0.0),
        sum_percent=sum(percents),
        most_memory_gib=max(values.get("memory_gib", []), default=0.0),
        power_w=sum(values.get("power_w", [])),
    )


def job_sample(loads: Sequence[GpuLoad]) -> dict[str, float]:
    """Return the load of the GPUs of all nodes, by tags in TensorBoard; empty if none is known."""
    known = [each for each in loads if each.num_gpus]
    if not known:
        return {}
    return {
        "gpus/utilization_percent/lowest": min(each.lowest_percent for each in known),
        "gpus/utilization_percent/mean": sum(each.sum_percent for each in known) / sum(each.num_gpus for each in known),
        "gpus/memory_gib/most": max(each.most_memory_gib for each in known),
        "gpus/power_kw/total": sum(each.power_w for each in known) / 1000,
    }


class SystemMonitor:
    """Takes samples. Used from one thread.

    Args:
        device_uuids: the CUDA devices to read, those of all ranks of a node, each
            `str(torch.cuda.get_device_properties(i).uuid)`. NVML's own indices ignore CUDA_VISIBLE_DEVICES, so devices
            are found by UUID. Without any, NVML is not used.
        paths: the folders where the kernel publishes limits.
        clock: monotonic seconds.
        cpu_clock: seconds of CPU time this process has used.
        nvml: the NVML module.

    Attributes:
        newest: the last sample; empty before the first.
        warning: one sentence with the first reason if a GPU cannot be read, which a sample may find; else None. A
            device that does not answer is ignored after it.
    """

    def __init__(
        self,
        device_uuids: Sequence[str] = (),
        paths: HostPaths = HostPaths(),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        nvml: Any = pynvml,
    ) -> None:
        self.newest: Mapping[str, float] = {}
        self.warning: str | None = None
        self._paths, self._clock, self._cpu_clock, self._nvml = paths, clock, cpu_clock, nvml
        self._last = (clock(), cpu_clock())
        self._handles: dict[int, Any] = {}
        self._is_open = False
        if not device_uuids:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._warn(f"No GPU telemetry, because NVML does not start ({error}).")
            return
        self._is_open = True
        for index, uuid in enumerate(device_uuids):
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # torch leaves the prefix out
            try:
                self._handles[index] = nvml.nvmlDeviceGetHandleByUUID(name)
            except nvml.NVMLError as error:
                self._warn(f"No telemetry of GPU {index}, because NVML does not find {name} ({error}).")

    def sample(self) -> dict[str, float]:
        """Return the quantities that are known now, by their tags in TensorBoard, which end in the unit.

        The host's memory is what this process may still take, see `Host.memory_bytes`. CPU cores are CPU time over wall
        time since the sample before, at first since construction: 2.0 is two busy cores. A GPU's are those of the whole
        device, including other processes, by its index among `device_uuids`; utilization is the share of time in which
        a kernel ran.
        """
        found: dict[str, float] = {}
        with suppress(OSError):
            status = (self._paths.proc / "self" / "status").read_text(errors="replace")
            if resident := re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE):
                found["system/process_memory_gib"] = int(resident[1]) * 1024 / _GIB
        with suppress(OSError, ValueError):  # what a system does not know, or says in words of its own
            found["system/host_memory_available_gib"] = read_host(self._paths).memory_bytes / _GIB
        (wall_before_s, cpu_before_s), self._last = self._last, (self._clock(), self._cpu_clock())
        wall_s, cpu_s = self._last
        if wall_s > wall_before_s:
            found["system/process_cpu_cores"] = (cpu_s - cpu_before_s) / (wall_s - wall_before_s)
        for index, handle in list(self._handles.items()):
            gpu = self._gpu(handle)
            found |= {f"gpu/{index}/{name}": value for name, value in gpu.items()}
            if not gpu:
                del self._handles[index]
                self._warn(f"No more telemetry of GPU {index}, because it answers none of NVML's queries.")
        self.newest = found
        return found

    def close(self) -> None:
        """Release NVML. Later samples have no GPUs. Does not raise, and may be called again."""
        self._handles = {}
        if self._is_open:
            self._is_open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _gpu(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        queries: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_gib": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used) / _GIB,
            "power_w": lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,  # NVML counts milliwatts
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        found: dict[str, float] = {}
        for name, query in queries.items():
            with suppress(nvml.NVMLError):  # this GPU, or MIG slice, has no such sensor
                found[name] = query()
        return found

    def _warn(self, sentence: str) -> None:
        self.warning = self.warning or sentence
