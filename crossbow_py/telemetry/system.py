"""The load of the machine: memory and CPU from Linux's /proc and cgroups, GPUs by NVML, sampled a few times a minute.

A quantity that is not available, on another system or on a GPU without a power sensor, is None; nothing here stops a
run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from crossbow_py.core.host import HostPaths, read_host
from crossbow_py.telemetry.events import Listener, Progress

_INTERVAL_S = 5.0  # of training, between two points
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class GpuSample:
    """A sample of one GPU as a whole, including other processes on it.

    `index` is its index among this process's devices, `utilization_percent` the share of time in which a kernel ran.
    """

    index: int
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class SystemSample:
    """The machine at one moment.

    The host's memory is what this process may still take, see `Host.memory_bytes`.
    `process_cpu_cores` is CPU time over wall time since the sample before: 2.0 is two busy cores.
    """

    process_memory_bytes: int | None
    host_memory_available_bytes: int | None
    process_cpu_cores: float | None
    gpus: tuple[GpuSample, ...]


class SystemMonitor:
    """Takes samples. Used from one thread.

    Args:
        device_uuids: this process's CUDA devices, each `str(torch.cuda.get_device_properties(i).uuid)`. NVML's own
            indices ignore CUDA_VISIBLE_DEVICES, so devices are found by UUID. Without any, NVML is not used.
        paths: the folders where the kernel publishes limits.
        clock: monotonic seconds.
        cpu_clock: seconds of CPU time this process has used.
        nvml: the NVML module.
    """

    def __init__(
        self,
        device_uuids: Sequence[str] = (),
        paths: HostPaths = HostPaths(),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        nvml: Any = pynvml,
    ) -> None:
        self._paths, self._clock, self._cpu_clock = paths, clock, cpu_clock
        self._last = (clock(), cpu_clock())
        self._gpus = _Gpus(device_uuids, nvml)

    @property
    def warning(self) -> str | None:
        """Return one sentence with the first reason if a GPU cannot be read, which a sample may find; else None."""
        return self._gpus.warning

    def sample(self) -> SystemSample:
        """Take a sample. CPU use counts from the sample before, for the first one from the monitor's construction."""
        return SystemSample(
            process_memory_bytes=self._process_memory(),
            host_memory_available_bytes=self._available_memory(),
            process_cpu_cores=self._cpu_cores(),
            gpus=self._gpus.sample(),
        )

    def close(self) -> None:
        """Release NVML. Later samples have no GPUs. Does not raise, and may be called again."""
        self._gpus.close()

    def _cpu_cores(self) -> float | None:
        (wall_before_s, cpu_before_s), self._last = self._last, (self._clock(), self._cpu_clock())
        wall_s, cpu_s = self._last
        return (cpu_s - cpu_before_s) / (wall_s - wall_before_s) if wall_s > wall_before_s else None

    def _process_memory(self) -> int | None:
        with suppress(OSError):
            status = (self._paths.proc / "self" / "status").read_text(errors="replace")
            found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
            return int(found[1]) * 1024 if found else None
        return None

    def _available_memory(self) -> int | None:
        with suppress(OSError, ValueError):  # what a system does not know, or says in words of its own
            return read_host(self._paths).memory_bytes
        return None


class SystemScalars(Listener):
    """Writes samples as scalars, the first at once and then at most one every five seconds of training.

    Args:
        monitor: takes the samples; closed with this listener.
        write: takes tag, value and samples seen, as `SummaryWriter.add_scalar` does.
    """

    def __init__(self, monitor: SystemMonitor, write: Callable[[str, float, int], object]) -> None:
        self._monitor, self._write = monitor, write
        self._next_point_s, self._warned = 0.0, False

    def on_progress(self, progress: Progress) -> None:
        """Write a point if one is due, without quantities that are not known."""
        if progress.elapsed_s < self._next_point_s:
            return
        self._next_point_s = progress.elapsed_s + _INTERVAL_S
        for tag, value in _scalars(self._monitor.sample()).items():
            if value is not None:
                self._write(tag, value, progress.samples_seen)

    def take_notes(self) -> list[str]:
        """Return the monitor's warning, once."""
        if self._warned or self._monitor.warning is None:
            return []
        self._warned = True
        return [self._monitor.warning]

    def close(self) -> None:
        """Close the monitor."""
        self._monitor.close()


class _Gpus:
    """NVML's handles of this process's devices. A device that does not answer is ignored after one warning."""

    def __init__(self, uuids: Sequence[str], nvml: Any) -> None:
        self.warning: str | None = None
        self._nvml, self._open, self._handles = nvml, False, dict[int, Any]()
        if not uuids:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._warn(f"No GPU telemetry, because NVML does not start ({error}).")
            return
        self._open = True
        for index, uuid in enumerate(uuids):
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # torch leaves the prefix out
            try:
                self._handles[index] = nvml.nvmlDeviceGetHandleByUUID(name)
            except nvml.NVMLError as error:
                self._warn(f"No telemetry of GPU {index}, because NVML does not find {name} ({error}).")

    def sample(self) -> tuple[GpuSample, ...]:
        samples = tuple(self._read(index, handle) for index, handle in self._handles.items())
        for gpu in samples:
            if gpu == GpuSample(gpu.index):
                del self._handles[gpu.index]
                self._warn(f"No more telemetry of GPU {gpu.index}, because it answers none of NVML's queries.")
        return samples

    def close(self) -> None:
        self._handles = {}
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _read(self, index: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        return GpuSample(
            index,
            utilization_percent=self._ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            memory_used_bytes=self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            power_w=self._ask(lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000),  # NVML counts milliwatts
            temperature_c=self._ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        )

    def _ask(self, query: Callable[[], _Number]) -> _Number | None:
        try:
            return query()
        except self._nvml.NVMLError:  # this GPU, or MIG slice, has no such sensor
            return None

    def _warn(self, sentence: str) -> None:
        self.warning = self.warning or sentence


def _scalars(sample: SystemSample) -> dict[str, float | None]:
    scalars = {
        "system/process_memory_gib": _gib(sample.process_memory_bytes),
        "system/host_memory_available_gib": _gib(sample.host_memory_available_bytes),
        "system/process_cpu_cores": sample.process_cpu_cores,
    }
    for gpu in sample.gpus:
        scalars |= {
            f"gpu/{gpu.index}/utilization_percent": gpu.utilization_percent,
            f"gpu/{gpu.index}/memory_gib": _gib(gpu.memory_used_bytes),
            f"gpu/{gpu.index}/power_w": gpu.power_w,
            f"gpu/{gpu.index}/temperature_c": gpu.temperature_c,
        }
    return scalars


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**30
