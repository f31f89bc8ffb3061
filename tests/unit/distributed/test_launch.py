"""Which launch a run's folder belongs to, and what becomes of ranks whose launcher has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from crossbow_py.distributed import launch
from crossbow_py.distributed.launch import (
    Launch,
    end_with_launcher,
    is_adopted,
    is_of_launch,
    process_name,
    this_launch,
    write_launch,
)
from crossbow_py.distributed.ranks import Ranks

BEGUN = Launch("job", ["a:1:boot:10", "b:1:boot:20"])


@pytest.mark.parametrize(
    ("launchers", "same"),
    [
        (["a:1:boot:10", "b:1:boot:20"], True),  # its ranks were started anew
        (["b:1:boot:20", "c:1:boot:90"], True),  # a host has left, and another has come
        (["b:1:boot:20"], True),
        (["a:1:boot:30", "b:1:boot:20"], True),  # the first host's torchrun was started again; the second's stayed
        (["a:1:boot:30", "b:1:boot:40"], False),  # the command was given again, on the same hosts
        (["c:1:boot:10"], False),  # or on others
        (["a:1:later:10"], False),  # the host has booted since
        ([], False),
    ],
)
def test_launch_is_the_same_while_its_name_and_one_of_its_launchers_are(launchers, same):
    assert BEGUN.is_same(Launch("job", launchers)) is same
    assert not BEGUN.is_same(Launch("none", launchers))


def test_process_that_torchrun_did_not_start_has_no_launch(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert this_launch() is None


def test_launch_is_the_run_id_and_the_process_that_started_this_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert this_launch() == Launch("job", [process_name(os.getppid())])


class _OnHosts(Ranks):
    """Three ranks, of which the second is alone on its host."""

    def gather_texts(self, text: str) -> list[str]:
        return [text, "b:2", text]


def test_launch_of_several_ranks_has_the_launcher_of_every_host(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(launch, "process_name", lambda pid: "c:3")
    assert this_launch(_OnHosts()) == Launch("job", ["b:2", "c:3"])


def kernel_says(proc: Path, pid: int, started: int, boot: str = "ab-12") -> Path:
    """A /proc with a process whose name has a bracket and spaces."""
    (proc / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (proc / str(pid)).mkdir(exist_ok=True)
    fields = ["S", *map(str, range(4, 22)), str(started), "23", "24"]  # the third, and so on
    (proc / str(pid) / "stat").write_text(f"{pid} (pt) x (y) {' '.join(fields)}\n")
    return proc


def test_process_is_named_by_host_number_boot_and_time_it_began(tmp_path):
    assert process_name(7, kernel_says(tmp_path, 7, 4321)) == f"{socket.gethostname()}:7:ab-12:4321"


def test_process_that_took_the_number_of_one_that_ended_has_another_name(tmp_path):
    names = {process_name(7, kernel_says(tmp_path, 7, *each)) for each in [(4321,), (4322,), (4321, "cd-34")]}
    assert len(names) == 3


def test_process_of_a_host_that_says_no_more_is_named_by_host_and_number(tmp_path):
    assert process_name(7, tmp_path) == f"{socket.gethostname()}:7"


@pytest.mark.parametrize(
    ("parent", "program", "adopted"),
    [
        (1, "/usr/lib/systemd/systemd", True),
        (1, "/usr/bin/tini", True),
        (1, "/opt/conda/bin/python3.11", False),  # torchrun is the first process of a container
        (7, "/usr/bin/bash", False),  # by --no-python, a script of the user's
        (1, None, False),
    ],
)
def test_parent_has_adopted_this_process_if_it_is_the_first_and_not_python(tmp_path, parent, program, adopted):
    (tmp_path / str(parent)).mkdir()
    if program is not None:
        (tmp_path / str(parent) / "exe").symlink_to(program)
    assert is_adopted(parent, tmp_path) is adopted


def test_parent_that_runs_for_another_user_has_adopted_this_process(tmp_path, monkeypatch):
    def refuse(path: Path) -> Path:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "readlink", refuse)
    assert is_adopted(1, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    ("run_id", "adopted", "expected"),
    [("job", False, ["asked"]), ("job", True, ["asked", "ended"]), (None, True, [])],
)
def test_rank_asks_to_end_with_torchrun_and_ends_at_once_if_that_has_ended(monkeypatch, run_id, adopted, expected):
    seen = []

    class Library:
        def prctl(self, option: int, number: int) -> None:
            assert (option, number) == (1, signal.SIGTERM)
            seen.append("asked")

    def end(number: int) -> None:
        assert number == signal.SIGTERM
        seen.append("ended")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(signal, "raise_signal", end)
    monkeypatch.setattr(launch, "is_adopted", lambda parent: adopted)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    end_with_launcher()
    assert seen == expected


def test_folder_is_of_the_launch_that_was_written_and_of_no_other(tmp_path):
    write_launch(tmp_path, BEGUN)
    assert is_of_launch(tmp_path, Launch("job", ["b:1:boot:20"]))
    assert not is_of_launch(tmp_path, Launch("job", ["b:1:boot:21"]))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b'{"run_id": "job"}', b'{"run_id": "job", "launchers": 3}', b"\xff\xfe", None],
)
def test_folder_without_a_readable_launch_file_is_of_none(tmp_path, content):
    if content is not None:
        (tmp_path / ".launch").write_bytes(content)
    assert not is_of_launch(tmp_path, BEGUN)
