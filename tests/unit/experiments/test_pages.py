"""The tables on the pages are those of the results files."""

from __future__ import annotations

import re

import pytest
import torch

from experiments.bench.machine import ROOT, command, commit, machine, machine_line
from experiments.bench.results import EXPERIMENTS
from experiments.tables import pages
from experiments.tables.markdown import markdown_table, replace_blocks
from experiments.throughput import report
from tests.unit.experiments.samples import throughput_result


def test_machine_names_what_a_number_depends_on() -> None:
    facts = machine()
    assert facts["torch"] == torch.__version__
    assert facts["cores"] >= 1
    assert facts["cpu"] in machine_line(facts)
    assert facts["commit"] == commit()


def test_commit_outside_of_a_repository_is_the_one_that_was_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.bench.machine.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    monkeypatch.setenv("CROSSBOW_COMMIT", "0123abcd")
    assert commit() == "0123abcd"


def test_command_shows_no_path_of_the_machine() -> None:
    argv = [str(ROOT / "experiments" / "x.py"), "--json", "/elsewhere/deep/out.json", "data.root=/some/data", "a=1"]
    assert command(argv) == "python experiments/x.py --json out.json data.root=data a=1"


def test_markdown_table_is_aligned() -> None:
    assert markdown_table(["side", "n"], [["a", "10"], ["longer", "7"]]).splitlines() == [
        "| side   |   n |",
        "| ------ | --: |",
        "| a      |  10 |",
        "| longer |   7 |",
    ]


def test_replace_blocks_touches_nothing_outside_of_them() -> None:
    page = "a\n<!-- table:x -->\nold\nrows\n<!-- end -->\nb\n<!-- table:y -->\n<!-- end -->\n"
    replaced = replace_blocks(page, {"x": "new", "y": ""}.__getitem__)
    assert replaced == "a\n<!-- table:x -->\nnew\n<!-- end -->\nb\n<!-- table:y -->\n<!-- end -->\n"
    assert replace_blocks(replaced, {"x": "new", "y": ""}.__getitem__) == replaced


def test_replace_blocks_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="end"):
        replace_blocks("<!-- table:x -->\nrows\n<!-- table:y -->\n<!-- end -->\n", str)


def test_table_of_an_experiment_shows_every_result_and_none_without_any() -> None:
    results = {"lenet_b16": throughput_result(), "resnet32_b16": throughput_result()}
    text = pages.build("throughput", results)
    assert [line for line in text.splitlines() if line.startswith("#")] == ["### lenet_b16", "### resnet32_b16"]
    assert pages.build("throughput", {}) == ""


def test_table_of_one_result_is_that_table_alone() -> None:
    result = throughput_result()
    assert pages.build("throughput/lenet_b16/machine", {"lenet_b16": result}) == machine_line(result["machine"])
    assert pages.build("throughput/lenet_b16/all", {"lenet_b16": result}) == report.result_text(result)


@pytest.mark.parametrize("name", ["other", "throughput/lenet_b16/sides", "throughput/resnet32_b16/other"])
def test_table_that_cannot_be_built_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"table:{name}"):
        pages.build(name, {"resnet32_b16": throughput_result()})


def test_pages_show_what_the_results_files_say() -> None:
    assert [
        str(path.relative_to(ROOT)) for path in pages.pages() if pages.rebuilt(path.read_text()) != path.read_text()
    ] == []


@pytest.mark.parametrize("question", pages.questions())
def test_page_of_a_question_shows_all_of_its_results(question: str) -> None:
    assert f"<!-- table:{question} -->" in (EXPERIMENTS / question / "README.md").read_text()


def test_every_results_folder_belongs_to_a_question_with_tables() -> None:
    assert {path.parent.name for path in EXPERIMENTS.glob("*/results")} <= set(pages.questions())


def test_no_shared_module_imports_a_question() -> None:
    rooms = "|".join(pages.questions())
    shared = [path for room in ("bench", "grids", "tables") for path in (EXPERIMENTS / room).rglob("*.py")]
    asked = re.compile(rf"^\s*(from|import) experiments(\.| import )({rooms})\b", re.MULTILINE)
    assert [str(path) for path in shared if asked.search(path.read_text())] == []
    assert len(shared) > 20


def test_no_experiment_patches_what_it_measures() -> None:
    patches = re.compile(r"unittest import mock|patch\.object|monkeypatch|\bsetattr\(")
    assert [str(path) for path in EXPERIMENTS.rglob("*.py") if patches.search(path.read_text())] == []


def test_index_names_every_experiment() -> None:
    named = {line.split("](")[1].split(")")[0] for line in (EXPERIMENTS / "README.md").read_text().splitlines()
             if line.startswith("| [")}  # fmt: skip
    assert named == {page.parent.name for page in EXPERIMENTS.glob("*/README.md")}
