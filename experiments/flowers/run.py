"""Trains ResNet-18 on 200 photographs of flowers, one run a seed, and writes results/NAME.json.

    python experiments/flowers/run.py [--experiment NAME] [--name NAME] [--seeds 0,1,...] [key=value ...]

Keys are those of `python -m crossbow_py.train`. A run that was stopped (Ctrl-C, SIGTERM, kill -9) goes on where its
newest checkpoint stands when the same command is given again; the results file is written when all runs are over.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids.recorded_runs import RecordedRuns, record, table_of

# Five classes of equally many photographs: guessing gets one in five.
RUNS = RecordedRuns(
    "flowers",
    experiment="flowers",
    target_accuracy=0.45,
    seeds=(0, 1, 2),
    chance=0.2,
    shown_accuracy=(0.0, 1.0),
)
TABLES = {"summary": table_of(RUNS)}

main = partial(record, RUNS)

if __name__ == "__main__":
    raise SystemExit(main())
