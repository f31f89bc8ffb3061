"""One task after another in the calling thread: the oracle that every other executor is compared with."""

from __future__ import annotations

from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.rounds import RoundOutcome


class SerialExecutor(Executor):
    """Runs launches in issue order, on any device, with torch's own intra-op threads."""

    NAME = "serial"

    def _start(self, outcome: RoundOutcome) -> None:
        for launch in self._launches(outcome.plan):
            self.run_task(launch, outcome)

    def _wait(self, outcome: RoundOutcome) -> None:
        """Return at once: tasks were over when they were started."""
