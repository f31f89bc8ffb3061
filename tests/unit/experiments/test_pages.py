"""The tables on the pages are those of the results files."""

from __future__ import annotations

import pytest
import torch

from experiments import tables
from experiments.common.machine import ROOT, command, commit, machine, machine_line
from experiments.common.markdown import markdown_table, replace_blocks
from experiments.common.results import EXPERIMENTS
from experiments.throughput import report
from tests.unit.experiments.samples import throughput_result


def test_machine_names_what_a_number_depends_on() -> None:
    facts = machine()
    assert facts["torch"] == torch.__version__
    assert facts["cores"] >= 1
    assert facts["cpu"] in machine_line(facts)
    assert facts["commit"] == commit()


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
    text = tables.build("throughput", results)
    assert [line for line in text.splitlines() if line.startswith("#")] == ["### lenet_b16", "### resnet32_b16"]
    assert tables.build("throughput", {}) == ""


def test_table_of_one_result_is_that_table_alone() -> None:
    result = throughput_result()
    assert tables.build("throughput/lenet_b16/rounds", {"lenet_b16": result}) == report.rounds_table(result)


@pytest.mark.parametrize("name", ["other", "throughput/lenet_b16/sides", "throughput/resnet32_b16/other"])
def test_table_that_cannot_be_built_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"table:{name}"):
        tables.build(name, {"resnet32_b16": throughput_result()})


def test_pages_show_what_the_results_files_say() -> None:
    assert [
        str(path.relative_to(ROOT)) for path in tables.pages() if tables.rebuilt(path.read_text()) != path.read_text()
    ] == []


@pytest.mark.parametrize("experiment", list(tables.TABLES))
def test_page_of_an_experiment_shows_all_of_its_results(experiment: str) -> None:
    assert f"<!-- table:{experiment} -->" in (EXPERIMENTS / experiment / "README.md").read_text()


def test_every_results_folder_belongs_to_an_experiment_with_tables() -> None:
    assert {path.parent.name for path in EXPERIMENTS.glob("*/results")} <= set(tables.TABLES)


def test_index_names_every_experiment() -> None:
    named = {line.split("](")[1].split(")")[0] for line in (EXPERIMENTS / "README.md").read_text().splitlines()
             if line.startswith("| [")}  # fmt: skip
    assert named == {page.parent.name for page in EXPERIMENTS.glob("*/README.md")}
