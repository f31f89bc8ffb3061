"""Draws a picture beside every results file: final test accuracy of every rule, and accuracy against samples.

python experiments/averaging_rules/plot.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from matplotlib.figure import Figure

from experiments.averaging_rules.run import EXPERIMENT
from experiments.grids.plot import draw_accuracies
from experiments.grids.summary import Result
from experiments.tables.pictures import save_pictures


def main() -> int:
    """Draw all results; returns the exit code."""
    return save_pictures(EXPERIMENT, draw)


def draw(result: Result) -> Figure:
    """Of one grid."""
    return draw_accuracies(result)


if __name__ == "__main__":
    raise SystemExit(main())
