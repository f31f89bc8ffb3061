"""This process's machine: the cores and the memory it may use, how busy others keep it, and what is installed.

A container sees the host's totals in most places; what counts is the least of all limits above the process.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from crossbow_py.core.version import __version__

_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_STAT = Path("/proc/stat")
# Columns of a cpuN line: user nice system idle iowait irq softirq steal; guest times are contained in user and nice.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)
_UNLIMITED = 2**60  # what control groups of version 1 say for no limit is near 2**63


@dataclass(frozen=True)
class Host:
    """The resources that this process may use now: the least of all limits above it, as in a container.

    Attributes:
        cores: whole cores, at least one.
        memory_bytes: memory that can be taken without swapping or being killed.
        shared_bytes: free bytes in /dev/shm, through which workers pass everything but images; None without /dev/shm.
    """

    cores: int
    memory_bytes: int
    shared_bytes: int | None

    def shared_by(self, num_processes: int) -> Host:
        """Return the share of each of several processes like this one."""
        shared = None if self.shared_bytes is None else self.shared_bytes // num_processes
        return Host(max(1, self.cores // num_processes), self.memory_bytes // num_processes, shared)


@dataclass(frozen=True)
class HostPaths:
    """The folders where the kernel publishes limits."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    shared: Path = Path("/dev/shm")


def read_host(paths: HostPaths = HostPaths(), affinity: int | None = None) -> Host:
    """Return what this process may use. `affinity` is the number of cores it may run on; None asks the kernel."""
    cores = len(usable_core_ids()) if affinity is None else affinity
    quota = min(_cpu_quotas(paths), default=float(cores))
    memory = min([_available(paths), *_memory_left(paths)])
    shared = None
    with suppress(OSError):
        found = os.statvfs(paths.shared)
        shared = found.f_bavail * found.f_frsize
    return Host(max(1, min(cores, int(quota))), max(0, memory), shared)


def usable_core_ids() -> set[int]:
    """Return the numbers of the cores this process may run on, as /proc/stat and taskset count them."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _available(paths: HostPaths) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (paths.proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cpu_quotas(paths: HostPaths) -> Iterator[float]:
    """Yield the CPU quota in cores of every control group above the process that has one and can be read."""
    limits = [_read(folder / "cpu.max").split() for folder in _groups(paths, None)]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    limits += [[_read(folder / name).strip() for name in names] for folder in _groups(paths, "cpu")]
    for words in limits:
        time, period = map(_whole, words) if len(words) == 2 else (None, None)
        if time is not None and period is not None and 0 < time < _UNLIMITED and period > 0:
            yield time / period


def _memory_left(paths: HostPaths) -> Iterator[int]:
    """Yield the free bytes below the limit of every control group that has one. Inactive file cache counts as free."""
    names = {None: ("memory.max", "memory.current", "inactive_file"),
             "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
    for controller, (limit_name, usage_name, inactive_name) in names.items():
        for folder in _groups(paths, controller):
            limit, usage = (_whole(_read(folder / name)) for name in (limit_name, usage_name))
            if limit is not None and usage is not None and limit < _UNLIMITED:
                stat = re.search(rf"^{inactive_name} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                yield limit - usage + (int(stat[1]) if stat else 0)


def _groups(paths: HostPaths, controller: str | None) -> Iterator[Path]:
    """Yield the folders of the process's control group and its parents; version 1 by `controller`, version 2 for None.

    Inside a container the path may be the host's, of which only the root is visible.
    """
    for line in _read(paths.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        roots = [paths.cgroups] if controllers == "" else [paths.cgroups / controllers, paths.cgroups / f"{controller}"]
        root = next((folder for folder in roots if folder.is_dir()), None)
        if root is not None and (controller in controllers.split(",") if controller else controllers == ""):
            own = root / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder == root or root in folder.parents)


def _whole(text: str) -> int | None:
    with suppress(ValueError):
        return int(text)
    return None


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def prepare_environment() -> None:
    """Ask CUDA for 32 hardware queues, the maximum, unless the user has set another number.

    With CUDA's default of 8, streams beyond the eighth wait for each other. CUDA reads the number once, when it is
    initialised; afterwards this does nothing.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(_MAX_CONNECTIONS, "32")


@dataclass(frozen=True)
class LoadSnapshot:
    """Seconds so far: wall clock, this process's CPU time, and the busy time of the usable cores (None: unknown).

    Time that the hypervisor took away (steal) counts as busy: this process could not use it.
    """

    wall_s: float
    own_s: float
    busy_s: float | None
    cores: int

    @classmethod
    def take(cls) -> LoadSnapshot:
        """Take a snapshot now."""
        cores = usable_core_ids()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        busy = busy_ticks(_STAT.read_text(), cores) if _STAT.exists() else None
        return cls(
            wall_s=time.perf_counter(),
            own_s=time.process_time(),
            busy_s=None if busy is None else busy / ticks_per_s,
            cores=len(cores),
        )


def busy_ticks(stat: str, cores: set[int]) -> int:
    """Return the busy clock ticks of `cores`, summed, from the text of /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *columns = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            total += sum(int(columns[index]) for index in _BUSY_COLUMNS)
    return total


def foreign_share(before: LoadSnapshot, after: LoadSnapshot) -> float | None:
    """Return the share (0 to 1) of the usable cores that other processes kept busy between two snapshots.

    None without /proc/stat, or where it does not even count this process's own time.
    """
    if before.busy_s is None or after.busy_s is None:
        return None
    own, busy = after.own_s - before.own_s, after.busy_s - before.busy_s
    if busy < own / 2:
        return None
    return max(0.0, busy - own) / (after.cores * (after.wall_s - before.wall_s))


def versions() -> dict[str, str]:
    """Return the versions of this package, of torch and of Python."""
    return {"crossbow_py": __version__, "torch": torch.__version__, "python": platform.python_version()}
