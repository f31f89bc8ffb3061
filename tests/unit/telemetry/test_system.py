"""Samples of a machine made of text files, clocks moved by hand and a stand-in for NVML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from crossbow_py.core.host import HostPaths
from crossbow_py.telemetry.system import GpuSample, SystemMonitor, SystemSample, SystemScalars

GIB = 2**30
MEMINFO = f"MemTotal:       {64 * 2**20} kB\nMemFree:        1024 kB\nMemAvailable:   {48 * 2**20} kB\n"
STATUS = f"Name:\tpython\nVmPeak:\t {9 * 2**20} kB\nVmRSS:\t {3 * 2**20} kB\nThreads:\t4\n"
UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"


class NvmlError(Exception):
    """What the stand-in raises, as pynvml raises NVMLError."""


class FakeNvml:
    """NVML with one GPU; queries named in `broken` fail."""

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


class FakeClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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


def gpus(nvml: FakeNvml, *uuids: str) -> tuple[SystemMonitor, tuple[GpuSample, ...]]:
    monitor = SystemMonitor(uuids or (UUID,), paths=NOWHERE, nvml=nvml)
    return monitor, monitor.sample().gpus


def test_host_memory_is_what_the_process_may_still_have(machine: Machine) -> None:
    paths = machine(**{"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert SystemMonitor(paths=paths).sample().host_memory_available_bytes == 48 * GIB
    machine(**{"cgroup/memory.max": f"{16 * GIB}\n", "cgroup/memory.current": f"{11 * GIB}\n"})
    assert SystemMonitor(paths=paths).sample().host_memory_available_bytes == 5 * GIB
    machine(**{"cgroup/cpu.max": "100000 often\n"})
    assert SystemMonitor(paths=paths).sample().host_memory_available_bytes == 5 * GIB


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: plenty kB\n"),
        ("proc/meminfo", "MemAvailable:\n"),
    ],
)
def test_host_memory_of_a_machine_that_says_it_in_other_words_is_none(machine: Machine, file: str, text: str) -> None:
    paths = machine(**{"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", file: text})
    assert SystemMonitor(paths=paths).sample().host_memory_available_bytes is None


def test_sample_on_a_system_without_proc_has_cpu_use_only() -> None:
    clock, cpu_clock = FakeClock(), FakeClock()
    monitor = SystemMonitor(paths=NOWHERE, clock=clock, cpu_clock=cpu_clock)
    clock.now_s, cpu_clock.now_s = 110.0, 115.0
    assert monitor.sample() == SystemSample(None, None, 1.5, ())
    assert monitor.warning is None


def test_process_memory_is_the_resident_set(machine: Machine) -> None:
    sample = SystemMonitor(paths=machine(**{"proc/self/status": STATUS})).sample()
    assert sample.process_memory_bytes == 3 * GIB


def test_cpu_cores_of_a_sample_count_from_the_one_before() -> None:
    clock, cpu_clock = FakeClock(), FakeClock()
    monitor = SystemMonitor(paths=NOWHERE, clock=clock, cpu_clock=cpu_clock)
    cores = []
    for now_s, cpu_s in ((104.0, 101.0), (106.0, 105.0), (106.0, 105.0)):
        clock.now_s, cpu_clock.now_s = now_s, cpu_s
        cores.append(monitor.sample().process_cpu_cores)
    assert cores == [0.25, 2.0, None]


def test_sample_of_a_gpu_found_by_its_uuid_has_all_quantities_in_our_units() -> None:
    for uuid in (UUID, f"GPU-{UUID}"):
        monitor, samples = gpus(FakeNvml(), uuid)
        assert samples == (GpuSample(0, 87.0, 12 * GIB, 312.5, 61.0),)
        assert monitor.warning is None


def test_sample_of_a_gpu_without_a_power_sensor_has_the_other_quantities() -> None:
    monitor, samples = gpus(FakeNvml("power"))
    assert samples == (GpuSample(0, 87.0, 12 * GIB, None, 61.0),)
    assert monitor.warning is None


def test_monitor_without_a_driver_warns_and_has_no_gpus() -> None:
    nvml = FakeNvml("init")
    monitor, samples = gpus(nvml)
    assert samples == ()
    assert monitor.warning == "No GPU telemetry, because NVML does not start (Not Supported)."
    monitor.close()
    assert nvml.calls == ["init"]


def test_monitor_of_devices_nvml_does_not_know_warns_of_the_first_and_keeps_the_others() -> None:
    monitor, samples = gpus(FakeNvml(), "MIG-1", UUID, "2")
    assert monitor.warning == "No telemetry of GPU 0, because NVML does not find MIG-1 (Not Found)."
    assert [gpu.index for gpu in samples] == [1]


def test_gpu_that_answers_nothing_any_more_is_left_alone_after_one_warning() -> None:
    nvml = FakeNvml()
    monitor, _ = gpus(nvml)
    nvml.broken = {"utilization", "memory", "power", "temperature"}
    assert monitor.sample().gpus == (GpuSample(0),)
    nvml.calls.clear()
    assert monitor.sample().gpus == ()
    assert nvml.calls == []
    assert monitor.warning == "No more telemetry of GPU 0, because it answers none of NVML's queries."


def test_monitor_without_devices_does_not_touch_nvml() -> None:
    nvml = FakeNvml()
    monitor = SystemMonitor(paths=NOWHERE, nvml=nvml)
    assert monitor.sample().gpus == ()
    monitor.close()
    assert nvml.calls == []


def test_close_twice_with_a_shutdown_that_fails_lets_nvml_go_once() -> None:
    nvml = FakeNvml("shutdown")
    monitor, _ = gpus(nvml)
    nvml.calls.clear()
    monitor.close()
    monitor.close()
    assert nvml.calls == ["shutdown"]
    assert monitor.sample().gpus == ()


def test_stand_in_for_nvml_has_only_names_that_pynvml_has() -> None:
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_monitor_with_real_nvml_and_a_uuid_nobody_has_warns_and_has_no_gpus() -> None:
    monitor = SystemMonitor(("GPU-00000000-0000-0000-0000-000000000000",))
    assert monitor.sample().gpus == ()
    assert monitor.warning is not None
    monitor.close()


def test_sample_of_this_machine_is_plausible() -> None:
    sample = SystemMonitor().sample()
    if sample.process_memory_bytes is None or sample.host_memory_available_bytes is None:
        pytest.skip("no /proc here")
    assert sample.process_memory_bytes > 2**20
    assert sample.host_memory_available_bytes > 0


class Points:
    """What was written: tag, value and samples seen."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def __call__(self, tag: str, value: float, samples_seen: int) -> None:
        self.written.append((tag, value, samples_seen))


