"""Tables of simulated, calibrated and validated rounds, built from a results object that says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.scaling.inputs import HIDDEN_SHARE, PARAMETERS, SHOWN_COUNTS, Workload
from experiments.tables.markdown import Column, columns_table, markdown_table, number_of, spread_text

SIMULATED, CALIBRATED, VALIDATED = "simulated", "calibrated", "validated"
TARGET_ERROR = 0.10

Result = Mapping[str, Any]


def result_text(result: Result) -> str:
    return {SIMULATED: simulated_text, CALIBRATED: calibrated_text, VALIDATED: validated_text}[result["kind"]](result)


def simulated_text(result: Result) -> str:
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


def calibrated_text(result: Result) -> str:
    sweep = result["all_reduce"]
    lines = [
        f"{kind}: α = {sweep[kind]['alpha_us']:,.0f} µs, β = {sweep[kind]['gb_per_s']:.2f} GB/s, off by "
        f"{sweep[kind]['line_off']:.0%} in the median"
        for kind in ("idle", "busy")
    ]
    return (
        f"Tasks of a rank with one learner on one core, both ranks at work (medians):\n\n{tasks_table(result)}\n\n"
        f"All-reduce between the two, by gloo over the loopback device (means), while the cores idle and while each "
        f"trains {sweep['beside']}:\n\n{all_reduce_table(result)}\n\n{'; '.join(lines)}. One costs the "
        f"learner of a rank {sweep['core_share']:.2f} times what it takes on idle cores.\n\n{quiet_line(result)}"
    )


def tasks_table(result: Result) -> str:
    def noise(key: str, form: str) -> Column:
        return lambda case: format(case["noise"][key], form)

    return columns_table(result["cases"], {
        "": lambda case: f"{case['model']} b={case['batch_size']}",
        **{f"{name}, ms": number_of(f"{name}_ms", ".3g")
           for name in ("round", "learning", "correction", "sum", "move")},
        "noise, cv": noise("cv", ".1%"), "median ÷ log-normal": noise("median_by_lognormal", ".2f"),
        "95 % ÷ log-normal": noise("p95_by_lognormal", ".2f"), "n": noise("n", "d"),
    })  # fmt: skip


def all_reduce_table(result: Result) -> str:
    sweep = result["all_reduce"]
    values = zip(sweep["bytes"], sweep["idle"]["us"], sweep["busy"]["us"], sweep["n"], strict=True)
    rows = [
        [
            f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB",
            f"{idle / 1000:,.2f}",
            f"{busy / 1000:,.2f}",
            f"{busy / idle:.1f}",
            str(n),
        ]
        for size, idle, busy, n in values
    ]
    return markdown_table(["", "idle, ms", "busy, ms", "ratio", "n"], rows)


def validated_text(result: Result) -> str:
    rows = [row for row in result["rows"] if row["n"]]
    near = [row for row in rows if abs(row["error"]["median"]) <= TARGET_ERROR]
    return (
        f"Within {TARGET_ERROR:.0%} in {len(near)} of {len(result['rows'])} cases.\n\n{validation_table(result)}\n\n"
        f"{quiet_line(result)}"
    )


def validation_table(result: Result) -> str:
    header = ["", "τ", "alone, ms", "measured, ms", "predicted, ms", "error", "exposed", "predicted exposed", "n"]
    rows = []
    for row in result["rows"]:
        name = [f"{row['model']} b={row['batch_size']}", str(row["period"])]
        if not row["n"]:
            rows.append([*name, *["–"] * 6, "0"])
            continue
        times = [f"{row[key]:.4g}" for key in ("alone_ms", "measured_ms", "predicted_ms")]
        shares = [spread_text(row[key], ".1%") for key in ("error", "exposed", "predicted_exposed")]
        rows.append([*name, *times, *shares, str(row["n"])])
    return markdown_table(header, rows)


def quiet_line(result: Result) -> str:
    share = "unknown" if result["foreign_share"] is None else f"{result['foreign_share']:.1%}"
    return (
        f"Load average before: {result['load_before']}; others took {share} of the processor in the median window; "
        f"{result['dropped']} windows were dropped because they took more."
    )


TABLES = {"all": result_text}
