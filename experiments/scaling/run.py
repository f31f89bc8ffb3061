"""Simulates rounds of SMA on 1 to 1024 GPUs, for several models and networks.

    python experiments/scaling/run.py [--rounds 512] [--json PATH]

README.md says what is assumed and what follows. Nothing is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.scaling.inputs import GPU, GPU_COUNTS, SYNCHRONOUS, WORKLOADS
from experiments.scaling.network import NETWORKS
from experiments.scaling.report import SIMULATED, result_text
from experiments.scaling.study import stragglers, study

_STRAGGLERS_OF = 1  # of WORKLOADS: short rounds, which have the least to spare


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--rounds", type=count, default=512, help="a point, after as many to warm up (%(default)s)")
    given = parser.parse_args(argv)
    workload = WORKLOADS[_STRAGGLERS_OF]
    result = {
        "machine": machine(),
        "kind": SIMULATED,
        "rounds": given.rounds,
        "gpu_counts": GPU_COUNTS,
        "inputs": {"workloads": WORKLOADS, "networks": NETWORKS, "gpu": GPU, "synchronous": SYNCHRONOUS},
        "scenes": study(WORKLOADS, NETWORKS, given.rounds),
        "stragglers": {
            "workload": workload["name"],
            "network": NETWORKS[0]["name"],
            "gpus": GPU_COUNTS[-1],
            "rows": stragglers(workload, NETWORKS[0], GPU_COUNTS[-1], given.rounds),
        },
    }
    show_and_write(result, result_text, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
