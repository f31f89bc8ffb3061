"""A PostgreSQL of a test's own, where its programs are there."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.machine import free_port

PATIENCE_S = 30.0


def programs() -> Path | None:
    """The folder of its newest version; Debian has most of them off the PATH."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if found:
        return Path(found).resolve().parent
    return next((path for path in reversed(folders) if (path / "initdb").exists()), None)


@contextlib.contextmanager
def postgres() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of an empty data base, and the server, which is ended afterwards; skips the test if there is none."""
    pytest.importorskip("psycopg")
    folder = programs()
    if folder is None:
        pytest.skip("needs PostgreSQL's programs")
    with tempfile.TemporaryDirectory() as data:
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": data}
        if os.geteuid() == 0:  # as whom it refuses to run
            other = pwd.getpwnam("nobody")
            os.chown(data, other.pw_uid, other.pw_gid)
            options |= {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
        where, port = f"{data}/data", free_port()
        make = [f"{folder}/initdb", "-D", where, "--username=crossbow", "--auth=trust", "--no-sync"]
        subprocess.run(make, check=True, **options)
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        start = [f"{folder}/postgres", "-D", where, "-p", str(port), *(f"--{each}" for each in settings)]
        server = subprocess.Popen(start, **options)
        try:
            ready = [f"{folder}/pg_isready", "--host=127.0.0.1", f"--port={port}"]
            end_s = time.monotonic() + PATIENCE_S
            while subprocess.run(ready, check=False, **options).returncode:
                assert server.poll() is None and time.monotonic() < end_s, "PostgreSQL does not start"
                time.sleep(0.05)
            yield f"postgresql://crossbow@127.0.0.1:{port}/postgres", server
        finally:
            server.kill()
            server.wait()
