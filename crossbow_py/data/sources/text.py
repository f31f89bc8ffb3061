"""Text for language models: files as a stream of tokens, cut into samples of as many as the model sees at once."""

from __future__ import annotations

import glob
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import setting
from crossbow_py.data.datasets import Data, Pair, as_pair
from crossbow_py.data.sources.base import SourceSettings

_NUM_BYTES = 256
_MOST_CHARACTERS = 2**16


@dataclass(frozen=True)
class Text(SourceSettings):
    """Samples of `context` tokens, each with the tokens behind them as targets; the end of the text is the test data.

    Tokens are UTF-8 bytes, or the characters that the text has.
    """

    NAME = "text"

    file: str | None = setting(
        None, "text file, or a pattern such as 'docs/**/*.md', whose files are read in order; null: Python's library"
    )
    context: int = setting(128, "tokens of a sample: the most that a model looks back", minimum=1)
    vocabulary: Literal["bytes", "characters"] = setting("bytes", "what a token is: a byte of UTF-8, or a character")
    test_fraction: float = setting(0.05, "part of the text, its end, that is the test data", above=0, below=1)

    def read(self, progress: bool) -> tuple[Data, Data]:
        tokens = self._tokens(self._text())
        cut = round(len(tokens) * (1 - self.test_fraction))
        parts = {"training": tokens[:cut], "test": tokens[cut:]}
        for name, own in parts.items():
            if len(own) <= self.context:
                raise UserError(
                    f"data.file={self.file} has {len(own):,} tokens of {name} data, and a sample takes {self.context} "
                    "and the next one; give more text, or lower data.context."
                )
        return self._samples(parts["training"]), self._samples(parts["test"])

    def moments(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        return None, None

    def count_classes(self, train: Data, test: Data) -> int | None:
        """Return the number of tokens."""
        if self.vocabulary == "bytes":
            return _NUM_BYTES
        return 1 + max(int(tokens.max()) for data in (train, test) for tokens in as_pair(data) or ())

    def notes(self, train: Data, test: Data) -> tuple[str, ...]:
        of_train, of_test = (targets.numel() for targets in _targets(train, test))
        return (f"The text has {of_train:,} tokens for training and {of_test:,} for the test.",)

    def _text(self) -> bytes:
        pattern = self.file or str(Path(sysconfig.get_path("stdlib")) / "*.py")
        paths = [pattern]
        if not Path(pattern).exists():  # else a name, though it may look like a pattern: notes[1].txt
            found = glob.glob(pattern, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
            paths = sorted(path for path in found if not Path(path).is_dir())
        if not paths:
            raise UserError(f"data.file={pattern} matches no file; give the path of one, or a pattern in quotes.")
        try:
            content = []
            for path in paths:
                with open(path, "rb") as file:
                    content.append(file.read())
        except OSError as error:
            raise UserError(f"data.file={self.file} cannot be read ({one_line(error)}); give files.") from error
        return b"\n".join(content)

    def _tokens(self, text: bytes) -> Tensor:
        if self.vocabulary == "bytes":
            return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        try:
            points = np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)
        except UnicodeDecodeError as error:
            wrong = f"data.file={self.file} is not UTF-8 ({one_line(error)})"
            raise UserError(f"{wrong}; set data.vocabulary=bytes.") from error
        known, tokens = np.unique(points, return_inverse=True)
        if len(known) > _MOST_CHARACTERS:
            found = f"{len(known):,} different characters, at most {_MOST_CHARACTERS:,} can be tokens"
            raise UserError(f"data.file={self.file} has {found}; set data.vocabulary=bytes.")
        return torch.from_numpy(tokens.astype(np.int64))

    def _samples(self, tokens: Tensor) -> Pair:
        """Return inputs and targets [N, context], views of one stream; what is left at its end is dropped."""
        count = (len(tokens) - 1) // self.context
        inputs, targets = (tokens[first : first + count * self.context] for first in (0, 1))
        return inputs.view(count, self.context), targets.view(count, self.context)


def _targets(*parts: Data) -> list[Tensor]:
    return [pair[1] for data in parts if (pair := as_pair(data)) is not None]
