"""A run beside programs that keep every core busy: it notices, and trains faster than one that does not look."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
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

# Trains on digits, and prints what is said of threads, and for how long others held so many cores.
DIGITS = """
import json, sys
from crossbow_py import Listener, SGD, Trainer
from crossbow_py.data.sources import SOURCES
from crossbow_py.core.host import LoadSnapshot, foreign_share
from torch import nn

class Reporter(Listener):
    load = LoadSnapshot.take()

    def on_message(self, message):
        if "hreads" in message:
            print(json.dumps(message), flush=True)

    def on_progress(self, progress):
        before, self.load = self.load, LoadSnapshot.take()
        share = foreign_share(before, self.load)
        print(json.dumps([self.load.wall_s - before.wall_s, share and share * self.load.cores]), flush=True)

def model():
    wide = [layer for _ in range(2) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), *wide, nn.Linear(512, 10))

digits = SOURCES["digits"]().load(progress=False)
trainer = Trainer(
    model=model, train_data=digits.train, mean=digits.mean, std=digits.std, optimizer=SGD(learning_rate=1e-4),
    num_learners=2, executor=sys.argv[1], device="cpu", precision="fp32", callbacks=[Reporter()],
)
assert trainer.run.busy_cores is not None
trainer.fit(max_time_s=100.0)
"""
SLEEP_S, SPIN_S = 35.0, 50.0  # in which threads are to sleep, and to spin again
FREE_CORES, FREE_S = 0.2, 20.0  # others held less, for so long without a break: then threads must have spun again


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


class Training:
    """A run in a process of its own, and what it prints."""

    def __init__(self, executor: str) -> None:
        threads = str(len(usable_core_ids()))
        self.process = subprocess.Popen(
            [sys.executable, "-c", DIGITS, executor], env=environment(OMP_NUM_THREADS=threads), cwd=ROOT, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, words: str, seconds: float) -> tuple[bool, float]:
        """Whether the run says that in time, and for how many seconds without a break it had the cores meanwhile."""
        end, free_s, longest_s = time.monotonic() + seconds, 0.0, 0.0
        while (left_s := end - time.monotonic()) > 0 and self.process.poll() is None:
            with contextlib.suppress(queue.Empty):
                said = json.loads(self._lines.get(timeout=min(1.0, left_s)))
                if isinstance(said, str):
                    if words in said:
                        return True, longest_s
                    continue
                free_s = free_s + said[0] if said[1] is not None and said[1] < FREE_CORES else 0.0
                longest_s = max(longest_s, free_s)
        assert self.process.poll() is None, "the run has ended by itself"
        return False, longest_s

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.skipif(len(usable_core_ids()) < 2 or not LIBGOMP_SPINS, reason="threads wait as libgomp does by default")
def test_threads_sleep_beside_busy_programs_and_spin_again_when_those_have_ended(executor: str) -> None:
    with contextlib.closing(Training(executor)) as training:
        with busy(2 * len(usable_core_ids())):
            sleeps, _ = training.wait_for("threads now sleep", SLEEP_S)
        if not sleeps:
            pytest.skip("busy programs did not slow this machine down enough for threads to sleep")
        spins, free_s = training.wait_for("Threads spin again", SPIN_S)
    if not spins and free_s < FREE_S:
        pytest.skip(f"other programs left the cores free for {free_s:.0f} s at most, which is nothing to come back to")
    assert spins, f"threads still slept after {free_s:.0f} s with free cores"
