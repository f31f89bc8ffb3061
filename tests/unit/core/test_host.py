"""Limits of cores and memory, from made-up /proc and control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.core.host import HostPaths, read_host

GIB = 2**30


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    """A machine with 64 GiB available and no control groups."""
    found = HostPaths(tmp_path / "proc", tmp_path / "cgroup", tmp_path)
    write(found.proc / "meminfo", "MemTotal: 70000000 kB\nMemFree: 10 kB\nMemAvailable: 67108864 kB\n")
    write(found.proc / "self" / "cgroup", "")
    return found


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_host_without_control_groups_has_what_the_kernel_says(paths: HostPaths) -> None:
    host = read_host(paths, affinity=6)
    assert (host.cores, host.memory_bytes) == (6, 64 * GIB)
    assert host.shared_bytes is not None and host.shared_bytes > 0


@pytest.mark.parametrize(
    ("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 6), ("9000000 100000", 6)]
)
def test_host_in_a_group_of_version_2_has_whole_cores_of_its_quota(paths: HostPaths, quota: str, cores: int) -> None:
    write(paths.proc / "self" / "cgroup", "0::/")
    write(paths.cgroups / "cpu.max", quota)
    assert read_host(paths, affinity=6).cores == cores


@pytest.mark.parametrize(
    "quota", ["250000 max", "250000 ²", "250000 0", "250000 -100000", "² 100000", "250000", "250000 100000 1"]
)
def test_quota_of_version_2_that_cannot_be_read_counts_as_no_limit(paths: HostPaths, quota: str) -> None:
    write(paths.proc / "self" / "cgroup", "0::/")
    write(paths.cgroups / "cpu.max", quota)
    assert read_host(paths, affinity=6).cores == 6


def test_host_in_nested_groups_of_version_2_has_the_least_of_all(paths: HostPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/outer/inner")
    outer, inner = paths.cgroups / "outer", paths.cgroups / "outer" / "inner"
    write(outer / "cpu.max", "300000 100000")
    write(inner / "cpu.max", "max 100000")
    for folder, limit, usage in ((outer, 8 * GIB, 5 * GIB), (inner, "max", 2 * GIB)):
        write(folder / "memory.max", limit)
        write(folder / "memory.current", usage)
        write(folder / "memory.stat", f"anon 1\ninactive_file {GIB}")
    host = read_host(paths, affinity=6)
    assert host.cores == 3
    assert host.memory_bytes == 8 * GIB - 5 * GIB + GIB  # files not in use can be dropped


def test_host_in_groups_of_version_1_has_the_least_of_all(paths: HostPaths) -> None:
    write(paths.proc / "self" / "cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/ignored")
    cpu, memory = paths.cgroups / "cpu,cpuacct" / "job", paths.cgroups / "memory" / "job"
    write(cpu / "cpu.cfs_quota_us", 400000)
    write(cpu / "cpu.cfs_period_us", 100000)
    write(memory / "memory.limit_in_bytes", 4 * GIB)
    write(memory / "memory.usage_in_bytes", 3 * GIB)
    write(memory / "memory.stat", f"total_inactive_file {GIB}")
    write(memory.parent / "memory.limit_in_bytes", 9223372036854771712)  # none
    write(memory.parent / "memory.usage_in_bytes", 3 * GIB)
    host = read_host(paths, affinity=6)
    assert (host.cores, host.memory_bytes) == (4, 2 * GIB)


def test_host_in_a_container_that_sees_only_the_root_of_its_group_takes_that(paths: HostPaths) -> None:
    write(paths.proc / "self" / "cgroup", "3:memory:/docker/0123\n2:cpu:/docker/0123")
    write(paths.cgroups / "memory" / "memory.limit_in_bytes", 2 * GIB)
    write(paths.cgroups / "memory" / "memory.usage_in_bytes", GIB)
    write(paths.cgroups / "cpu" / "cpu.cfs_quota_us", -1)
    write(paths.cgroups / "cpu" / "cpu.cfs_period_us", 100000)
    host = read_host(paths, affinity=6)
    assert (host.cores, host.memory_bytes) == (6, GIB)


def test_host_over_its_limit_has_no_memory_left(paths: HostPaths) -> None:
    write(paths.proc / "self" / "cgroup", "0::/")
    write(paths.cgroups / "memory.max", GIB)
    write(paths.cgroups / "memory.current", 2 * GIB)
    assert read_host(paths, affinity=6).memory_bytes == 0
