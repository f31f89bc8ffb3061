"""The layout of TensorBoard's custom scalars for a run: charts in the order of the questions one has about training.

Open it at `#custom_scalars`. Charts that would stay empty for a run are left out; TensorBoard merges the layouts of
several runs.
"""

from __future__ import annotations

import re
from typing import Any

from crossbow_py.telemetry.events import RunInfo


def dashboard(info: RunInfo) -> dict[str, Any]:
    """Return the layout for `SummaryWriter.add_custom_scalars`."""
    measured = "validation" if info.validates else "test"
    learners = [] if info.shares_samples else [rf"accuracy/{measured}_learner_\d+"]
    on_cuda = info.device.startswith("cuda")
    has_spread = info.shares_samples and info.several and info.replicas_differ
    # By section and title: whether the run has the curves, and their tags, which are regular expressions.
    sections: dict[str, dict[str, tuple[bool, str | list[str]]]] = {
        "How well it learns": {
            "accuracy (share of samples)": (info.has_accuracy, [rf"accuracy/(train|{measured}(_z)?)", *learners]),
            "loss": (True, f"loss/(train|{measured})"),
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
        "Averaging": {
            "spread of the learners (share of the norm of z)": (has_spread, "averaging/spread"),
            "norm of the sum of corrections": (has_spread, "averaging/correction_norm"),
        },
        "The machine": {
            "GPU utilization (%)": (on_cuda, r"gpu/\d+/utilization_percent"),
            "GPU memory (GiB)": (on_cuda, r"gpu/\d+/memory_gib"),
            "GPU power (W)": (on_cuda, r"gpu/\d+/power_w"),
            "GPU temperature (°C)": (on_cuda, r"gpu/\d+/temperature_c"),
            "memory (GiB)": (True, r"system/(process_memory|host_memory_available)_gib"),
            "busy CPU cores": (True, "system/process_cpu_cores"),
        },
        "Waiting for data": {
            "share of the time": (info.num_workers is not None, "data/wait_share"),
            "workers": (info.num_workers is not None, "data/num_workers"),
        },
        "How learning goes": {
            "gradient noise scale (samples)": (info.learning_statistics, "learning/gradient_noise_scale_samples"),
            "sharpness": (info.learning_statistics, "learning/sharpness"),
            "agreement of learners (share of samples)": (info.learning_statistics, "learning/agreement"),
        },
    }
    layout: dict[str, Any] = {}
    for section, charts in sections.items():
        for title, (is_there, tags) in charts.items():
            if is_there:
                anchored = [f"^{tag}$" for tag in ([tags] if isinstance(tags, str) else tags)]
                layout.setdefault(section, {})[title] = ["Multiline", anchored]
    return layout
