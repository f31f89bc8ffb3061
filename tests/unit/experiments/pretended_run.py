"""A program that a grid's cells can run in place of training: it writes the records of a run, fails, or waits.

python -m tests.unit.experiments.pretended_run PARTS accuracy=0.9 [fails=true] [waits=true] seed=0 output_dir='...'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def summary_of(accuracy: float | None) -> dict[str, object]:
    failed = accuracy is None
    return {
        "status": "failed" if failed else "finished", "stop_reason": "non_finite" if failed else "max_epochs",
        "device": "cpu", "executor": "serial", "precision": "fp32", "averaging": "sma", "model": "mlp",
        "data": "digits", "num_learners": 4, "batch_size": 16, "epochs": 2.0, "samples_seen": 200,
        "test_accuracy": accuracy, "best_test_accuracy": accuracy, "train_time_s": 3.0,
    }  # fmt: skip


def epochs_of(accuracy: float) -> list[dict[str, object]]:
    """Two epochs, the first with half of the accuracy."""
    return [
        {"epoch": e, "samples_seen": 100 * e, "elapsed_s": 1.5 * e, "num_learners": 4, "train_loss": 0.5,
         "test_loss": 0.4, "test_accuracy": accuracy * e / 2}
        for e in (1, 2)
    ]  # fmt: skip


def main() -> int:
    settings = dict(word.split("=", 1) for word in sys.argv[2:])
    if "fails" in settings:
        print("error: that cannot be.")
        return 2
    folder = Path(settings["output_dir"].strip("'"))
    folder.mkdir(parents=True)
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "threads").write_text(os.environ.get("OMP_NUM_THREADS", ""))
    while "waits" in settings:
        time.sleep(0.05)
    accuracy = float(settings["accuracy"]) if "accuracy" in settings else None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs_of(accuracy or 0.0)))
    (folder / "summary.json").write_text(json.dumps(summary_of(accuracy)))
    return 1 if accuracy is None else 0


if __name__ == "__main__":
    raise SystemExit(main())
