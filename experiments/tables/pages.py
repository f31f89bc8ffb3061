"""Rebuilds the tables of README.md, docs/ and experiments/*/README.md from the results files.

    python experiments/tables.py            # write what has changed
    python experiments/tables.py --check    # only say what is out of date (exit code 1)

A page says where a table goes by `<!-- table:NAME -->` and, on a later line, `<!-- end -->`; what is between them is
replaced. NAME is EXPERIMENT for all of its results (nothing while there are none), EXPERIMENT/TABLE for a table over
all of them, or EXPERIMENT/RESULT/TABLE. Those of keys/... are made of the settings classes (common/keys.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout is enough, installed or not

from experiments.agreement import report as agreement_report
from experiments.auto_tuner.report import decisions_list, phases_table
from experiments.averaging_rules.report import differences_table
from experiments.batch_norm import report as batch_norm_report
from experiments.batch_size import report as batch_size_report
from experiments.checkpoint import report as checkpoint_report
from experiments.common import headline, keys
from experiments.common.cells import report as cells_report
from experiments.common.machine import ROOT, machine_line
from experiments.common.markdown import replace_blocks
from experiments.common.recorded_report import table_of
from experiments.common.results import EXPERIMENTS, read_results
from experiments.estimate import report as estimate_report
from experiments.faults import report as faults_report
from experiments.flowers.run import RUNS as FLOWERS_RUNS
from experiments.gradient_noise import report as gradient_noise_report
from experiments.hyperband import report as hyperband_report
from experiments.loader import report as loader_report
from experiments.memory import report as memory_report
from experiments.model_batch import report as model_batch_report
from experiments.overhead import report as overhead_report
from experiments.pack_step_time import report as pack_step_time_report
from experiments.preprocessing import report as preprocessing_report
from experiments.ranks import report as ranks_report
from experiments.resnet32_cifar10.run import RUNS as RESNET32_RUNS
from experiments.scaling import report as scaling_report
from experiments.throughput import suite_report
from experiments.throughput.analysis import analysis_text
from experiments.throughput.report import result_text, rounds_table, sides_table
from experiments.time_to_accuracy import report as time_report
from experiments.update_bandwidth import report as update_report
from experiments.workers import report as workers_report
from experiments.zoo import report as zoo_report

Table = Callable[[Mapping[str, Any]], str]
Results = Mapping[str, Mapping[str, Any]]


def _machine(result: Mapping[str, Any]) -> str:
    return machine_line(result["machine"])


def _time_headline(result: Mapping[str, Any]) -> str:
    return time_report.sides_table(result, result["targets"][0])


# Of grids of training runs that are compared cell by cell.
_CELLS: dict[str, Table] = {"all": cells_report.result_text, "cells": cells_report.cells_table, "machine": _machine}

# The tables of each experiment; the first is what a page about all of its results shows.
TABLES: dict[str, dict[str, Table]] = {
    "throughput": {"all": result_text, "sides": sides_table, "rounds": rounds_table, "machine": _machine},
    "agreement": {"all": agreement_report.result_text, "machine": _machine},
    "auto_tuner": {
        "all": lambda result: f"{phases_table(result)}\n\n{decisions_list(result)}",
        "phases": phases_table,
        "machine": _machine,
    },
    "averaging_rules": _CELLS,
    "batch_norm": {
        "all": batch_norm_report.result_text,
        "accuracies": batch_norm_report.accuracies_table,
        "costs": batch_norm_report.costs_table,
        "machine": _machine,
    },
    "batch_size": {
        "all": batch_size_report.result_text,
        "batches": batch_size_report.batches_table,
        "machine": _machine,
    },
    "checkpoint": {
        "all": checkpoint_report.result_text,
        "cost": checkpoint_report.cost_table,
        "machine": _machine,
    },
    "estimate": {
        "all": estimate_report.result_text,
        "errors": estimate_report.errors_table,
        "notes": estimate_report.notes,
        "machine": _machine,
    },
    "faults": {"all": faults_report.result_text, "machine": _machine},
    "flowers": {"summary": table_of(FLOWERS_RUNS), "machine": _machine},
    "gradient_noise": {
        "all": gradient_noise_report.result_text,
        "statistics": gradient_noise_report.statistics_table,
        "machine": _machine,
    },
    "hyperband": {
        "all": hyperband_report.result_text,
        "headline": hyperband_report.headline,
        "machine": _machine,
    },
    "loader": {"all": loader_report.result_text, "sides": loader_report.sides_table, "machine": _machine},
    "memory": {"all": memory_report.result_text, "machine": _machine},
    "model_batch": {
        "all": model_batch_report.result_text,
        "summary": model_batch_report.summary_table,
        "headline": model_batch_report.headline,
        "machine": _machine,
    },
    "num_learners_accuracy": _CELLS,
    "overhead": {"all": overhead_report.result_text, "headline": overhead_report.headline, "machine": _machine},
    "pack_step_time": {
        "all": pack_step_time_report.result_text,
        "headline": pack_step_time_report.headline,
        "machine": _machine,
    },
    "preprocessing": {
        "all": preprocessing_report.result_text,
        "shares": preprocessing_report.shares_table,
        "machine": _machine,
    },
    "ranks": {"all": ranks_report.result_text, "ratios": ranks_report.ratios_table, "machine": _machine},
    "resnet32_cifar10": {"summary": table_of(RESNET32_RUNS), "machine": _machine},
    "scaling": {"all": scaling_report.result_text, "machine": _machine},
    "sma_settings": _CELLS,
    "time_to_accuracy": {"all": time_report.result_text, "first_target": _time_headline, "machine": _machine},
    "tuner_accuracy": _CELLS,
    "update_bandwidth": {
        "all": update_report.result_text,
        "bandwidth": update_report.bandwidth_table,
        "machine": _machine,
    },
    "workers": {"all": workers_report.result_text, "workers": workers_report.workers_table, "machine": _machine},
    "zoo": {"all": zoo_report.result_text, "summary": zoo_report.summary_table, "machine": _machine},
}
# Over all results of an experiment.
TABLES_OVER_ALL: dict[str, dict[str, Callable[[Results], str]]] = {
    "averaging_rules": {"differences": differences_table},
}
# Those of a result that says of itself what kind it is.
TABLES_OF_KIND: dict[str, dict[str, Table]] = {
    suite_report.KIND: {
        "all": lambda result: "\n\n".join(filter(None, [suite_report.result_text(result), analysis_text(result)])),
        "summary": suite_report.summary_table,
        "notes": suite_report.notes,
        "machine": _machine,
    }
}


def main(argv: Sequence[str] | None = None) -> int:
    """Bring the pages up to date, or check that they are; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is out of date")
    check = parser.parse_args(argv).check
    try:
        changed = [(path, text) for path in pages() if (text := rebuilt(path.read_text())) != path.read_text()]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in changed:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'rebuilt'}")
        if not check:
            path.write_text(text)
    return int(check and bool(changed))


