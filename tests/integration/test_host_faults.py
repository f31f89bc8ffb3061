"""Launchers that are killed or stopped, hosts with other code, and a network that is cut: whole processes, so slow."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from experiments.bench.machine import ROOT, free_port
from experiments.faults.campaign import resumed_from
from experiments.faults.processes import rank_environment
from tests.training_processes import (
    DIGITS,
    PATIENCE_S,
    await_checkpoints,
    await_true,
    children,
    environment,
    is_alive,
    is_root,
    popen,
    said,
    train,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ENDLESS = "max_epochs=1000"
TRAIN = [sys.executable, "-m", "crossbow_py.train", *DIGITS, "executor=serial"]
TIMEOUT_S = 5.0
ENDS_WITHIN_S = 20.0  # beyond that: connections are closed, a checkpoint that was under way is brought to its end


@contextlib.contextmanager
def launched(
    folder: Path, *options: str, max_restarts: int = 0, num_ranks: int = 2
) -> Iterator[subprocess.Popen[bytes]]:
    """Ranks by torchrun, without a `resume` of their own."""
    torchrun = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    with popen(torchrun_of(folder, torchrun, *options), folder, environment()) as launcher:
        yield launcher


def launched_on_a_host(folder: Path, port: int, *options: str) -> contextlib.AbstractContextManager[Any]:
    """One of two torchruns that meet at a port, with a rank each, as on two hosts."""
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    command = torchrun_of(folder, [*torchrun, f"--rdzv-endpoint=127.0.0.1:{port}"], "resume=null", *options)
    return popen(command, folder, environment(GLOO_SOCKET_IFNAME="lo"))


def is_listened_to(port: int) -> bool:
    """Whether anybody of this host does."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def is_asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (pending,) = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
    return bool(pending >> (signal.SIGTERM - 1) & 1)


def torchrun_of(folder: Path, torchrun: list[str], *options: str) -> list[str]:
    """The command line."""
    start = [sys.executable, "-m", "torch.distributed.run", *torchrun]
    return [*start, *TRAIN[1:], f"output_dir={folder}", *options]


def goes_on(folder: Path, num_ranks: int = 2) -> None:
    """The run, from its newest checkpoint, for a few rounds more."""
    newest = int(checkpoints(folder)[0].name.rpartition("-")[2])
    assert train(folder, f"max_samples={newest + 640}", num_ranks=num_ranks) == [0] * num_ranks
    assert resumed_from((folder / "console.log").read_text())[-1] == newest
    assert read_summary(folder)["status"] == "finished"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_launcher_takes_its_ranks_along_and_the_run_goes_on(tmp_path, num_ranks):
    folder = tmp_path / "run"
    with launched(folder, ENDLESS, num_ranks=num_ranks) as launcher:
        await_checkpoints(folder, 2, launcher)
        ranks = children(launcher.pid)
        assert len(ranks) == num_ranks
        try:
            launcher.kill()
            launcher.wait()
            await_true(lambda: not any(is_alive(rank) for rank in ranks))
            assert read_summary(folder)["status"] == "terminated"
        finally:
            for rank in filter(is_alive, ranks):
                os.kill(rank, signal.SIGKILL)
    goes_on(folder, num_ranks)


@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_sigterm_under_torchrun_leaves_a_checkpoint_to_go_on_from(tmp_path, whom):
    folder = tmp_path / "run"
    with launched(folder, ENDLESS) as launcher:
        await_checkpoints(folder, 2, launcher)
        ranks = children(launcher.pid)
        os.kill(launcher.pid if whom == "launcher" else ranks[1], signal.SIGTERM)
        assert launcher.wait(PATIENCE_S) != 0
        await_true(lambda: not any(is_alive(rank) for rank in ranks))
    summary = read_summary(folder)
    assert (summary["status"], summary["stop_reason"]) == ("terminated", "SIGTERM")
    assert checkpoints(folder)[0].name == f"samples-{summary['samples_seen']:012d}"
    if whom == "rank":
        assert "exitcode  : 143" in said(folder)
    goes_on(folder)


@pytest.mark.long
def test_rank_killed_under_torchrun_is_started_again_and_the_run_ends(tmp_path):
    folder = tmp_path / "run"
    with launched(folder, "max_epochs=40", max_restarts=1) as launcher:
        await_checkpoints(folder, 2, launcher)
        os.kill(children(launcher.pid)[0], signal.SIGKILL)
        assert launcher.wait(2 * PATIENCE_S) == 0
    afresh, again = resumed_from((folder / "console.log").read_text())
    assert afresh is None
    assert again is not None
    assert read_summary(folder)["status"] == "finished"


