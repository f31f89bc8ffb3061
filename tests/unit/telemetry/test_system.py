"""Samples of a machine made of text files, clocks moved by hand and a stand-in for NVML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossbow_py.core.host import HostPaths
from crossbow_py.telemetry.system import GpuLoad, SystemMonitor, gpu_load, job_sample
from tests.made_up_ranks import ManyGpus
from tests.unit.telemetry.conftest import FakeClock

GIB = 2**30
MEMINFO = f"MemTotal:       {64 * 2**20} kB\nMemFree:        1024 kB\nMemAvailable:   {48 * 2**20} kB\n"
STATUS = f"Name:\tpython\nVmPeak:\t {9 * 2**20} kB\nVmRSS:\t {3 * 2**20} kB\nThreads:\t4\n"
UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"


class NvmlError(Exception):
    """What the stand-in raises, as pynvml raises NVMLError."""


class FakeNvml:
    """NVML with one GPU; calls named in `broken` fail."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = set(broken), list[str]()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise NvmlError("Not Supported")

    def nvmlInit(self) -> None:
        self._called("init")

    def nvmlShutdown(self) -> None:
        self._called("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._called("handle")
        if uuid != f"GPU-{UUID}":
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._called("utilization")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._called("memory")
        return SimpleNamespace(total=80 * GIB, free=68 * GIB, used=12 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._called("power")
        return 312_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._called("temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


Machine = Callable[..., HostPaths]
NOWHERE = HostPaths(*map(Path, ("/nowhere/proc", "/nowhere/cgroup", "/nowhere/shm")))


@pytest.fixture(autouse=True)
def nothing_beside_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine answers nothing but what its files say."""

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Writes text files of a made-up machine, by their paths below its root."""

    def write(**files: str) -> HostPaths:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return HostPaths(tmp_path / "proc", tmp_path / "cgroup", tmp_path)

    return write


GPU = {
    "gpu/0/utilization_percent": 87.0, "gpu/0/memory_gib": 12.0, "gpu/0/power_w": 312.5, "gpu/0/temperature_c": 61.0,
}  # fmt: skip
QUERIES = {"utilization", "memory", "power", "temperature"}
SILENT = "No more telemetry of GPU 0, because it answers none of NVML's queries."


def gpus(nvml: FakeNvml, *uuids: str) -> tuple[SystemMonitor, dict[str, float]]:
    monitor = SystemMonitor(uuids or (UUID,), paths=NOWHERE, nvml=nvml)
    return monitor, of_gpus(monitor)


def of_gpus(monitor: SystemMonitor) -> dict[str, float]:
    return {tag: value for tag, value in monitor.sample().items() if tag.startswith("gpu/")}


def test_sample_has_all_quantities_by_tags_with_units_and_memory_is_the_resident_set(machine: Machine) -> None:
    clock, cpu_clock = FakeClock(100), FakeClock(100)
    paths = machine(**{"proc/meminfo": MEMINFO, "proc/self/status": STATUS})
    monitor = SystemMonitor((UUID,), paths, clock, cpu_clock, FakeNvml())
    clock.now, cpu_clock.now = 102.0, 103.0
    assert monitor.sample() == {
        "system/process_memory_gib": 3.0, "system/host_memory_available_gib": 48.0, "system/process_cpu_cores": 1.5,
        **GPU,
    }  # fmt: skip


def test_cpu_cores_of_a_sample_count_from_the_one_before_and_need_no_proc() -> None:
    clock, cpu_clock = FakeClock(100), FakeClock(100)
    monitor = SystemMonitor(paths=NOWHERE, clock=clock, cpu_clock=cpu_clock)
    samples = []
    for now_s, cpu_s in ((104.0, 101.0), (106.0, 105.0), (106.0, 105.0)):
        clock.now, cpu_clock.now = now_s, cpu_s
        samples.append(monitor.sample())
    assert samples == [{"system/process_cpu_cores": 0.25}, {"system/process_cpu_cores": 2.0}, {}]
    assert monitor.warning is None


def test_gpu_is_found_by_its_uuid_with_and_without_the_prefix() -> None:
    for uuid in (UUID, f"GPU-{UUID}"):
        monitor, found = gpus(FakeNvml(), uuid)
        assert found == GPU
        assert monitor.warning is None


def test_monitor_without_a_driver_warns_and_has_no_gpus() -> None:
    nvml = FakeNvml("init")
    monitor, found = gpus(nvml)
    assert found == {}
    assert monitor.warning == "No GPU telemetry, because NVML does not start (Not Supported)."
    monitor.close()
    assert nvml.calls == ["init"]


def test_monitor_of_devices_nvml_does_not_know_warns_of_the_first_and_keeps_the_others() -> None:
    monitor, found = gpus(FakeNvml(), "MIG-1", UUID, "2")
    assert monitor.warning == "No telemetry of GPU 0, because NVML does not find MIG-1 (Not Found)."
    assert found == {tag.replace("/0/", "/1/"): value for tag, value in GPU.items()}


def test_gpu_that_answers_nothing_any_more_is_left_alone_after_one_warning() -> None:
    nvml = FakeNvml()
    monitor, _ = gpus(nvml)
    nvml.broken = QUERIES
    assert of_gpus(monitor) == {}
    assert monitor.warning == SILENT
    nvml.calls.clear()
    assert of_gpus(monitor) == {}
    assert nvml.calls == []


def test_load_of_a_node_is_that_of_all_its_gpus_and_of_a_job_that_of_all_nodes() -> None:
    nvml = ManyGpus(4)
    nvml.percents = [90.0, 50.0, 100.0, 80.0]
    monitors = [SystemMonitor([f"GPU-{rank}" for rank in node], NOWHERE, nvml=nvml) for node in ((0, 1), (2, 3))]
    assert gpu_load(monitors[0].newest) == GpuLoad()
    samples = [monitor.sample() for monitor in monitors]
    assert samples[1]["gpu/1/utilization_percent"] == 80.0
    assert all(monitor.newest == sample for monitor, sample in zip(monitors, samples, strict=True))
    loads = [gpu_load(sample) for sample in samples]
    # 40 GiB and a quarter more for each; 100 W and 5 W for each percent.
    assert loads[0] == GpuLoad(2, lowest_percent=50.0, sum_percent=140.0, most_memory_gib=40.25, power_w=900.0)
    assert job_sample([*loads, GpuLoad()]) == {
        "gpus/utilization_percent/lowest": 50.0, "gpus/utilization_percent/mean": 80.0, "gpus/memory_gib/most": 40.75,
        "gpus/power_kw/total": 2.0,
    }  # fmt: skip
    assert job_sample([GpuLoad(), GpuLoad()]) == {}


def test_close_twice_with_a_shutdown_that_fails_lets_nvml_go_once() -> None:
    nvml = FakeNvml("shutdown")
    monitor, _ = gpus(nvml)
    nvml.calls.clear()
    monitor.close()
    monitor.close()
    assert nvml.calls == ["shutdown"]
    assert of_gpus(monitor) == {}
