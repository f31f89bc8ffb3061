"""The machine that a result was measured on: the facts that every results file carries."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from crossbow_py.core.host import usable_core_ids

ROOT = Path(__file__).resolve().parents[2]
_CPU_INFO = Path("/proc/cpuinfo")
# What decides which kernels run: vector width, and matrix instructions for bfloat16.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def machine() -> dict[str, Any]:
    """Processor, devices, versions, date, commit and command line of this process, as plain values."""
    cpu = _cpu_info()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": command(sys.argv),
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The facts as one line under a table."""
    flags = f" ({', '.join(facts['flags'])})" if facts["flags"] else ""
    parts = [
        f"{facts['cpu']}, {facts['cores']} cores{flags}",
        *facts["gpus"],
        f"torch {facts['torch']}",
        f"Python {facts['python']}",
        facts["os"],
        facts["date"],
        f"commit {facts['commit'] or 'unknown'}",
    ]
    return " · ".join(parts)


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    return len(usable_core_ids())


def commit() -> str | None:
    """Short hash of the checkout's commit, with `+` when files other than results differ.

    Outside a repository it is `$CROSSBOW_COMMIT`, which whoever copied the files there has set, else None.
    """
    head = _git("rev-parse", "--short", "HEAD")
    if head is None:
        return os.environ.get("CROSSBOW_COMMIT") or None
    apart = ":(exclude,glob)experiments/*/results/**"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", apart)
    return head + ("+" if changed else "")


def command(argv: Sequence[str]) -> str:
    """The command line as one would type it in the checkout; paths of this machine are made relative or cut short."""
    return shlex.join(["python", *(_shown(argument) for argument in argv)])


def _shown(argument: str) -> str:
    key, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return f"{key}{equals}{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}"


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    if not _CPU_INFO.exists():
        return {}
    block = _CPU_INFO.read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def on_cores(cores: Sequence[int] | set[int]) -> Iterator[None]:
    """Run this process, and those it starts meanwhile, on these cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
