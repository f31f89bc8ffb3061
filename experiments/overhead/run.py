"""What does a user wait for that is no training?

    python experiments/overhead/run.py [--repetitions 15 --seconds 2] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine, machine_line
from experiments.bench.results import write_result
from experiments.overhead.measure import NETWORKS, measure_starts, measure_telemetry
from experiments.overhead.report import result_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--repetitions", type=count, default=15, help="of everything (default %(default)s)")
    add("--seconds", type=positive, default=2.0, help="of training, each time (default %(default)s)")
    options = parser.parse_args(argv)
    result = {
        "machine": machine(),
        "starts": measure_starts(options.repetitions),
        "telemetry": {name: measure_telemetry(name, options.repetitions, options.seconds) for name in NETWORKS},
    }
    print(f"\n{result_text(result)}\n\n{machine_line(result['machine'])}")
    if options.json:
        write_result(options.json, result)
        print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
