"""A rank that hangs, as plain values: the watch finds it, and the summary of the run names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HangingRank:
    """A rank that kept the others waiting until they ended the run.

    Attributes:
        rank, host, pid: where it is.
        doing: its last task.
        since: the time at which it began that task, as far as the others have heard, in ISO 8601.
        heard_s: for how many seconds nothing was heard of it.
        function: the functions in which its threads were when asked, with file and line; None if it did not answer.
        stacks: the file in the run's folder with the stacks of its threads, likewise.
    """

    rank: int
    host: str
    pid: int
    doing: str
    since: str
    heard_s: float
    function: str | None = None
    stacks: str | None = None