def pages() -> list[Path]:
    """The pages that may hold tables."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in [ROOT / "README.md", *docs, *sorted(EXPERIMENTS.glob("*/README.md"))] if path.exists()]


def rebuilt(page: str) -> str:
    """A page with every table built anew. Raises ValueError for a table that cannot be built."""
    return replace_blocks(page, lambda name: build(name, read_results(name.split("/")[0])))


def build(name: str, results: Results) -> str:
    """What belongs into the block NAME, given its experiment's results. Raises ValueError for an unknown name."""
    experiment, *rest = name.split("/")
    if experiment == keys.NAME:
        return keys.table("/".join(rest))
    if name == headline.NAME:
        return headline.table()
    if experiment not in TABLES:
        raise ValueError(f"table:{name} is of no known experiment; known: {', '.join(TABLES)}.")
    if not rest:
        return "\n\n".join(_section(experiment, result, results[result]) for result in results)
    if rest[0] in TABLES_OVER_ALL.get(experiment, {}):
        return TABLES_OVER_ALL[experiment][rest[0]](results)
    result, table = (*rest, "")[:2]
    tables = _tables(experiment, results.get(result, {}))
    if result not in results or table not in tables:
        raise ValueError(
            f"table:{name} must be EXPERIMENT/RESULT/TABLE with a result of {', '.join(results) or 'none yet'} and a "
            f"table of {', '.join(tables)}."
        )
    return tables[table](results[result])


def _tables(experiment: str, result: Mapping[str, Any]) -> dict[str, Table]:
    return TABLES_OF_KIND.get(result.get("kind", ""), TABLES[experiment])


def _section(experiment: str, name: str, result: Mapping[str, Any]) -> str:
    """One result with its command and machine."""
    main_table = next(iter(_tables(experiment, result).values()))
    facts = result["machine"]
    return f"### {name}\n\n    {facts['command']}\n\n{main_table(result)}\n\n{machine_line(facts)}"


if __name__ == "__main__":
    raise SystemExit(main())
