"""Draws a picture beside every results file: images/s of all sides, and what packs gain, against the batch size.

python experiments/model_batch/plot.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from matplotlib.figure import Figure

from experiments.common.packs.plot import rate_lines, ratio_lines, save_pictures
from experiments.common.packs.side import DEFAULT, TUNED

EXPERIMENT = "model_batch"


def main() -> int:
    """Draw all results; returns the exit code."""
    return save_pictures(EXPERIMENT, draw)


def draw(result: Mapping[str, Any]) -> Figure:
    """Throughput, and the ratios to both sides of one model at a time."""
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    rates, over_default, over_tuned = figure.subplots(1, 3)
    rate_lines(rates, result["rows"], "batch_size")
    ratio_lines(over_default, result["rows"], "batch_size", DEFAULT)
    ratio_lines(over_tuned, result["rows"], "batch_size", TUNED)
    for axes in (rates, over_default, over_tuned):
        axes.set_xlabel("images in a batch")
    figure.suptitle(f"{result['figure']['num_models']} models, {result['figure']['title']} ({result['device']})")
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
