"""Is a run that is killed at any moment taken up again, to the bit?

    python experiments/faults/kill9.py [--kills 200 --kills-of-two-ranks 40] [--json PATH]

README.md says what is killed, when, and what is looked at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.faults.campaign import EXECUTORS, Campaign, figures
from experiments.faults.report import kill9_text

_KILLS_A_RUN = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=count, default=200, help="of one rank, with a checkpoint to go on from (default %(default)s)")
    add("--kills-of-two-ranks", type=int, default=40, help="of two ranks, so (default %(default)s)")
    add("--epochs", type=positive, default=10.0, help="of each run (default %(default)s)")
    add("--seed", type=int, default=0, help="of the moments (default %(default)s)")
    add("--folder", type=Path, help="on the disk to write to (default that for temporary files)")
    return measure_and_write(parser, argv, measure, kill9_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        campaign = Campaign(Path(folder).resolve(), given.epochs, given.seed)
        runs = _runs(campaign, 1, given.kills) + _runs(campaign, 2, given.kills_of_two_ranks)
    minutes = round((time.monotonic() - begin_s) / 60, 1)
    return {"kind": "kill9", "epochs": given.epochs, "seed": given.seed, "minutes": minutes, "runs": runs}


def _runs(campaign: Campaign, num_ranks: int, num_kills: int) -> list[dict[str, Any]]:
    """Run until that many kills had a checkpoint to go on from; executors take turns."""
    runs: list[dict[str, Any]] = []
    while (missing := num_kills - (figures(runs)["kills"] if runs else 0)) > 0:
        executor = EXECUTORS[len(runs) % len(EXECUTORS)]
        name = f"killed_{num_ranks}_{len(runs)}"
        runs.append(campaign.run(num_ranks, executor, min(missing, _KILLS_A_RUN), name).to_plain())
        found = figures(runs)
        print(f"{name}: {found}", flush=True)
    return runs


if __name__ == "__main__":
    raise SystemExit(main())
