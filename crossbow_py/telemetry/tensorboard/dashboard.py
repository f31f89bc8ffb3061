"""The layout of TensorBoard's custom scalars for a run: charts in the order of the questions one has about training.

Open it at `#custom_scalars`. Charts that would stay empty for a run are left out; TensorBoard merges the layouts of
several runs.
"""

from __future__ import annotations

import re
from typing import Any

from crossbow_py.telemetry.events import RunInfo
from crossbow_py.telemetry.rank_pace import MOST_CURVES

# By title: whether the run has the curves, and their tags, which are regular expressions.
_Charts = dict[str, tuple[bool, str | list[str]]]


def dashboard(info: RunInfo) -> dict[str, Any]:
    """Return the layout for `SummaryWriter.add_custom_scalars`."""
    measured = "validation" if info.validates else "test"
    on_cuda = info.device.startswith("cuda")
    waits = info.num_workers is not None
    has_spread = info.shares_samples and info.several and info.replicas_differ
    sections: dict[str, _Charts] = {
        "How well it learns": {
            # Apart from training's: TensorBoard has a colour for a run, not for a curve of it.
            f"{measured} accuracy (share of samples)": (info.has_accuracy, rf"accuracy/{measured}(_z)?"),
            "training accuracy (share of samples)": (info.has_accuracy, "accuracy/train"),
            f"{measured} loss": (True, f"loss/{measured}"),
            "training loss": (True, "loss/train"),
            **{name: (True, rf"metrics/{re.escape(name)}(/.+)?") for name in info.metrics},
            "learning rate": (True, "learning_rate"),
        },
        "How fast it trains": {
            "throughput (tokens/s)": (info.tokens_per_sample is not None, "throughput/tokens_per_s"),
            "throughput (images/s)": (info.tokens_per_sample is None, r"throughput/images_per_s(_per_device)?"),
            "goodput: what they are worth (images/s)": (info.measures_noise, "goodput/images_per_s"),
            "efficiency: what a sample is worth": (info.measures_noise, "goodput/efficiency"),
            "gradient noise scale in training (samples)": (info.measures_noise, "goodput/noise_scale_samples"),
            "learners on a device": (True, "num_learners"),
            "training time and time to accuracy (s)": (True, r"time/(training|to_accuracy)_s"),
        },
        "The ranks": _of_ranks(info.num_devices, waits, tokens=info.tokens_per_sample is not None),
        "Averaging": {
            "spread of the learners (share of the norm of z)": (has_spread, "averaging/spread"),
            "step of z without its momentum (norm)": (has_spread, "averaging/correction_norm"),
        },
        "The machine": {
            **_of_gpus(info.num_devices, on_cuda),
            "memory of this process (GiB)": (True, "system/process_memory_gib"),
            "memory available on the host (GiB)": (True, "system/host_memory_available_gib"),
            "busy CPU cores": (True, "system/process_cpu_cores"),
        },
        "Waiting for data": {
            "share of the time": (waits, "data/wait_share"),
            "workers": (waits, "data/num_workers"),
        },
        "How learning goes": {
            "gradient noise scale (samples)": (info.learning_statistics, "learning/gradient_noise_scale_samples"),
            "sharpness": (info.learning_statistics, "learning/sharpness"),
            "agreement of learners (share of samples)": (info.learning_statistics, "learning/agreement"),
        },
    }
    return _layout(sections)


def _of_ranks(num_ranks: int, waits: bool, tokens: bool) -> _Charts:
    """Return the charts of several ranks: a curve each, or of many the slowest, the median and the fastest."""
    several, few = num_ranks > 1, num_ranks <= MOST_CURVES
    unit = "tokens" if tokens else "images"
    three = "(slowest|median|fastest)"

    def tag(name: str, of_many: str) -> str:
        return rf"rank/\d+/{name}" if few else f"ranks/{name}/{of_many}"

    return {
        "time of a round, without waiting for other ranks (ms)": (several, tag("step_ms", three)),
        f"throughput of a rank at that pace ({unit}/s)": (several, tag(f"{unit}_per_s", three)),
        "how much longer the slowest takes than the median (share)": (several, "ranks/spread"),
        "waiting for other ranks (share of the time)": (several, tag("rank_wait_share", "median")),
        "waiting for data (share of the time)": (several and waits, tag("data_wait_share", "most")),
    }


def _of_gpus(num_devices: int, on_cuda: bool) -> _Charts:
    """Return the charts of all GPUs: a curve each, or of many what all nodes' GPUs do together."""
    if num_devices <= MOST_CURVES:
        return {
            "GPU utilization (%)": (on_cuda, r"gpu/\d+/utilization_percent"),
            "GPU memory (GiB)": (on_cuda, r"gpu/\d+/memory_gib"),
            "GPU power (W)": (on_cuda, r"gpu/\d+/power_w"),
            "GPU temperature (°C)": (on_cuda, r"gpu/\d+/temperature_c"),
        }
    return {
        "utilization of all GPUs (%)": (on_cuda, "gpus/utilization_percent/(lowest|mean)"),
        "memory of the fullest GPU (GiB)": (on_cuda, "gpus/memory_gib/most"),
        "power of all GPUs (kW)": (on_cuda, "gpus/power_kw/total"),
    }


def _layout(sections: dict[str, _Charts]) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    for section, charts in sections.items():
        for title, (is_there, tags) in charts.items():
            if is_there:
                anchored = [f"^{tag}$" for tag in ([tags] if isinstance(tags, str) else tags)]
                layout.setdefault(section, {})[title] = ["Multiline", anchored]
    return layout
