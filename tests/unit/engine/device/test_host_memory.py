"""What glibc is asked for, so that it keeps what rounds free."""

from __future__ import annotations

from crossbow_py.engine.device import host

BLOCK = 2**30 - 2**21


class Function:
    """A function of C that notes what it is given."""

    def __init__(self, calls, name, results):
        self.calls, self.name, self.results = calls, name, results

    def __call__(self, *arguments):
        self.calls.append((self.name, *arguments))
        return self.results.pop(0) if self.results else 0


class Libc:
    """What `keep_freed_memory` needs of glibc."""

    def __init__(self, **results):
        self.calls = []
        for name in ("mallopt", "malloc", "madvise", "free"):
            setattr(self, name, Function(self.calls, name, list(results.get(name, []))))


def keep(monkeypatch, libc):
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: libc)
    host.keep_freed_memory.__wrapped__()
    return libc.calls


def test_freed_memory_is_kept_and_the_heap_stretched_in_whole_huge_pages(monkeypatch):
    monkeypatch.setattr(host.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}.get)  # 8 GiB, so 2
    start = 2**21 * 5 + 16
    calls = keep(monkeypatch, Libc(mallopt=[1, 1], malloc=[start, None]))
    aligned = 2**21 * 6
    assert calls == [
        ("mallopt", -3, 2**30),
        ("mallopt", -1, -1),
        ("malloc", BLOCK),
        ("malloc", BLOCK),  # refused
        ("madvise", aligned, 2**21 * 5 + BLOCK - aligned, 14),
        ("free", start),
    ]


def test_older_glibc_keeps_smaller_blocks_and_one_that_refuses_is_left_alone(monkeypatch):
    assert keep(monkeypatch, Libc(mallopt=[0, 1, 1])) == [
        ("mallopt", -3, 2**30),
        ("mallopt", -3, 2**25),
        ("mallopt", -1, -1),
    ]
    assert keep(monkeypatch, Libc(mallopt=[0, 0])) == [("mallopt", -3, 2**30), ("mallopt", -3, 2**25)]


def test_elsewhere_than_with_glibc_nothing_is_done(monkeypatch):
    assert keep(monkeypatch, type("Libc", (), {"calls": []})) == []