def test_rank_killed_on_one_of_two_hosts_is_started_again_though_these_count_starts_differently(tmp_path):
    folder, port = tmp_path / "run", free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(launched_on_a_host(folder, port, "max_epochs=2"))
        await_true(lambda: is_listened_to(port), first)  # the launcher's store, which the next start finds again
        second = stack.enter_context(launched_on_a_host(folder, port, "max_epochs=2"))
        await_checkpoints(folder, 2, first)
        (stopped,), (killed,) = children(first.pid), children(second.pid)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        # Its launcher starts it again as the other has come anew, and not as it has failed: that alone is counted.
        await_true(lambda: is_asked_to_end(stopped), first)
        os.kill(stopped, signal.SIGCONT)
        assert [launcher.wait(PATIENCE_S) for launcher in (first, second)] == [0, 0]
    afresh, again = resumed_from((folder / "console.log").read_text())
    assert afresh is None
    assert again is not None
    assert read_summary(folder)["status"] == "finished"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable: veth0 and veth1, 10.213.7.1 and 10.213.7.2."""
    names = [f"crossbow-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", f"veth{number}")
            for device in ("lo", f"veth{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def rank_alone(rank: int, port: int) -> dict[str, str]:
    """What a launcher tells the only rank of its host."""
    places = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
    network = {"MASTER_ADDR": "10.213.7.1", "GLOO_SOCKET_IFNAME": f"veth{rank}"}
    return {**rank_environment(rank, 2, port), **places, **network}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.mark.skipif(not is_root(), reason="network namespaces need root")
@pytest.mark.parametrize("cut", [0, pytest.param(1, marks=pytest.mark.long)])
def test_network_cut_between_two_hosts_ends_both_with_a_word_and_the_run_goes_on_on_one(tmp_path, hosts, cut):
    folder, port = tmp_path / "run", free_port()
    command = [*TRAIN, f"output_dir={folder}", ENDLESS, f"distributed.timeout_s={TIMEOUT_S}"]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(popen(
                ["ip", "netns", "exec", host, *command], tmp_path / f"rank{rank}", environment(**rank_alone(rank, port))
            ))
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        await_checkpoints(folder, 2, ranks[0])
        ip("-n", hosts[cut], "link", "set", f"veth{cut}", "down")
        cut_s = time.monotonic()
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [1, 1]
        assert time.monotonic() - cut_s < TIMEOUT_S + ENDS_WITHIN_S
    for rank in range(2):
        (line,) = [line for line in said(tmp_path / f"rank{rank}").splitlines() if line.startswith("error: ")]
        assert f"rank {rank} has waited for" in line
        assert "The run goes on from its newest checkpoint when it is started again with resume=auto." in line
    assert "is lost" in said(tmp_path / "rank1")  # the store is on the other host
    goes_on(folder)


@pytest.mark.skipif(not is_root(), reason="mounts need root")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [("size=1m", "give it more room (of a container, --shm-size 8g)"), ("ro", "data workers cannot be started")],
)
def test_shared_memory_that_workers_cannot_use_ends_the_run_with_a_checkpoint_and_the_remedy(tmp_path, options, remedy):
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "class Wide(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, index):\n        return torch.zeros(40_000), index % 10\n"
        "def data():\n    return Wide(), Wide()\n"
    )
    run = tmp_path / "run"
    options_of_run = ["data=custom", "data.target=wide.data", "data.num_classes=10", "model=mlp", "model.hidden=[4]"]
    command = shlex.join([*TRAIN[:3], *options_of_run, "device=cpu", "executor=serial", "num_learners=2",
                          "batch_size=16", "max_epochs=1", "num_workers=2", f"output_dir={run}"])  # fmt: skip
    mounted = f"mount -t tmpfs -o {options} tmpfs /dev/shm && exec {command}"
    env = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with popen(["unshare", "--mount", "bash", "-c", mounted], tmp_path / "log", env) as process:
        assert process.wait(PATIENCE_S) == 1
    lines = said(tmp_path / "log").splitlines()
    assert remedy in lines[-1] and lines[-1].endswith("set num_workers=0.")
    assert not any("Traceback" in line for line in lines)
    assert checkpoints(run)
