"""Which cases of tests are left to `make test-all`, see long_cases.txt."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path


@cache
def long_cases() -> dict[str, list[str]]:
    """Return patterns of the ids of long cases, by the test's path under tests and its name; "" is a test itself."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        test, _, case = line.partition("[")
        if not line.startswith("#") and test:
            found.setdefault(test, []).append(case.removesuffix("]"))
    return found


def is_long(test: str, case: str) -> bool:
    """Return whether a case of a test is long."""
    return any(fnmatchcase(case, pattern) for pattern in long_cases().get(test, ()))
