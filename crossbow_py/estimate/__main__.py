"""`python -m crossbow_py.estimate`: how large batches may be, how many learners fit, how many workers feed them."""

from __future__ import annotations

from collections.abc import Sequence

from crossbow_py.cli.command_line import run, say
from crossbow_py.core.files import given_path
from crossbow_py.estimate import learning_rate
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.estimate.estimation import estimate
from crossbow_py.estimate.report import as_text, write
from crossbow_py.train.run_folder.recorded_config import composed


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, EstimateConfig, answer, composed)


def answer(config: EstimateConfig) -> int:
    """One estimate, shown and, where `output_dir` is set, written; returns its exit code."""
    folder = None if config.output_dir is None else given_path("output_dir", config.output_dir)
    if config.find_learning_rate:
        tested = learning_rate.run_test(config)
        texts = [learning_rate.as_text(tested), *([learning_rate.write(tested, folder)] if folder else [])]
    else:
        found = estimate(config)
        texts = [as_text(found), *(["\n".join(write(found, folder))] if folder else [])]
    return max(map(say, texts))


if __name__ == "__main__":
    raise SystemExit(main())
