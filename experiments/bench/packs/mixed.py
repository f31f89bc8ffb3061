"""Mixed packs: models of two families side by side, each half a pack with its own bank, executor and thread.

The two share the cores and nothing else; a pack by `fused` or `fused_threads` has half of the cores for itself.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from crossbow_py import Trainer
from experiments.bench.gate import FinishedError, Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.packs.side import ONE_THREAD, PackSide
from experiments.bench.packs.training import ENDLESS_EPOCHS, new_pack
from experiments.bench.packs.workloads import PackWorkload
from experiments.bench.sides.paced import Paced


class SharedGate:
    """One gate for several loops, each in its own thread. While the gate holds one of them, all others wait for it."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._lock, self._is_over = gate, threading.Lock(), False

    def tick(self, images: int, member: int) -> None:
        """See Gate. Raises FinishedError in every loop once it was raised in one, or one has failed."""
        with self._lock:
            if self._is_over:
                raise FinishedError
            try:
                self._gate.tick(images, member)
            except BaseException:
                self._is_over = True
                raise

    def end(self) -> None:
        """No loop is to go on."""
        self._is_over = True


class Member:
    """The gate as one loop sees it."""

    num_learners: int | None = None

    def __init__(self, gate: SharedGate, number: int) -> None:
        self._gate, self._number = gate, number

    def tick(self, images: int) -> None:
        self._gate.tick(images, self._number)


def train_mixed(side: PackSide, workload: PackWorkload, gate: Gate) -> None:
    """Two packs for ever: of the workload's family, and of its partner's. Raises what the first to fail raised."""
    assert workload.partner is not None, "a mixed side has a workload with a partner"
    half = replace(side, num_learners=side.num_learners // 2)
    threads = 1 if side.side == "threads" else max(1, usable_cores() // 2)
    torch.set_num_threads(threads)
    packs = [new_pack(half, each) for each in (workload, workload.partner)]
    gate.ready(Ready(1 if side.side in ONE_THREAD else threads))
    shared, failures = SharedGate(gate), list[BaseException]()

    def train(number: int, pack: Trainer) -> None:
        torch.set_num_threads(threads)
        try:
            pack.fit(max_epochs=ENDLESS_EPOCHS, after_round=Paced(Member(shared, number)))
        except BaseException as error:  # raised again below, in the thread that waits
            shared.end()
            failures.append(error)

    each = [threading.Thread(target=train, args=arguments, daemon=True) for arguments in enumerate(packs)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    real = [failure for failure in failures if not isinstance(failure, FinishedError)]
    raise (real or failures)[0]
