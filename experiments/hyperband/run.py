"""Hyperband with packs against Hyperband one trial at a time: wall time and best accuracy, same trials and budget.

    python experiments/hyperband/run.py [--repetitions 3] [--json PATH] [KEY=VALUE ...]

README.md says what the sides are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.common.arguments import count
from experiments.common.machine import machine, machine_line
from experiments.common.results import write_result
from experiments.hyperband.measure import measure_hyperband
from experiments.hyperband.report import result_text

DEFAULTS = ("+experiment=search_lenet", "max_epochs=1", "min_epochs=0.1111111111")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as asked for; prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--repetitions", type=count, default=3, help="searches by each side (default %(default)s)")
    add("--json", type=Path, metavar="PATH", help="write the results there")
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the search (default {' '.join(DEFAULTS)})")
    options = parser.parse_args(argv)
    result = {"machine": machine(), **measure_hyperband(options.overrides or DEFAULTS, options.repetitions)}
    print(f"\n{result_text(result)}\n\n{machine_line(result['machine'])}")
    if options.json:
        write_result(options.json, result)
        print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
