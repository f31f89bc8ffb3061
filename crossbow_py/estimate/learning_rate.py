"""The learning-rate range test of a configured run: as text, in learning_rate.json, and as a picture."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from crossbow_py.core.errors import unwritable
from crossbow_py.core.printing import columns
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.telemetry.events import Listener
from crossbow_py.telemetry.pictures.files import INSTALL_MATPLOTLIB, has_matplotlib
from crossbow_py.telemetry.records import write_json
from crossbow_py.train.__main__ import build_trainer
from crossbow_py.train.tuning.range_test import LearningRateTest, smoothed

JSON_FILE, PLOT_FILE = "learning_rate.json", "learning_rate.png"
_ROWS = 12


class _Says(Listener):
    """Prints what the trainer says while it is built."""

    def on_message(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)


def run_test(config: EstimateConfig) -> LearningRateTest:
    """Load the data and run the test. Raises UserError."""
    return build_trainer(config, None, [_Says()]).find_learning_rate()


def as_text(found: LearningRateTest) -> str:
    """Return the text for the user: what is suggested, and how the loss went."""
    curve = smoothed(found.losses)
    shown = sorted({round(n * (len(curve) - 1) / (_ROWS - 1)) for n in range(_ROWS)})
    rows = [(f"{found.learning_rates[n]:.3g}", f"{curve[n]:.4g}") for n in shown]
    return "\n".join([found.sentence, "", *columns(("learning rate", "loss, smoothed"), rows)])


def write(found: LearningRateTest, folder: Path) -> str:
    """Write learning_rate.json and, with matplotlib, learning_rate.png. Returns a sentence; raises UserError."""
    optimizer = {"name": found.optimizer.NAME, **dataclasses.asdict(found.optimizer)}
    plain = {**dataclasses.asdict(found), "optimizer": optimizer}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON_FILE, plain)
        if not has_matplotlib():
            return f"Written to {folder / JSON_FILE}. No picture: {INSTALL_MATPLOTLIB}"
        found.draw(folder / PLOT_FILE)
    except OSError as error:
        raise unwritable(folder, error) from error
    return f"Written to {folder / JSON_FILE} and {folder / PLOT_FILE}."
