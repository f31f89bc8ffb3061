"""SIGTERM and Ctrl-C as a flag: the handler only notes the signal, and the training loop acts between two rounds."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, ClassVar, Literal

EXIT_TERMINATED, EXIT_INTERRUPTED = 143, 130


class StopSignal:
    """Context manager that installs handlers if `enabled` and restores the old ones. A second Ctrl-C acts at once.

    Attributes:
        status: the status of the run that the signal stops, None before a signal.
        REASONS: the signal's name, by status.
        EXIT_CODES: the process's exit code, by status.
    """

    _STATUS: ClassVar[dict[signal.Signals, str]] = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
    REASONS: ClassVar[dict[str, str]] = {"terminated": "SIGTERM", "interrupted": "Ctrl-C"}
    EXIT_CODES: ClassVar[dict[str, int]] = {"terminated": EXIT_TERMINATED, "interrupted": EXIT_INTERRUPTED}

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._old: dict[signal.Signals, Any] = {}
        self.status: str | None = None

    def __enter__(self) -> StopSignal:
        if self._enabled:
            self._old = {number: signal.signal(number, self._note) for number in self._STATUS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.status = self._STATUS[signal.Signals(number)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        return False
