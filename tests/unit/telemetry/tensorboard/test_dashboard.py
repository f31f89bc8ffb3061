"""The page of custom scalars: which charts a run has, and that there is a curve for each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from crossbow_py.telemetry.events import LearningStatistics
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.telemetry.tensorboard.dashboard import dashboard
from crossbow_py.telemetry.tensorboard.listeners import TensorBoardScalars
from tests.event_files import read_events
from tests.made_up_ranks import write_job

ALWAYS = ["How well it learns", "How fast it trains"]


SAMPLE = [
    "system/process_memory_gib", "system/host_memory_available_gib", "system/process_cpu_cores",
    "gpu/0/utilization_percent", "gpu/0/memory_gib", "gpu/0/power_w", "gpu/0/temperature_c",
]  # fmt: skip


class Monitor(SystemMonitor):
    """A machine with a GPU."""

    def sample(self) -> dict[str, float]:
        return dict.fromkeys(SAMPLE, 1.0)


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        ({}, ["Averaging", "The machine"]),
        ({"shares_samples": False, "replicas_differ": False}, ["The machine"]),
        ({"several": False}, ["The machine"]),
        ({"num_workers": 2}, ["Averaging", "The machine", "Waiting for data"]),
        ({"num_devices": 2}, ["The ranks", "Averaging", "The machine"]),
        ({"learning_statistics": True}, ["Averaging", "The machine", "How learning goes"]),
    ],
)
def test_dashboard_has_the_sections_of_what_the_run_does(
    events: Any, changes: dict[str, Any], sections: list[str]
) -> None:
    assert list(dashboard(events.run_info(**changes))) == [*ALWAYS, *sections]


def test_dashboard_on_cuda_shows_the_gpus_and_elsewhere_not(events: Any) -> None:
    def of_gpus(device: str) -> list[str]:
        return [title for title in dashboard(events.run_info(device=device))["The machine"] if title.startswith("GPU")]

    assert of_gpus("cpu") == []
    assert len(of_gpus("cuda:0")) == 4


def test_every_chart_of_the_dashboard_has_a_curve_and_every_tag_of_a_section_a_chart(
    tmp_path: Path, events: Any
) -> None:
    scalars = TensorBoardScalars(tmp_path, None, new_monitor=Monitor)
    scalars.on_start(events.run_info(num_workers=2, learning_statistics=True, device="cuda:0"))
    scalars.on_progress(events.progress(500, num_workers=2, data_wait_share=0.5))
    learning = LearningStatistics(256.0, 8.0, 0.03125, 0.875, 2.0, 0.5)
    scalars.on_epoch(events.epoch_record(1, num_workers=2, data_wait_share=0.5, learning=learning))
    scalars.on_end(events.summary(time_to_accuracy_s=8.0))
    scalars.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()["scalars"]
    (written,) = read.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert [title for title, patterns in charts.items() if not _found(patterns, tags)] == []
    shown = {tag for patterns in charts.values() for tag in _found(patterns, tags)}
    assert set(tags) - shown == {
        "learning/gradient_variance", "learning/squared_gradient_norm", "learning/measuring_s",
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_every_chart_of_many_ranks_has_a_few_curves_and_every_node_a_run_of_its_own(
    tmp_path: Path, num_ranks: int
) -> None:
    folder = write_job(tmp_path / "run", num_ranks, synchronisations=24)
    read = read_events(folder / "tensorboard")
    tags = read.Tags()["scalars"]
    (written,) = read.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    curves = {title: len(_found(patterns, tags)) for title, patterns in charts.items()}
    assert {title for title, count in curves.items() if not 1 <= count <= 16} == set()
    assert curves["time of a round, without waiting for other ranks (ms)"] == (8 if num_ranks == 8 else 3)
    shown = {tag for patterns in charts.values() for tag in _found(patterns, tags)}
    of_gpus = {tag for tag in tags if tag.startswith("gpu/")}
    assert set(tags) - shown == (set() if num_ranks == 8 else of_gpus)
    assert len(of_gpus) == 8 * 4
    nodes = sorted(path.name for path in (folder / "tensorboard").iterdir() if path.is_dir())
    assert nodes == [f"node_{node}_gpu-{node}" for node in range(1, num_ranks // 8)]
    for node in nodes:
        assert set(read_events(folder / "tensorboard" / node).Tags()["scalars"]) >= of_gpus


def test_every_metric_has_a_chart_of_all_of_its_values(events: Any) -> None:
    charts = dashboard(events.run_info(metrics=("perplexity", "f1 (a+b)")))["How well it learns"]
    tags = ["metrics/perplexity", "metrics/perplexity2", "metrics/f1 (a+b)", "metrics/f1 (a+b)/cat", "loss/test"]
    assert _found(charts["perplexity"][1], tags) == ["metrics/perplexity"]
    assert _found(charts["f1 (a+b)"][1], tags) == ["metrics/f1 (a+b)", "metrics/f1 (a+b)/cat"]


def _found(patterns: list[str], tags: list[str]) -> list[str]:
    return [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
