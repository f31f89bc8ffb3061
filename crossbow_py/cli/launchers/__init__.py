"""Launchers of our own: jobs that run in processes elsewhere, of which each is a command line and nothing else."""

from __future__ import annotations

from crossbow_py.core.errors import CrossbowError, one_line

_LONGEST_SAID = 300


class LaunchError(CrossbowError):
    """A launcher, ours or Hydra's, failed, or lost a run of a sweep. What has ended is kept. The error is the cause.

    Args:
        choice: the word that chose it, such as hydra/launcher=joblib.
        error: what it raised.
    """

    def __init__(self, choice: str, error: BaseException) -> None:
        said = one_line(error)[:_LONGEST_SAID].rstrip(".")
        super().__init__(
            f"{choice} failed ({said}); what has ended is kept. Look at its own output, or leave "
            f"{choice.partition('=')[0]} out, and the runs go one after another."
        )
