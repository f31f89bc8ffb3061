"""The mutations of the package: their table is that of the last run, fits the tree, and some are tried here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.simulated_cuda.__main__ import environment, refusal
from tests.simulated_cuda.mutation_table import MUTATIONS
from tests.simulated_cuda.mutations import PAGE, RESULTS, ROOT, changed, page_with

SOME = ("no wait", "batch freed too early", "value from the host")
needs_device = pytest.mark.skipif(refusal() is not None, reason=f"no simulated CUDA device: {refusal()}")


def results():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_text_of_every_mutation_is_in_the_tree_once():
    for each in MUTATIONS:
        assert changed(each, (ROOT / each.file).read_text(encoding="utf-8"))
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= 30


def test_every_mutation_was_tried_and_caught():
    found = results()
    assert [each["name"] for each in found] == [each.name for each in MUTATIONS]
    assert [each["name"] for each in found if each["caught_by"] is None] == []


def test_page_has_the_table_of_the_last_run():
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(results(), page) == page


def try_mutations(*names):
    only = [part for name in names for part in ("--only", name)]
    command = [sys.executable, "-m", "tests.simulated_cuda.mutations", *only]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@needs_device
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_some_mutations_are_caught_as_the_table_says():
    caught = {each["name"]: each["caught_by"] for each in results()}
    for line in try_mutations(*SOME):
        name, by = line.removeprefix("caught  ").split(": ")[:2]
        assert by.split(" — ")[0] == caught[name]


@needs_device
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_mutations_are_caught():
    names = [each.name for each in MUTATIONS]
    assert len(try_mutations(*names)) == len(names)
