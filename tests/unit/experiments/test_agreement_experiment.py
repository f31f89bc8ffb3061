"""The experiment on what executors train: its networks by plain PyTorch, and its commands in a short form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.agreement import nets, run, throughput
from experiments.bench.machine import ROOT


@pytest.mark.parametrize("name", [name for name in nets.NETS if name != "tiny Llama"])
def test_network_of_the_experiment_trains_serially_as_in_plain_pytorch(name: str) -> None:
    assert nets.trained(name, "serial") == {"executor": "serial", "distance": pytest.approx(0, abs=1e-6)}


@pytest.mark.parametrize("name", ["straight-through estimator", "gradient reversal", "backward hook"])
def test_network_of_the_experiment_that_no_graph_can_hold_is_refused(name: str) -> None:
    assert nets.trained(name, "fused")["refused"].startswith("executor=fused cannot run this model: ")


def test_table_of_networks_says_where_weights_differ() -> None:
    found = {"auto": {"executor": "threads", "distance": 0.5}, "fused": {"refused": "why."}}
    text = run.result_text({"nets": {"a net": found}})
    assert "| a net | 5e-01 (threads) DIFFERENT | refused |" in text
    assert text.endswith("- why.")


def test_throughput_command_compares_two_trees_by_turns(tmp_path, monkeypatch, capsys) -> None:
    @contextmanager
    def this_tree(revision: str) -> Iterator[Path]:
        assert revision == "HEAD~1"
        yield ROOT

    monkeypatch.setattr(throughput, "tree_of", this_tree)  # a clone for tests may have no other commit
    path = tmp_path / "throughput.json"
    arguments = ["throughput", "--before", "HEAD~1", "--models", "lenet", "--executors", "serial"]
    assert run.main([*arguments, "--repetitions", "1", "--seconds", "0.05", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["throughput"].values()
    assert found["n"] + (found["dropped"] > 0) >= 1
    assert "now ÷ before" in capsys.readouterr().out
