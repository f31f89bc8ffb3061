"""Which call of torchrun a run's folder belongs to."""

from __future__ import annotations

import os
import socket

import pytest

from crossbow_py.distributed.launch import Launch, is_of_launch, this_launch, write_launch


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Launch("job", "host:1"), True),
        (Launch("job", "elsewhere:9"), True),  # named by --rdzv-id, and started on another host again
        (Launch("other", "host:1"), True),  # one process is one call
        (Launch("other", "host:2"), False),
    ],
)
def test_launch_with_a_name_is_the_same_by_name_or_by_process(other, same):
    assert Launch("job", "host:1").is_same(other) is same


@pytest.mark.parametrize(("launcher", "same"), [("host:1", True), ("host:2", False), ("elsewhere:1", False)])
def test_launch_without_a_name_is_the_same_by_process_alone(launcher, same):
    assert Launch("none", "host:1").is_same(Launch("none", launcher)) is same


def test_process_that_torchrun_did_not_start_has_no_launch(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert this_launch() is None


def test_launch_is_the_run_id_and_the_process_that_started_this_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert this_launch() == Launch("job", f"{socket.gethostname()}:{os.getppid()}")


def test_folder_is_of_the_launch_that_was_written_and_of_no_other(tmp_path):
    write_launch(tmp_path, Launch("job", "host:1"))
    assert is_of_launch(tmp_path, Launch("job", "host:2"))
    assert not is_of_launch(tmp_path, Launch("none", "host:2"))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"run_id": "job"}', '{"run_id": "job", "other": 1}'])
def test_folder_with_a_spoiled_launch_file_is_of_none(tmp_path, text):
    (tmp_path / ".launch").write_text(text)
    assert not is_of_launch(tmp_path, Launch("job", "host:1"))


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_folder_without_a_readable_launch_file_is_of_none(tmp_path, content):
    if content is not None:
        (tmp_path / ".launch").write_bytes(content)
    assert not is_of_launch(tmp_path, Launch("job", "host:1"))
