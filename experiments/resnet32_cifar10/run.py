"""Trains ResNet-32 on CIFAR-10 by the command line's experiment, one run a seed, and writes results/NAME.json.

    python experiments/resnet32_cifar10/run.py [--experiment NAME] [--name NAME] [--seeds 0,1,...] [key=value ...]

Keys are those of `python -m crossbow_py.train`. A run that was stopped (Ctrl-C, SIGTERM, kill -9) goes on where its
newest checkpoint stands when the same command is given again; the results file is written when all runs are over.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids.recorded_runs import RecordedRuns, record, table_of

# The target is what Crossbow trains this network to.
RUNS = RecordedRuns("resnet32_cifar10", experiment="resnet32_short", target_accuracy=0.88)
TABLES = {"summary": table_of(RUNS)}

main = partial(record, RUNS)

if __name__ == "__main__":
    raise SystemExit(main())
