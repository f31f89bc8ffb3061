"""What the machine is doing: memory and CPU from Linux's /proc and cgroups, GPUs by NVML, sampled a few times a minute.

A quantity that cannot be had, on another system or a GPU without a power sensor, is None; nothing here stops a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pynvml

from crossbow_py.telemetry.events import Listener, Progress

# The root group's folder, the files of a group's limit and use, and memory.stat's name for page cache long untouched.
_CGROUP_V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class GpuSample:
    """One GPU as a whole, other processes on it included.

    `index` is its place among this process's devices; `utilization_percent` the share of time in which a kernel ran.
    """

    index: int
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class SystemSample:
    """The machine at one moment.

    Memory of the host is what this process may have: the smaller of the machine's and every cgroup's above it.
    `process_cpu_cores` is CPU time over wall time since the sample before: 2.0 is two busy cores.
    """

    process_memory_bytes: int | None
    host_memory_available_bytes: int | None
    host_memory_total_bytes: int | None
    process_cpu_cores: float | None
    gpus: tuple[GpuSample, ...]


class SystemMonitor:
    """Takes samples. Used from one thread.

    Args:
        device_uuids: this process's CUDA devices, each `str(torch.cuda.get_device_properties(i).uuid)`. NVML's own
            indices ignore CUDA_VISIBLE_DEVICES, so devices are found by UUID. Empty: NVML is not touched.
        read_text: the text of a file by its path; raises OSError when there is none.
        clock: monotonic seconds.
        cpu_clock: seconds of CPU time this process has used.
        nvml: the NVML module.
    """

    def __init__(
        self,
        device_uuids: Sequence[str] = (),
        read_text: Callable[[str], str] = lambda path: Path(path).read_text(errors="replace"),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        nvml: Any = pynvml,
    ) -> None:
        self._read_text, self._clock, self._cpu_clock = read_text, clock, cpu_clock
        self._last = (clock(), cpu_clock())
        self._gpus = _Gpus(device_uuids, nvml)

    @property
    def warning(self) -> str | None:
        """One sentence when a GPU cannot be read, the first reason only; else None. A sample may be what finds it."""
        return self._gpus.warning

    def sample(self) -> SystemSample:
        """Read everything once; CPU use counts from the sample before, the first from when the monitor was made."""
        available, total = _host_memory(self._text)
        return SystemSample(
            process_memory_bytes=_kib_field(self._text("/proc/self/status"), "VmRSS"),
            host_memory_available_bytes=available,
            host_memory_total_bytes=total,
            process_cpu_cores=self._cpu_cores(),
            gpus=self._gpus.sample(),
        )

    def close(self) -> None:
        """Let NVML go; later samples have no GPUs. Does not raise, and may be called again."""
        self._gpus.close()

    def _cpu_cores(self) -> float | None:
        (wall_before_s, cpu_before_s), self._last = self._last, (self._clock(), self._cpu_clock())
        wall_s, cpu_s = self._last
        return (cpu_s - cpu_before_s) / (wall_s - wall_before_s) if wall_s > wall_before_s else None

    def _text(self, path: str) -> str:
        try:
            return self._read_text(path)
        except OSError:
            return ""


class SystemScalars(Listener):
    """Writes samples as scalars, a point right away and then at most one every `interval_s` seconds of training.

    Args:
        monitor: closed with this listener.
        write: takes tag, value and samples seen, as `SummaryWriter.add_scalar` does.
        interval_s: seconds of training between two points.
    """

    def __init__(
        self, monitor: SystemMonitor, write: Callable[[str, float, int], object], interval_s: float = 5.0
    ) -> None:
        self._monitor, self._write, self._interval_s = monitor, write, interval_s
        self._next_point_s, self._warned = 0.0, False

    def on_progress(self, progress: Progress) -> None:
        """A point, when one is due; quantities that are not known are left out."""
        if progress.elapsed_s < self._next_point_s:
            return
        self._next_point_s = progress.elapsed_s + self._interval_s
        for tag, value in _scalars(self._monitor.sample()).items():
            if value is not None:
                self._write(tag, value, progress.samples_seen)

    def take_notes(self) -> list[str]:
        """The monitor's warning, once."""
        if self._warned or self._monitor.warning is None:
            return []
        self._warned = True
        return [self._monitor.warning]

    def close(self) -> None:
        """Close the monitor."""
        self._monitor.close()


class _Gpus:
    """NVML's handles of this process's devices. A device that does not answer is left alone after one warning."""

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


def _host_memory(text: Callable[[str], str]) -> tuple[int | None, int | None]:
    """Bytes available and in total, for this process; None, None where /proc says nothing."""
    meminfo = text("/proc/meminfo")
    available, total = _kib_field(meminfo, "MemAvailable"), _kib_field(meminfo, "MemTotal")
    if available is None or total is None:
        return None, None
    for limit, used in _cgroup_limits(text):
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def _cgroup_limits(text: Callable[[str], str]) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of every cgroup over this process that has a limit.

    A container may see the host's path of its group but only its own group's files, at the root: every folder from
    the path up to the root is tried.
    """
    for line in text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit_file, use_file, cold_cache = _CGROUP_V1 if controllers else _CGROUP_V2
        group = PurePosixPath(path)
        for folder in (f"{root}{parent}".rstrip("/") for parent in (group, *group.parents)):
            limit, used = text(f"{folder}/{limit_file}").strip(), text(f"{folder}/{use_file}").strip()
            if limit.isdecimal() and used.isdecimal():  # "max" is no limit
                # Cold page cache counts as used, but the kernel gives it up before it refuses anybody memory.
                cold = re.search(rf"^{cold_cache} (\d+)$", text(f"{folder}/memory.stat"), re.MULTILINE)
                yield int(limit), max(0, int(used) - (int(cold[1]) if cold else 0))


def _kib_field(text: str, name: str) -> int | None:
    """Bytes of a line such as `MemTotal:   24684096 kB`, or None without one."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


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
