"""The comparison with an earlier commit, in a short form, of this tree with itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.before_and_now import run
from experiments.bench.machine import ROOT


@pytest.mark.slow
def test_command_compares_two_trees_by_turns(tmp_path, monkeypatch, capsys) -> None:
    @contextmanager
    def this_tree(revision: str) -> Iterator[Path]:
        assert revision == "HEAD~1"
        yield ROOT

    monkeypatch.setattr(run, "tree_of", this_tree)  # a clone for tests may have no other commit
    path = tmp_path / "throughput.json"
    arguments = ["--before", "HEAD~1", "--models", "lenet", "--executors", "serial"]
    assert run.main([*arguments, "--repetitions", "1", "--seconds", "0.05", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["throughput"].values()
    assert found["n"] + (found["dropped"] > 0) >= 1
    assert found["setup_s"]["now"]["median"] > 0
    assert "now ÷ before" in capsys.readouterr().out
