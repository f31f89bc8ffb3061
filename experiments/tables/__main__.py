"""Rebuilds the tables of README.md, docs/ and experiments/*/README.md from the results files.

    python experiments/tables            # write what has changed
    python experiments/tables --check    # only say what is out of date (exit code 1)
    python experiments/tables --pictures QUESTION ...    # draw the pictures of questions anew
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder: its `markdown` is not to stand for the library of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.tables.pages import main

if __name__ == "__main__":
    raise SystemExit(main())
