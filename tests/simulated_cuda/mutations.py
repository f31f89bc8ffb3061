"""Mutations of the package that the simulated device has to catch: slips of what orders work and keeps memory alive.

    python -m tests.simulated_cuda tests.simulated_cuda.mutations [--only NAME] [--jobs N]

Each is tried on a copy of the tree: its tests run there under the simulated device and have to fail, after they have
passed in the tree as it is. Without `--only` the results go to mutations.json and into the table of README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulated_cuda.__main__ import environment
from tests.simulated_cuda.mutation_table import MUTATIONS, SHOWN_BY, Mutation

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("mutations.json")
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- mutations: begin -->\n", "<!-- mutations: end -->\n"
_NEEDED = ("crossbow_py", "tests", "conf", "pyproject.toml")
_LIMIT_S, _LIMIT_OF_ALL_S, _NO_END = 100, 600, "no end"
# What the errors of a failing test say, and how the table calls it.
_SIGNS = {
    "uses memory that was freed": "a graph that uses freed memory",
    "is not ordered after": "a race",
    "called a synchronizing CUDA operation": "a synchronisation in debug mode",
    "a sum is captured": "a sum inside a capture",
    "cannot be captured": "a refused capture",
    "error during capture": "a refused capture",
    "when stream is capturing": "a refused capture",
    "Both events must be completed": "an event read too early",
    "OutOfMemoryError": "out of memory",
    "what could be captured is not": "a refused capture",
    "needs batches of one shape": "a refused batch",
}


@dataclass(frozen=True)
class Result:
    """What came of a mutation: by what it was caught, None if it was missed; the test that failed, and what it said."""

    name: str
    caught_by: str | None
    test: str
    said: str


def changed(mutation: Mutation, text: str) -> str:
    """Return the text of the mutation's file with the mutation. Raises ValueError unless it is there once."""
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: its text occurs {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


@contextmanager
def copied() -> Iterator[Path]:
    """Make a copy of the part of the tree that tests need."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in _NEEDED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "golden")
                shutil.copytree(ROOT / name, Path(folder) / name, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, folder)
        yield Path(folder)


def run(tests: tuple[str, ...], order: str, seed: int, folder: Path, limit_s: int = _LIMIT_S) -> tuple[bool, str]:
    """Run tests in a copy of the tree; return whether they passed, and what they said."""
    settings = environment(
        SIMULATED_CUDA_ORDER=order, SIMULATED_CUDA_SEED=str(seed), PYTHONDONTWRITEBYTECODE="1",
        TRITON_INTERPRET="0",  # mutations are of what runs without kernels
    )  # fmt: skip
    settings["PYTHONPATH"] = settings["PYTHONPATH"].replace(str(ROOT), str(folder))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=settings, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False, _NO_END
    said = done.stdout + done.stderr
    assert done.returncode in {0, 1} or "Error" in said, said  # else no test ran
    return done.returncode == 0, said


def caught(name: str, said: str) -> Result:
    """Return the result of a mutation by which a test failed."""
    if said == _NO_END:
        return Result(name, "a time-out", "", said)
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", said, re.MULTILINE)
    test = failed.group(1) if failed else ""
    lines = [re.sub(r"^E\s+", "", line) for line in said.splitlines() if re.match(r"E\s", line)]
    causes = dict.fromkeys(what for sign, what in _SIGNS.items() if any(sign in line for line in lines))
    if not causes:
        causes = {SHOWN_BY.get(test, "wrong numbers"): None}
    sentence = next((line for line in lines if any(sign in line for sign in _SIGNS)), (lines or [said[-160:]])[0])
    return Result(name, ", ".join(causes), test, _sentence(sentence))


def _sentence(said: str) -> str:
    """Return one race of several, without the numbers of streams; else what was said, shortened."""
    race = re.search(r"'([^']+) on stream \d+ of cuda:\d+( is not ordered after .+?) on stream", said)
    return (race.group(1) + race.group(2) if race else said).strip()[:160]


def tried(mutation: Mutation) -> Result:
    """Try a mutation in a copy of its own."""
    with copied() as folder:
        path = folder / mutation.file
        path.write_text(changed(mutation, path.read_text(encoding="utf-8")), encoding="utf-8")
        passed, said = run(mutation.tests, mutation.order, mutation.seed, folder)
    return Result(mutation.name, None, "", "") if passed else caught(mutation.name, said)


def check_unchanged(mutations: list[Mutation]) -> None:
    """Run every test that is to fail in the tree as it is, in the orders asked for. Exits if one fails."""
    by_order: dict[tuple[str, int], dict[str, None]] = {}
    for each in mutations:
        by_order.setdefault((each.order, each.seed), {}).update(dict.fromkeys(each.tests))
    with copied() as folder:
        for (order, seed), tests in by_order.items():
            passed, said = run(tuple(tests), order, seed, folder, _LIMIT_OF_ALL_S)
            if not passed:
                sys.exit(f"The tests fail without a mutation, in order {order}:\n{said[-4000:]}")


def table(results: list[dict[str, str | None]]) -> str:
    """Return the table of the page."""
    about = {each.name: each for each in MUTATIONS}
    rows = ["| mutation | file | what was changed | caught by | test |", "|---|---|---|---|---|"]
    for each in results:
        own = about[str(each["name"])]
        file, test = own.file.removeprefix("crossbow_py/"), each["test"]
        cells = own.name, f"`{file}`", own.slip, each["caught_by"] or "**missed**", f"`{test}`"
        rows.append(f"| {' | '.join(cells)} |")
    caught = sum(each["caught_by"] is not None for each in results)
    return f"{caught} of {len(results)} are caught.\n\n" + "\n".join(rows) + "\n"


def page_with(results: list[dict[str, str | None]], page: str) -> str:
    """Return the page with the table of these results."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table(results)}\n{END}{tail}"


def main() -> int:
    """Try mutations; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="names of the mutations to try; nothing is written then")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="how many at a time")
    asked = parser.parse_args()
    if unknown := set(asked.only or ()) - {each.name for each in MUTATIONS}:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}; mutation_table.py has their names.")
    chosen = [each for each in MUTATIONS if not asked.only or each.name in asked.only]
    check_unchanged(chosen)
    found = []
    with ThreadPoolExecutor(asked.jobs) as threads:
        for result in threads.map(tried, chosen):
            verdict = "missed" if result.caught_by is None else "caught"
            print(f"{verdict}  {result.name}: {result.caught_by} — {result.said}", flush=True)
            found.append(vars(result))
    if not asked.only:
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if any(each["caught_by"] is None for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
