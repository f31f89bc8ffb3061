"""An MPS daemon of the suite's own is started and ended, here a script of its name; and processes as one side."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.throughput import mps
from experiments.throughput.gate import Visit, Window
from experiments.throughput.mps import PIPES, MpsError, SideGroup, daemon, start_side, together, with_daemon
from experiments.throughput.peers import MPS, PlannedPeers
from experiments.throughput.sides import Side
from experiments.throughput.workers import SideError
from experiments.throughput.workloads import Effort, Workload

START = """if [ "$1" = "-d" ]; then
  sleep 60 &
  echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
  exit 0
fi"""
ANSWER = """read command
echo "$command" >> "$(dirname "$0")/asked"
case "$command" in
  quit) kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")" ;;
  get_server_list) cat "$CUDA_MPS_PIPE_DIRECTORY/servers" ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is looked into first; no daemon runs and none is named."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "_USUAL_PIPES", tmp_path / "nobody")
    return tmp_path


def install(folder: Path, *lines: str) -> None:
    script = folder / mps.CONTROL
    script.write_text("\n".join(["#!/bin/sh", *lines]))
    script.chmod(0o755)


def process_of(pipes: str) -> int:
    return int((Path(pipes) / f"{mps.CONTROL}.pid").read_text())


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_the_end_of(process: int) -> None:
    for _ in range(100):
        if not is_alive(process):
            return
        time.sleep(0.05)
    pytest.fail("the daemon still runs")


def test_daemon_has_pipes_of_its_own_and_is_ended_with_them(tools: Path) -> None:
    install(tools, 'echo "$CUDA_VISIBLE_DEVICES" > "$(dirname "$0")/devices"', START, ANSWER)
    with daemon() as pipes:
        process = process_of(pipes)
        assert is_alive(process)
        assert PIPES not in os.environ
        assert not mps.has_server(pipes)
        (Path(pipes) / "servers").write_text("4711\n")
        assert mps.has_server(pipes)
    wait_for_the_end_of(process)
    assert not Path(pipes).exists()
    assert (tools / "asked").read_text().split() == ["get_server_list", "get_server_list", "quit"]
    assert (tools / "devices").read_text() == "\n"


def test_daemon_that_does_not_answer_is_ended_by_a_signal(tools: Path) -> None:
    install(tools, START, "exit 1")
    with daemon() as pipes:
        process = process_of(pipes)
    wait_for_the_end_of(process)


def test_daemon_is_ended_when_the_suite_fails(tools: Path) -> None:
    install(tools, START, ANSWER)
    with pytest.raises(KeyboardInterrupt), daemon() as pipes:
        process = process_of(pipes)
        raise KeyboardInterrupt
    wait_for_the_end_of(process)


def test_daemon_that_does_not_start_says_why(tools: Path) -> None:
    install(tools, "echo cannot be root here >&2; exit 1")
    with pytest.raises(MpsError, match=r"did not start a daemon \(cannot be root here\)"), daemon():
        pass
    install(tools, "exit 3")
    with pytest.raises(MpsError, match=r"\(exit code 3\)"), daemon():
        pass


def test_daemon_of_somebody_else_is_left_alone(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tools, 'touch "$(dirname "$0")/called"')
    (tools / "nobody").mkdir()
    (tools / "nobody" / "control").touch()
    with pytest.raises(MpsError, match="seems to run already"), daemon():
        pass
    monkeypatch.setenv(PIPES, "elsewhere")
    with pytest.raises(MpsError, match="under an MPS daemon already"), daemon():
        pass
    assert not (tools / "called").exists()


def test_peers_without_a_daemon_are_left_without_mps(tools: Path) -> None:
    with ExitStack() as stack:
        wanted = PlannedPeers(("vmap", MPS), {})
        assert with_daemon(wanted, stack) == ((("vmap",), {MPS: "nvidia-cuda-mps-control was not found"}), "")
        assert with_daemon(PlannedPeers(("vmap",), {}), stack) == ((("vmap",), {}), "")
        install(tools, START, ANSWER)
        planned, pipes = with_daemon(wanted, stack)
        assert planned is wanted
        assert is_alive(process_of(pipes))


def test_windows_side_by_side_add_up_and_members_are_not_foreign_to_each_other() -> None:
    # Of 4 cores for 2 s: a member took 10 % of them, the other 20 %, and somebody else 5 %.
    windows = [Window(100, 2.0, 0.25, 0.10), Window(300, 2.0, 0.15, 0.20)]
    found = together(windows)
    assert found.images_per_s == pytest.approx(200.0)
    assert found.images == 400
    assert found.foreign_share == pytest.approx(0.05)
    assert together([Window(100, 2.0, None), Window(100, 1.0, None)]).foreign_share is None


def test_two_processes_are_measured_as_one_side(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    side, effort = Side(MPS, 2, "none", "fp32"), Effort(mps_pipes="pipes")
    small = replace(workload, model="mlp")
    monkeypatch.setattr(mps, "has_server", lambda pipes: pipes == "pipes")
    with start_side(side, small, effort, 60.0) as group:
        assert isinstance(group, SideGroup)
        assert (group.side, group.ready.threads) == (side, 1)
        assert group.ready.detail == "2 processes, no CUDA graph"
        windows = [group.window(Visit(0.1, lead_in_s=0.0), 60.0) for _ in range(2)]
    assert all(window.images >= 2 * workload.batch_size for window in windows)


class Member:
    """A side process that has nothing to do."""

    ended = 0

    def __init__(self, *_: Any, wait: bool) -> None:
        assert not wait

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *error: object) -> None:
        Member.ended += 1

    def await_ready(self, patience_s: float) -> None:
        assert patience_s <= 60.0


def test_processes_that_miss_the_daemon_are_no_side(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "has_server", lambda pipes: False)
    monkeypatch.setattr(mps, "SideProcess", Member)
    with pytest.raises(SideError, match="side mps_processes K=2 fp32: its processes did not connect"):
        SideGroup(Side(MPS, 2, "none", "fp32"), workload, Effort(), 60.0)
    assert Member.ended == 2
