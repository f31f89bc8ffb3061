"""What this process may use of its machine: cores, memory and shared memory, by affinity and control groups.

A container sees the host's totals in most places; what counts is the least of all limits above the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_UNLIMITED = 2**60  # what control groups of version 1 say for no limit is near 2**63


@dataclass(frozen=True)
class Host:
    """What is usable now.

    Attributes:
        cores: whole ones, at least one.
        memory_bytes: that can be taken without swapping or being killed.
        shared_bytes: free in /dev/shm, through which workers hand over what is no image; None where there is none.
    """

    cores: int
    memory_bytes: int
    shared_bytes: int | None

    def shared_by(self, num_processes: int) -> Host:
        """What falls to each of several processes like this one."""
        shared = None if self.shared_bytes is None else self.shared_bytes // num_processes
        return Host(max(1, self.cores // num_processes), self.memory_bytes // num_processes, shared)


@dataclass(frozen=True)
class HostPaths:
    """Where the kernel says it."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    shared: Path = Path("/dev/shm")


def read_host(paths: HostPaths = HostPaths(), affinity: int | None = None) -> Host:
    """What this process may use. `affinity` is the number of cores it may run on; None asks the kernel."""
    cores = _affinity() if affinity is None else affinity
    quota = min(_cpu_quotas(paths), default=float(cores))
    memory = min([_available(paths), *_memory_left(paths)])
    return Host(max(1, min(cores, int(quota))), max(0, memory), _free_bytes(paths.shared))


def usable_core_ids() -> set[int]:
    """Numbers of the cores this process may run on, as /proc/stat and taskset count them."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _affinity() -> int:
    return len(usable_core_ids())


def _available(paths: HostPaths) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (paths.proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cpu_quotas(paths: HostPaths) -> Iterator[float]:
    """Cores' worth of time, of every group above the process that has a quota; what cannot be read is none."""
    for folder in _groups(paths, None):
        words = _read(folder / "cpu.max").split()
        yield from _quota(*map(_whole, words)) if len(words) == 2 else ()
    for folder in _groups(paths, "cpu"):
        yield from _quota(*(_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")))


def _quota(time: int | None, period: int | None) -> Iterator[float]:
    if time is not None and period is not None and 0 < time < _UNLIMITED and period > 0:
        yield time / period


def _memory_left(paths: HostPaths) -> Iterator[int]:
    """Bytes below the limit, of every group above the process that has one. Files not in use can be dropped."""
    names = {None: ("memory.max", "memory.current", "inactive_file"),
             "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
    for controller, (limit_name, usage_name, inactive_name) in names.items():
        for folder in _groups(paths, controller):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                yield limit - usage + _of_stat(folder / "memory.stat", inactive_name)


def _groups(paths: HostPaths, controller: str | None) -> Iterator[Path]:
    """The folders of the process's group and those above it; of a controller of version 1, or (None) of version 2.

    Inside a container the path may be one of the host, of which only the root is to be seen.
    """
    for line in _read(paths.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        roots = [paths.cgroups] if controllers == "" else [paths.cgroups / controllers, paths.cgroups / f"{controller}"]
        root = next((folder for folder in roots if folder.is_dir()), None)
        if root is not None and (controller in controllers.split(",") if controller else controllers == ""):
            own = root / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder == root or root in folder.parents)


def _of_stat(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _number(path: Path) -> int | None:
    return _whole(_read(path).strip())


def _whole(text: str) -> int | None:
    with suppress(ValueError):
        return int(text)
    return None


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def prepare_environment() -> None:
    """Ask for 32 hardware queues, the most there are, unless the user has set another number.

    With CUDA's default of 8, streams beyond the eighth wait for each other. CUDA reads the number once, so this
    belongs before anything else touches CUDA; after that nothing is done.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_MAX_CONNECTIONS, "32")
