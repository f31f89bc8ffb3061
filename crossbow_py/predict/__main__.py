"""`python -m crossbow_py.predict`: what trained models say about test data, each alone and as an ensemble."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from crossbow_py.cli.command_line import run, say
from crossbow_py.cli.output_folder import make_folder, new_folder
from crossbow_py.cli.overrides import as_override
from crossbow_py.core.errors import unwritable
from crossbow_py.core.files import given_path
from crossbow_py.predict.config import PredictConfig
from crossbow_py.predict.prediction import predict
from crossbow_py.predict.report import as_text, write


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, PredictConfig, answer, settled=_with_models)


def _with_models(words: list[str]) -> list[str]:
    """Return the words with paths among them, as crossbow_py.report takes them, as the key `models`."""
    paths = [each for each in words if "=" not in each and not each.startswith(("+", "~"))]
    return [*(each for each in words if each not in paths), *([f"models={as_override(paths)}"] if paths else [])]


def answer(config: PredictConfig) -> int:
    """One prediction, shown and written; returns its exit code."""
    with _writable_folder(config) as folder:
        found = predict(config)
        code = say(as_text(found))
        return max(code, say(write(found, folder)))


@contextmanager
def _writable_folder(config: PredictConfig) -> Iterator[Path]:
    """Yield the folder of the results, made before anything is loaded. A new one that stays empty goes in the end."""
    asked = None if config.output_dir is None else given_path("output_dir", config.output_dir)
    was_there = asked is not None and asked.exists()
    folder = new_folder(config.experiment) if asked is None else make_folder(asked)
    try:
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise unwritable(folder, error) from error
        yield folder
    finally:
        if not was_there:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


if __name__ == "__main__":
    raise SystemExit(main())
