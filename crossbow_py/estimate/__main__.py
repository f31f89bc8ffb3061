"""`python -m crossbow_py.estimate`: how large batches may be, how many learners fit, how many workers feed them."""

from __future__ import annotations

from collections.abc import Sequence

from crossbow_py.cli.command_line import run, say
from crossbow_py.core.files import given_path
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.estimate.estimation import estimate
from crossbow_py.estimate.report import as_text, write
from crossbow_py.train.run_folder.recorded_config import composed


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, EstimateConfig, answer, composed)


def answer(config: EstimateConfig) -> int:
    """One estimate, shown and, where `output_dir` is set, written; returns its exit code."""
    found = estimate(config)
    code = say(as_text(found))
    if config.output_dir is not None:
        code = max(code, say("\n".join(write(found, given_path("output_dir", config.output_dir)))))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
