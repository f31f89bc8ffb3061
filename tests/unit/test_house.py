"""The rules of the house that no linter knows: sizes of files and functions, and no loose ends."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import grimp
import pytest
import yaml
from packaging.requirements import Requirement

from crossbow_py.core.version import __version__
from tests.long_cases import long_cases

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "crossbow_py").rglob("*.py"))
FOLDERS = (".github", "crossbow_py", "conf", "docker", "docs", "experiments", "tests")
TEXT = {".md", ".py", ".toml", ".txt", ".yaml"}
MAXIMUM_FILE_LINES = 600
MAXIMUM_FUNCTION_LINES = 60

# Written with one-letter classes so that this file does not find itself.
LOOSE_END = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X])\b")
LOCAL_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/")


def texts() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in [*files, *ROOT.glob("*")] if path.suffix in TEXT and path.is_file())


def modules() -> Iterator[ModuleType]:
    for path in PACKAGE:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        with suppress(ModuleNotFoundError):  # an extra that is not installed, or Triton
            yield importlib.import_module(name)


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_files_of_the_package_are_rooms_not_halls() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PACKAGE}
    assert {name: lines for name, lines in lengths.items() if lines > MAXIMUM_FILE_LINES} == {}


@pytest.mark.slow
def test_functions_of_the_package_fit_on_a_screen() -> None:
    too_long = {}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAXIMUM_FUNCTION_LINES:
                    too_long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert too_long == {}


@pytest.mark.parametrize("root", ["crossbow_py", "experiments"])
def test_modules_import_each_other_in_no_circle(root: str) -> None:
    graph = grimp.build_graph(root, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the modules


def test_public_methods_say_what_they_do_unless_their_base_does() -> None:
    silent = [
        f"{cls.__module__}.{cls.__name__}.{name}"
        for module in modules()
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and not cls.__name__.startswith("_")
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and method.__name__ == name and not name.startswith("_")
        if not inspect.getdoc(getattr(cls, name))
    ]
    assert silent == []


def test_text_of_the_project_has_no_loose_ends() -> None:
    assert lines_matching(LOOSE_END) == []


def test_text_of_the_project_names_no_path_of_one_machine() -> None:
    assert lines_matching(LOCAL_PATH) == []


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], str(citation["version"])) == ("1.2.0", __version__)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", changes, re.MULTILINE)[0] == "[Unreleased]"
    assert f"## [{__version__}]" in changes or f"What will be {__version__}" in changes


def test_constraints_pin_every_declared_dependency_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    # Triton comes with CUDA builds of torch, each with a version of its own.
    requirements = [need for need in map(Requirement, declared) if need.name != "triton"]
    assert [str(need) for need in requirements if not need.specifier.contains(pins.get(need.name, "0"))] == []


def test_cases_left_to_long_runs_are_of_tests_that_are_there() -> None:
    gone = []
    for test in long_cases():
        path, _, name = test.partition("::")
        file = ROOT / "tests" / path
        if not file.exists() or f"def {name}(" not in file.read_text():
            gone.append(test)
    assert gone == []
