"""The layout of TensorBoard's custom scalars for a run: charts in the order of the questions one has about training.

Open it at `#custom_scalars`. Charts that would stay empty for a run are left out; TensorBoard merges the layouts of
several runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossbow_py.telemetry.events import RunInfo

_Charts = dict[str, list[str]]  # tags, which are regular expressions, by the chart's title


def dashboard(info: RunInfo) -> dict[str, Any]:
    """Return the layout for `SummaryWriter.add_custom_scalars`."""
    measured = "validation" if info.validates else "test"
    learners = [] if info.shares_samples else [rf"accuracy/{measured}_learner_\d+"]
    accuracy = [rf"accuracy/(train|{measured})", *learners]
    sections: dict[str, _Charts] = {
        "How well it learns": {
            **({"accuracy (share of samples)": accuracy} if info.has_accuracy else {}),
            "loss": [f"loss/(train|{measured})"],
            "learning rate": ["learning_rate"],
        },
        "How fast it trains": {
            "throughput (images/s)": [r"throughput/images_per_s(_per_device)?"],
            "learners on a device": ["num_learners"],
            "training time and time to accuracy (s)": [r"time/(training|to_accuracy)_s"],
        },
        "Averaging": _averaging(info),
        "The machine": _machine(info),
        "Waiting for data": _data(info),
        "How learning goes": _learning(info),
    }
    return {
        title: {chart: ["Multiline", _anchored(tags)] for chart, tags in charts.items()}
        for title, charts in sections.items()
        if charts
    }


def _averaging(info: RunInfo) -> _Charts:
    spread = {"spread of the learners (share of the norm of z)": ["averaging/spread"]}
    if not info.shares_samples or not info.several:
        return {}
    return spread | ({"norm of the sum of corrections": ["averaging/correction_norm"]} if info.replicas_differ else {})


def _data(info: RunInfo) -> _Charts:
    if info.num_workers is None:
        return {}
    return {"share of the time": ["data/wait_share"], "workers": ["data/num_workers"]}


def _learning(info: RunInfo) -> _Charts:
    if not info.learning_statistics:
        return {}
    return {
        "gradient noise scale (samples)": ["learning/gradient_noise_scale_samples"],
        "sharpness": ["learning/sharpness"],
        "agreement of learners (share of samples)": ["learning/agreement"],
    }


def _machine(info: RunInfo) -> _Charts:
    host = {
        "memory (GiB)": [r"system/(process_memory|host_memory_available)_gib"],
        "busy CPU cores": ["system/process_cpu_cores"],
    }
    if not info.device.startswith("cuda"):
        return host
    gpu: Mapping[str, list[str]] = {
        "GPU utilization (%)": [r"gpu/\d+/utilization_percent"],
        "GPU memory (GiB)": [r"gpu/\d+/memory_gib"],
        "GPU power (W)": [r"gpu/\d+/power_w"],
        "GPU temperature (°C)": [r"gpu/\d+/temperature_c"],
    }
    return {**gpu, **host}


def _anchored(tags: list[str]) -> list[str]:
    return [f"^{tag}$" for tag in tags]