def test_scalars_of_a_sample_are_tagged_with_units_and_placed_at_samples_seen(machine: Machine, events: Any) -> None:
    clock, cpu_clock, points = FakeClock(), FakeClock(), Points()
    paths = machine(**{"proc/meminfo": MEMINFO, "proc/self/status": STATUS})
    monitor = SystemMonitor((UUID,), paths, clock, cpu_clock, FakeNvml())
    clock.now_s, cpu_clock.now_s = 102.0, 103.0
    SystemScalars(monitor, points).on_progress(events.progress(1600))
    assert points.written == [
        ("system/process_memory_gib", 3.0, 1600),
        ("system/host_memory_available_gib", 48.0, 1600),
        ("system/process_cpu_cores", 1.5, 1600),
        ("gpu/0/utilization_percent", 87.0, 1600),
        ("gpu/0/memory_gib", 12.0, 1600),
        ("gpu/0/power_w", 312.5, 1600),
        ("gpu/0/temperature_c", 61.0, 1600),
    ]


def test_scalars_of_unknown_quantities_are_left_out(events: Any) -> None:
    clock, cpu_clock, points = FakeClock(), FakeClock(), Points()
    monitor = SystemMonitor((UUID,), NOWHERE, clock, cpu_clock, FakeNvml("utilization", "power", "temperature"))
    SystemScalars(monitor, points).on_progress(events.progress(16))
    assert points.written == [("gpu/0/memory_gib", 12.0, 16)]


def test_scalars_under_frequent_progress_come_early_and_then_at_the_interval(machine: Machine, events: Any) -> None:
    points = Points()
    scalars = SystemScalars(SystemMonitor(paths=machine(**{"proc/self/status": STATUS})), points)
    for half_second in range(1, 25):
        scalars.on_progress(events.progress(half_second * 100, elapsed_s=half_second / 2))
    memory = [samples for tag, _, samples in points.written if tag == "system/process_memory_gib"]
    assert memory == [100, 1100, 2100]


def test_notes_of_the_scalars_are_the_monitors_warning_once_when_a_sample_finds_it(events: Any) -> None:
    nvml = FakeNvml()
    monitor, _ = gpus(nvml)
    scalars = SystemScalars(monitor, Points())
    assert scalars.take_notes() == []
    nvml.broken = {"utilization", "memory", "power", "temperature"}
    scalars.on_progress(events.progress(16))
    assert scalars.take_notes() == ["No more telemetry of GPU 0, because it answers none of NVML's queries."]
    assert scalars.take_notes() == []


def test_close_of_the_scalars_closes_the_monitor() -> None:
    nvml = FakeNvml()
    monitor, _ = gpus(nvml)
    SystemScalars(monitor, Points()).close()
    assert nvml.calls[-1] == "shutdown"
