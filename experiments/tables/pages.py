"""Tables on pages: which there are, and how a page is brought up to date.

A page says where a table goes by `<!-- table:NAME -->` and, on a later line, `<!-- end -->`; what is between them is
replaced. NAME is QUESTION for all of its results (nothing while there are none), QUESTION/TABLE for a table over all of
them, or QUESTION/RESULT/TABLE. A question, a folder of experiments/ with a page, offers its tables in `report.py`, or
where it has none in `run.py`; those of grids of training runs are in `grids/report.py`:

    TABLES: by name; the first is what a page about all of its results shows. `machine` is added.
    TABLES_OF_KIND: by the kind that a result says it is, what takes the place of TABLES.
    TABLES_OVER_ALL: by name, tables over all results.
    HEADLINE: rows of the table of speeds on the first page, from all results.
    MODELS_A_MINUTE: rows of the table of models a minute there.

`headline/QUESTION/...` and `models_a_minute/QUESTION/...` have the rows of several questions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.bench.machine import ROOT, machine_line
from experiments.bench.results import EXPERIMENTS, read_results
from experiments.tables.markdown import markdown_table, replace_blocks

Table = Callable[[Mapping[str, Any]], str]
Results = Mapping[str, Mapping[str, Any]]
_OF_SEVERAL = {
    "headline": ["", "crossbow_py", "one tuned model", "PyTorch's default loop", "n", "cores"],
    "models_a_minute": ["models a minute", "crossbow_py", "without packs, the best", "others' packs, the best", "n"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Bring the pages up to date, or check that they are; returns the exit code."""
    parser = argparse.ArgumentParser(description="Rebuilds the tables of all pages from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is out of date")
    parser.add_argument("--pictures", nargs="+", metavar="QUESTION", help="draw those of these questions anew instead")
    options = parser.parse_args(argv)
    if options.pictures:
        return int(import_module("experiments.tables.pictures").draw_questions(options.pictures))
    check = options.check
    try:
        changed = [(path, text) for path in pages() if (text := rebuilt(path.read_text())) != path.read_text()]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in changed:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'rebuilt'}")
        if not check:
            path.write_text(text)
    return int(check and bool(changed))


def pages() -> list[Path]:
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in [ROOT / "README.md", *docs, *sorted(EXPERIMENTS.glob("*/README.md"))] if path.exists()]


def questions() -> list[str]:
    return sorted(page.parent.name for page in EXPERIMENTS.glob("*/README.md"))


def rebuilt(page: str) -> str:
    """Return a page with every table built anew. Raises ValueError for a table that cannot be built."""
    return replace_blocks(page, lambda name: build(name, read_results(name.split("/")[0])))


def build(name: str, results: Results) -> str:
    """Return what belongs into the block NAME, given its question's results. Raises ValueError for an unknown name."""
    question, *rest = name.split("/")
    if question in _OF_SEVERAL:
        rows = [row for each in rest for row in getattr(_offered(name, each), question.upper())(read_results(each))]
        return markdown_table(_OF_SEVERAL[question], rows)
    offered = _offered(name, question)
    if not rest:
        return "\n\n".join(_section(offered, result, results[result]) for result in results)
    over_all = getattr(offered, "TABLES_OVER_ALL", {})
    if rest[0] in over_all:
        return str(over_all[rest[0]](results))
    result, table = (*rest, "")[:2]
    tables = _tables(offered, results.get(result, {}))
    if result not in results or table not in tables:
        raise ValueError(
            f"table:{name} must be QUESTION/RESULT/TABLE with a result of {', '.join(results) or 'none yet'} and a "
            f"table of {', '.join(tables)}."
        )
    return tables[table](results[result])


def _offered(name: str, question: str) -> ModuleType:
    """The module that offers the tables of a question. Raises ValueError where there is no such question."""
    if question not in questions():
        raise ValueError(f"table:{name} is of no known question; known: {', '.join(questions())}.")
    there = [name for name in ("report", "run") if (EXPERIMENTS / question / f"{name}.py").exists()]
    return import_module(f"experiments.{question}.{there[0]}" if there else "experiments.grids.report")


def _tables(offered: ModuleType, result: Mapping[str, Any]) -> Mapping[str, Table]:
    of_kind = getattr(offered, "TABLES_OF_KIND", {})
    tables: Mapping[str, Table] = of_kind.get(result.get("kind"), offered.TABLES)
    return {**tables, "machine": lambda result: machine_line(result["machine"])}


def _section(offered: ModuleType, name: str, result: Mapping[str, Any]) -> str:
    main_table = next(iter(_tables(offered, result).values()))
    facts = result["machine"]
    return f"### {name}\n\n    {facts['command']}\n\n{main_table(result)}\n\n{machine_line(facts)}"
