"""How the tests of this room try examples: the same ones every time, each within a deadline and bounded memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

_DEADLINE = timedelta(seconds=60)  # of an example that takes milliseconds, on a machine that does other things too
_MIB = 2**20
# What lengths, places and counts are replaced by.
_WORDS = [0, 1, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**40, 2**63 - 1, 2**64 - 1]
_FORMATS = ["<H", ">H", "<I", ">I", "<Q", ">Q"]


def depths(quick: int, deep: int) -> Any:
    """Gives a test `examples`, how many to try: few always, many where slow tests run."""
    slow = pytest.param(deep, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)], id="deep")
    return pytest.mark.parametrize("examples", [pytest.param(quick, id="quick"), slow])


def examine(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, most_mib: int = 300) -> None:
    """Call `check` with examples; fails where it raises, takes too long, or all of them grow memory too much."""

    @hypothesis.settings(
        max_examples=examples, deadline=_DEADLINE, suppress_health_check=list(hypothesis.HealthCheck), print_blob=False
    )
    @hypothesis.given(strategy)
    def every(example: Any) -> None:
        check(example)

    with memory_of_at_most(most_mib):
        every()


@contextmanager
def memory_of_at_most(mib: int) -> Iterator[None]:
    """Fails when this process's memory was at some moment that much larger than at the beginning."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = _peak()
    yield
    grown = (_peak() - before) // _MIB
    assert grown <= mib, f"memory grew by {grown} MiB"


def _peak() -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def damaged(*contents: bytes) -> st.SearchStrategy[bytes]:
    """One of `contents`, cut, with bits flipped, bytes put in or left out, or words replaced by odd ones; or noise."""
    return st.one_of(*map(_damaged, contents), st.binary(max_size=200))


def _damaged(content: bytes) -> st.SearchStrategy[bytes]:
    place = st.integers(0, len(content) - 1)
    header = st.integers(0, min(len(content) - 1, 100))
    word = st.builds(_packed, st.sampled_from(_FORMATS), st.sampled_from(_WORDS))
    change = st.one_of(
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("write"), st.one_of(header, place), st.one_of(word, st.binary(min_size=1, max_size=4))),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("delete"), place, st.integers(1, 8)),
    )
    changed = st.lists(change, min_size=1, max_size=4).map(lambda changes: _changed(content, changes))
    return st.one_of(changed, changed, changed, place.map(lambda length: content[:length]))


def _packed(form: str, word: int) -> bytes:
    return struct.pack(form, word % 2 ** (8 * struct.calcsize(form)))


def _changed(content: bytes, changes: list[tuple[str, int, Any]]) -> bytes:
    result = bytearray(content)
    for kind, place, what in changes:
        if kind == "flip" and place < len(result):
            result[place] ^= 1 << what
        elif kind == "write":
            result[place : place + len(what)] = what
        elif kind == "insert":
            result[place:place] = what
        elif kind == "delete":
            del result[place : place + what]
    return bytes(result)
