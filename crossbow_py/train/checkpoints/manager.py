"""Manages a run's checkpoints in training: when one is due, and when all ranks conclude it or give it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from crossbow_py.train.checkpoints.resume import state_dict
from crossbow_py.train.checkpoints.writer import CheckpointWriter, Status
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter


class CheckpointManager:
    """Manages checkpoints. Owned by the training loop. Does nothing for a run without a folder.

    Each rank writes its part in the background and reports its status whenever ranks synchronise. Once all parts are
    written the checkpoint is concluded; if one cannot be written all ranks give the checkpoint up.
    """

    STATUSES: tuple[Status, ...] = get_args(Status)

    def __init__(self, run: Run, reporter: Reporter) -> None:
        ranks, keep = run.ranks, run.arguments.checkpoint.keep
        self._run, self._reporter, self._ranks = run, reporter, ranks
        self._writer: CheckpointWriter | None = None
        if run.output_dir is not None:
            self._writer = CheckpointWriter(
                run.output_dir, keep, rank=ranks.rank, num_ranks=ranks.num_ranks, token=ranks.token
            )
        self._last_s = run.state.elapsed_s
        self._samples: int | None = None  # samples seen of the newest that was begun and has not failed
        self._told: str | None = None

    @property
    def status(self) -> int:
        """The status of this rank's part, as an index into STATUSES."""
        return 0 if self._writer is None else self.STATUSES.index(self._writer.status)

    def is_due(self, elapsed_s: float) -> bool:
        """Return whether `checkpoint_every_s` has passed since the last one."""
        every_s = self._run.arguments.checkpoint.every_s
        return every_s is not None and elapsed_s - self._last_s >= every_s

    def has(self, samples_seen: int) -> bool:
        """Return whether a checkpoint at `samples_seen` exists or is being written."""
        return self._writer is None or self._samples == samples_seen

    def begin(self, elapsed_s: float) -> None:
        """Copy the run's state and begin to write it in the background. All ranks together, drained."""
        self._last_s = elapsed_s
        if self._writer is None:
            return
        self.settle()
        self._samples = self._run.state.samples_seen
        self._writer.begin(state_dict(self._run), self._samples)

    def follow(self, statuses: Sequence[int]) -> None:
        """Conclude the checkpoint or give it up, as all ranks' statuses require."""
        writer = self._writer
        if writer is None:
            return
        named = [self.STATUSES[status] for status in statuses]
        if all(status == "written" for status in named):
            writer.conclude()
        elif "failed" in named and "writing" not in named:
            failed = f"rank {named.index('failed')} cannot write its part"
            reason = failed if writer.error is None else writer.error
            writer.discard()
            self._samples = None
            self._reporter.no_checkpoint(str(reason))
        newest = writer.newest
        if newest is not None and str(newest) != self._told:
            self._told = str(newest)
            self._reporter.checkpoint(self._told, int(newest.name.rpartition("-")[2]))

    def settle(self) -> None:
        """Wait until nothing is being written. All ranks together."""
        while self._writer is not None:
            self._writer.wait()
            statuses = [int(status) for (status,) in self._ranks.gather([self.status])]
            self.follow(statuses)
            if not any(statuses):
                return

    def close(self) -> None:
        """Close the writer. A part being written is given up: it is useless if other ranks do not complete theirs."""
        if self._writer is not None:
            self._writer.close()
