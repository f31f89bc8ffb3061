"""Draws curve.png: test accuracy and training loss of every run in results/, against samples seen and epochs.

python experiments/resnet32_cifar10/plot.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.resnet32_cifar10.run import RUNS
from experiments.tables.recorded_plot import save_curve


def main() -> int:
    """Draw all results; returns the exit code."""
    return save_curve(RUNS)


if __name__ == "__main__":
    raise SystemExit(main())
