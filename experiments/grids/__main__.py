"""Trains the cells of one of a question's grids, and writes QUESTION/results/GRID.json.

    python experiments/grids QUESTION GRID [--cells PATTERN] [--seeds 0,1,...] [--jobs N] [key=value ...]

QUESTION/README.md says what is compared, QUESTION/grids.yaml what the cells are. A cell that is done is not run again;
`--list` says what would be run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids.running import main

if __name__ == "__main__":
    raise SystemExit(main())
