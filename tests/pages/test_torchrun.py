"""Commands with several ranks on one machine, run with two; those of several machines test_snippets checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.snippets import ROOT, Snippet, commands, pages, snippets
from tests.pages.tiny_data import write_data_root

PROGRAM = "train_ranks.py"  # shown on a page


def standalone() -> list[tuple[Snippet, list[str]]]:
    """The page's block and the words of each such command."""
    return [
        (snippet, words)
        for page in pages()
        for snippet in snippets(page)
        if snippet.language == "sh"
        for words in commands(snippet)
        if words[0] == "torchrun" and "--standalone" in words
    ]


def with_two_ranks(words: list[str]) -> list[str]:
    """Without restarts, which a test would take for patience; and fast, where it is a command of ours."""
    kept = [word for word in words[1:] if not word.startswith(("--nproc-per-node", "--max-restarts"))]
    fast = "+debug=search_fast" if "crossbow_py.search" in kept else "+debug=fast"
    return ["--nproc-per-node=2", *kept, *([fast, "device=cpu"] if "-m" in kept else [])]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("snippet", "words"), standalone(), ids=lambda each: getattr(each, "place", None))
def test_command_with_ranks_does_what_it_says(snippet: Snippet, words: list[str], tmp_path: Path) -> None:
    root = write_data_root(tmp_path / "data")
    for other in snippets(snippet.page):
        if other.title == PROGRAM:
            (tmp_path / PROGRAM).write_text(other.text)
    environment = {**os.environ, "CROSSBOW_DATA_DIR": str(root), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *with_two_ranks(words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_have_such_commands() -> None:
    assert len(standalone()) >= 5
