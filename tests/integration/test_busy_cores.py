"""A run beside programs that keep every core busy: it notices, and trains faster than one that does not look."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossbow_py.core.host import usable_core_ids
from tests.training_processes import ROOT, environment

LIBGOMP_SPINS = "libgomp" in Path("/proc/self/maps").read_text() and not (
    {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
)
# Prints images/s of a run that does not look, of one that does, and what that one says.
RUNS = """
import json
from crossbow_py import SGD
from tests.trainers import Recorder, change_run, images, make_trainer
from torch import nn

def model():
    wide = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 512), *wide, nn.Linear(512, 3))

found = []
for looks, seconds in ((False, 5.0), (True, 20.0)):
    heard = Recorder()
    still = SGD(learning_rate=1e-5)
    trainer = make_trainer(model=model, train_data=images(2000), batch_size=16, optimizer=still, callbacks=[heard])
    assert trainer.run.busy_cores is not None
    if not looks:
        change_run(trainer, busy_cores=None)
    found.append(trainer.fit(max_time_s=seconds).images_per_s)
print(json.dumps([*found, heard.of("message")]))
"""


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """So many processes that compute, while the block runs."""
    begun = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in begun:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(len(usable_core_ids()) < 2 or not LIBGOMP_SPINS, reason="threads wait as libgomp does by default")
def test_run_beside_busy_programs_notices_says_so_and_is_faster_for_it() -> None:
    threads = str(len(usable_core_ids()))
    with busy(2 * len(usable_core_ids())):
        done = subprocess.run(
            [sys.executable, "-c", RUNS], env=environment(OMP_NUM_THREADS=threads), cwd=ROOT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    blind, looking, said = json.loads(done.stdout)
    assert any("threads now sleep" in message for message in said), done.stdout
    assert looking > 1.5 * blind, done.stdout
