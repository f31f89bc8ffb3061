"""The auto-tuner at work in a run: cuts training time into windows, and feeds their throughput to the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossbow_py.engine.auto_tuner import AutoTuner, AutoTunerState, Decision

WINDOW_S = 0.3
MIN_GAIN = 0.03
_MIN_ROUNDS = 4


class LearnerTuning:
    """Counts rounds between looks. Owned by the training loop.

    Args:
        tuner: the rules.
        window_s: length of a throughput window in seconds of training; longer where fewer than four rounds fit.
    """

    def __init__(self, tuner: AutoTuner, window_s: float = WINDOW_S) -> None:
        self.tuner, self.state = tuner, AutoTunerState()
        self._window_s = window_s
        self._begun_s: float | None = None
        self._images = self._rounds = 0

    def after_round(self, images: int, elapsed_s: float) -> Decision | None:
        """Count a round of `images`, over by `elapsed_s` of training, pauses left out; a decision ends a window."""
        if self._begun_s is None:
            self._begun_s = elapsed_s
            return None
        self._images, self._rounds = self._images + images, self._rounds + 1
        seconds = elapsed_s - self._begun_s
        if seconds < self._window_s or self._rounds < _MIN_ROUNDS:
            return None
        rate = self._images / seconds
        self._restart_window()
        self._begun_s = elapsed_s
        self.state, decision = self.tuner.observe(self.state, rate)
        return decision

    def _restart_window(self) -> None:
        self._begun_s, self._images, self._rounds = None, 0, 0

    def out_of_memory(self) -> Decision:
        """The number of learners just tried does not fit."""
        self._restart_window()
        self.state, decision = self.tuner.out_of_memory(self.state)
        return decision

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return self.state.to_plain()

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from `to_plain()`."""
        self.state = AutoTunerState.from_plain(dict(values))
