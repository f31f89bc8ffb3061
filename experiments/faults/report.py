"""Tables of what was killed and what came of it, built from results objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.bench.windows import spread
from experiments.faults.campaign import PHASES, figures
from experiments.tables.markdown import columns_table, markdown_table, number_of, spread_text

Result = Mapping[str, Any]


def phases(result: Result, num_ranks: int) -> Counter[str]:
    """Count the kills with a checkpoint to go on from, by the phase into which they fell."""
    runs = [run for run in result["runs"] if run["num_ranks"] == num_ranks]
    return Counter(kill["phase"] for run in runs for kill in run["kills"] if kill["whole"] is not None)


def kill9_table(result: Result) -> str:
    columns = sorted({run["num_ranks"] for run in result["runs"]})
    counted = [phases(result, num_ranks) for num_ranks in columns]
    found = [figures([run for run in result["runs"] if run["num_ranks"] == num_ranks]) for num_ranks in columns]
    rows = [[phase, *(str(each[phase]) for each in counted)] for phase in PHASES]
    rows += [
        ["**kills**", *(str(each["kills"]) for each in found)],
        ["of them inside a checkpoint's writing", *(str(each["in_write"]) for each in found)],
        ["resumed from the newest whole checkpoint", *(str(each["resumed"]) for each in found)],
        ["listed checkpoints that were corrupt", *(str(each["corrupt"]) for each in found)],
        [
            "kills before the first checkpoint / started afresh",
            *(f"{each['before_first']} / {each['afresh']}" for each in found),
        ],
        ["**runs** / ended with exit code 0", *(f"{each['runs']} / {each['ended']}" for each in found)],
        ["final model equal to the bit", *(str(each["equal_models"]) for each in found)],
        ["same lines in metrics.jsonl", *(str(each["equal_lines"]) for each in found)],
    ]
    return markdown_table(["", *(f"{n} rank{'s' if n > 1 else ''}" for n in columns)], rows)


def kill9_text(result: Result) -> str:
    kills = [kill for run in result["runs"] for kill in run["kills"]]
    others = [code for kill in kills for code in kill["others"]]
    text = (
        f"Runs of {result['epochs']:g} epochs, killed in chains; {result['minutes']:g} minutes in all. A kill falls "
        f"{median(kill['after_s'] for kill in kills):.2f} s after the first sign of a round (median)."
    )
    if others:
        text += (
            f" In {len(others)} of the kills of two ranks one alone was killed; the other ended by itself with exit "
            f"code 1 in {others.count(1)}, and with 0 in {others.count(0)}, where all was trained already."
        )
    return f"{text}\n\n{kill9_table(result)}"


def restarts_table(result: Result) -> str:
    return columns_table(({"number": number, **run} for number, run in enumerate(result["runs"])), {
        "run": "number",
        "output_dir": lambda run: "set" if run["names_folder"] else "unset",
        "rank killed after": lambda run: f"{run['rank']}, {run['batches']} batches",
        "exit code": "exit_code",
        "went on from": lambda run: " ".join(f"{samples:,}" for samples in run["resumed_at"]),
        "epochs checked": "epochs_checked", "lost": "lost", "again": "repeated",
        "trained in vain": number_of("samples_again"), "back after, s": number_of("restart_s", ".1f"),
        "load": number_of("load", ".1f"), "test accuracy": number_of("test_accuracy", ".4f"),
    })  # fmt: skip


def restarts_text(result: Result) -> str:
    runs, alone = result["runs"], result["alone"]
    back, wall, processor = (
        spread_text(spread([each[key] for each in of]), ".1f")
        for of, key in ((runs, "restart_s"), (alone, "wall_s"), (alone, "processor_s"))
    )
    text = (
        f"{sum(run['exit_code'] == 0 for run in runs)} of {len(runs)} runs of {result['epochs']:g} epochs ended with "
        f"exit code 0; {sum(run['lost'] for run in runs)} samples lost and {sum(run['repeated'] for run in runs)} "
        f"repeated in {sum(run['epochs_checked'] for run in runs)} epochs. From the kill to the end of the first round "
        f"of both ranks: {back} s (n = {len(runs)}). One process, from its start with resume=auto to the end "
        f"of its first round: {wall} s, in which its processors worked "
        f"{processor} s (n = {len(alone)}). Load is of the whole machine, the "
        "run included."
    )
    return f"{text}\n\n{restarts_table(result)}"


def result_text(result: Result) -> str:
    return kill9_text(result) if result["kind"] == "kill9" else restarts_text(result)


TABLES = {"all": result_text}
