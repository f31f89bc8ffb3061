"""Tables of simulated rounds, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.scaling.inputs import HIDDEN_SHARE, PARAMETERS, SHOWN_COUNTS, Workload
from experiments.tables.markdown import columns_table, markdown_table, number_of

Result = Mapping[str, Any]


def result_text(result: Result) -> str:
    lost, counts = result["stragglers"], ", ".join(map(str, SHOWN_COUNTS))
    return (
        f"One GPU, an input:\n\n{inputs_table(result)}\n\n"
        f"Share of a round that averaging is exposed for, averaging in every round (τ = 1), at {counts} "
        f"GPUs; the first number of GPUs at which it is over {HIDDEN_SHARE:.0%}; the shortest period, a power of two "
        f"up to 256, with which it is not at any:\n\n{scenes_table(result)}\n\n"
        f"Images/s by GPUs times those of one, at {result['gpu_counts'][-1]} GPUs:\n\n{efficiency_table(result)}\n\n"
        f"Share of a round lost to averaging at {lost['gpus']} GPUs, when learning varies otherwise than assumed "
        f"({lost['workload']}, {lost['network']}):\n\n{stragglers_table(result)}\n\n"
        f"n = {result['rounds']} simulated rounds a point, after as many to warm up."
    )


def inputs_table(result: Result) -> str:
    rows = []
    for values in result["inputs"]["workloads"]:
        workload = Workload(**values)
        round_ms = 1000 * workload.images_a_round / workload.images_per_s
        rows.append(
            [workload.name, f"{PARAMETERS[workload.model] / 1e6:.2f}", f"{workload.images_per_s:,}", f"{round_ms:.2f}",
             workload.basis]
        )  # fmt: skip
    return markdown_table(["", "P, M", "images/s", "round, ms", "images/s are"], rows)


def scenes_table(result: Result) -> str:
    places = [result["gpu_counts"].index(count) for count in SHOWN_COUNTS]
    header = [
        "", "network", *(f"{count}" for count in SHOWN_COUNTS), f"over {HIDDEN_SHARE:.0%} from", "τ", "H",
        "τ, all waiting",
    ]  # fmt: skip
    rows = []
    for scene in result["scenes"]:
        shares = scene["curves"]["τ=1"]["exposed"]
        periods = [scene[key] for key in ("period", "node_period", "waiting_period")]
        rows.append(
            [scene["workload"], scene["network"], *(f"{shares[place]:.1%}" for place in places),
             "never" if scene["exposed_from"] is None else f"{scene['exposed_from']} GPUs",
             *("none" if period is None else str(period) for period in periods)]
        )  # fmt: skip
    return markdown_table(header, rows)


def efficiency_table(result: Result) -> str:
    names = {"period": "τ", "node_period": "H"}
    rows = []
    for scene in result["scenes"]:
        curves, found = scene["curves"], []
        for key, letter in names.items():
            name = f"{letter}={scene[key]}"
            found.append(f"{curves[name]['efficiency'][-1]:.2f} ({name})" if name in curves else "–")
        first = curves["τ=1"]
        rows.append(
            [scene["workload"], scene["network"], f"{scene['all_reduce_us'][-1] / 1000:,.2f}",
             f"{first['efficiency'][-1]:.2f}", f"{first['waiting'][-1]:.1%}", *found,
             f"{curves['synchronous']['efficiency'][-1]:.2f}"]
        )  # fmt: skip
    header = ["", "network", "all-reduce, ms", "τ=1", "of this lost to waiting", "with that τ", "with that H",
              "synchronous"]  # fmt: skip
    return markdown_table(header, rows)


def stragglers_table(result: Result) -> str:
    return columns_table(result["stragglers"]["rows"], {
        "round to round": number_of("cv", ".0%"), "GPU to GPU": number_of("rank_cv", ".0%"),
        "SMA, τ=1": number_of("sma", ".1%"), "synchronous": number_of("synchronous", ".1%"),
    })  # fmt: skip


TABLES = {"all": result_text}
