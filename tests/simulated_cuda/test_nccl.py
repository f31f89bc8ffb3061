"""Collectives between two processes with a simulated device each, and runs of two ranks by torchrun.

python -m tests.simulated_cuda pytest -m gpu tests/simulated_cuda/test_nccl.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crossbow_py.train.checkpoints.weights import MODEL_FILE
from tests.caches import trust_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif("SIMULATED_CUDA_LIBRARY" not in os.environ, reason="run by python -m tests.simulated_cuda"),
]

ORDERS = ("earliest", "latest", "random")
ROOT = Path(__file__).parents[2]
BEGIN = """
import os, sys, time
from datetime import timedelta
import torch
from torch import distributed
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("gloo")
group = distributed.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=float(os.environ.get("LIMIT_S", 60))))
values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
"""
END = """
distributed.destroy_process_group()  # else gloo's threads may need the interpreter when it is gone
"""


def torchrun(logs, words, **settings):
    """Run two ranks, each with a device, where an access that races ends a rank with exit code 86.

    Returns the launcher's exit code, and all that the ranks and it have printed.
    """
    given = {"SIMULATED_CUDA_DEVICES": "2", "SIMULATED_CUDA_STRICT": "1", "OMP_NUM_THREADS": "1", **settings}
    launcher = ["--standalone", "--nproc-per-node=2", "--redirects=3", f"--log-dir={logs}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launcher, *words],
        cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    said = [*(each.read_text() for each in sorted(logs.rglob("std*.log"))), done.stderr]
    return done.returncode, "\n".join(said)


@pytest.fixture
def ranks(tmp_path):
    """Runs a program on two ranks, between `BEGIN` and `END`."""

    def run(program, **settings):
        script = tmp_path / "program.py"
        script.write_text(BEGIN + program + END)
        return torchrun(tmp_path / "logs", [str(script)], **settings)

    return run


@pytest.mark.parametrize("order", ORDERS)
def test_sums_and_copies_are_those_of_gloo_to_the_bit(ranks, order):
    program = """
expected = values.clone()
distributed.all_reduce(expected)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    summed = values.cuda() * 1
    distributed.all_reduce(summed, group=group)
    assert torch.equal((summed * 1).cpu(), expected)
copied = values.cuda()
distributed.broadcast(copied, 1, group=group)
assert torch.equal(copied.cpu(), torch.randn(1000, generator=torch.Generator().manual_seed(1)))
distributed.barrier(group)
"""
    code, said = ranks(program, SIMULATED_CUDA_ORDER=order)
    assert code == 0, said


def test_host_goes_on_while_a_sum_waits_for_the_other_rank(ranks):
    """The first rank's host reaches gloo's barrier before the second has launched its part of the sum."""
    program = """
distributed.all_reduce(torch.ones(1, device="cuda"), group=group)  # connects
torch.cuda.synchronize()
summed = values.cuda()
if rank == 0:
    work = distributed.all_reduce(summed, group=group, async_op=True)
    assert not work.is_completed()
distributed.barrier()
if rank == 1:
    work = distributed.all_reduce(summed, group=group, async_op=True)
distributed.barrier()
work.wait()
expected = values.clone()
distributed.all_reduce(expected)
assert torch.equal(summed.cpu(), expected)
"""
    code, said = ranks(program)
    assert code == 0, said


def test_result_read_without_waiting_for_the_sum_is_a_race(ranks):
    program = """
summed = values.cuda()
work = distributed.all_reduce(summed, group=group, async_op=True)
summed + 1
work.wait()
torch.cuda.synchronize()
"""
    code, said = ranks(program)
    assert code == 1 and "exitcode  : 86" in said
    assert "aten::add on stream 0 of cuda:1 is not ordered after all-reduce on stream" in said


def test_rank_that_waits_for_one_that_is_gone_is_ended_by_the_watchdog(ranks):
    program = """
distributed.all_reduce(torch.ones(1, device="cuda"), group=group)
torch.cuda.synchronize()
distributed.barrier()
if rank == 1:
    time.sleep(30)
distributed.all_reduce(values.cuda(), group=group)
torch.cuda.synchronize()
"""
    code, said = ranks(program, LIMIT_S="2")
    assert code == 1 and "NCCL's watchdog: all-reduce has taken too long" in said
    assert f"exitcode  : {-signal.SIGABRT}" in said


def trained(folder, period, *words):
    """Train two ranks of two learners each; returns the weights of the central average model."""
    settings = ["+experiment=digits", "precision=fp32", "num_learners=2", "max_rounds=7", f"output_dir={folder}/run"]
    words = ["-m", "crossbow_py.train", *settings, f"averaging.averaging_period={period}", *words]
    code, said = torchrun(folder / "logs", words)
    assert code == 0, said
    return load_file(folder / "run" / MODEL_FILE)


@pytest.fixture(scope="module", params=[1, 3])
def on_cpus(request, tmp_path_factory):
    """An averaging period, and what is trained with it on CPUs."""
    return request.param, trained(tmp_path_factory.mktemp("cpus"), request.param, "device=cpu", "executor=serial")


@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_two_ranks_train_what_they_train_on_cpus(on_cpus, executor, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trust_cuda(monkeypatch)
    period, expected = on_cpus
    found = trained(tmp_path, period, "device=cuda", f"executor={executor}")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


SLOW_MODEL = """
import json, os, torch
from torch import nn
from crossbow_py import SGD, SMA, Trainer, joined
from crossbow_py.averaging import SynchronousSGD

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 2)
        self.register_buffer("large", torch.eye(800))

    def forward(self, inputs):
        hidden = self.first(inputs).relu()
        if os.environ["RANK"] == "1":  # the device has more to do; the numbers are the same
            hidden = hidden * (self.large @ self.large @ self.large).mean() * 800
        return self.last(hidden)

inputs = torch.randn(256, 20)
with joined() as ranks:
    trainer = Trainer(
        model=Model, train_data=(inputs, (inputs[:, 0] > 0).long()), batch_size=8, num_learners=2, device="cuda",
        executor=EXECUTOR, precision="fp32", optimizer=SGD(learning_rate=0.05), averaging=RULE(), ranks=ranks,
    )
    summary = trainer.fit(max_rounds=20).summary
    if ranks.is_first:
        print("waits", json.dumps([each.rank_wait_share for each in summary.per_rank]))
"""


@pytest.mark.parametrize(("executor", "rule"), [("fused", "SMA"), ("streams", "SynchronousSGD")])
def test_rank_whose_device_is_slow_waits_least(executor, rule, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trust_cuda(monkeypatch)
    script = tmp_path / "program.py"
    script.write_text(SLOW_MODEL.replace("EXECUTOR", repr(executor)).replace("RULE()", f"{rule}()"))
    code, said = torchrun(tmp_path / "logs", [str(script)])
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("waits ")]
    fast, slow = json.loads(line.removeprefix("waits "))
    assert fast > max(0.2, 2 * slow), said
