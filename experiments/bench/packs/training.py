"""Packs in training, as a user would train an ensemble: `averaging=independent` on one feed. And one captured model."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from crossbow_py import SGD, Independent, Trainer
from experiments.bench.gate import FinishedError, Gate, Paced, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.packs.side import ONE_THREAD, PackSide, PackWorkload
from experiments.bench.sides.captured import captured, model_step, train_for_ever
from experiments.bench.workloads import MOMENTUM, WEIGHT_DECAY

ENDLESS_EPOCHS = 1e6
_LEARNING_RATE = 0.001  # low, so that nothing diverges with batches of one image


def new_pack(side: PackSide, workload: PackWorkload) -> Trainer:
    """A trainer of the side's models, each with weights of its own, that all take the same batches."""
    return Trainer(
        model=workload.make_model,
        train_data=workload.tensors(),
        num_classes=workload.num_classes,
        optimizer=SGD(learning_rate=_LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        averaging=Independent(),
        augmentation=workload.augmentation,
        mean=workload.mean,
        std=workload.std,
        batch_size=workload.batch_size,
        num_learners=side.num_learners,
        executor=side.executor,
        device="cuda" if workload.device == "cuda" else "cpu",
        precision=side.precision,
    )


def train_pack(side: PackSide, workload: PackWorkload, gate: Gate) -> None:
    # `fused_threads` has as many groups as there are threads, and gives each one of them.
    torch.set_num_threads(1 if side.side == "threads" else usable_cores())
    pack = new_pack(side, workload)
    gate.ready(Ready(1 if side.side in ONE_THREAD else torch.get_num_threads()))
    pack.fit(max_epochs=ENDLESS_EPOCHS, after_round=Paced(gate))


def train_captured(side: PackSide, workload: PackWorkload, gate: Gate) -> None:
    """One model for ever, each step one CUDA graph. Raises RuntimeError when it cannot be captured."""
    step = captured(model_step(side.precision, workload), workload.device)
    detail = "one CUDA graph a step" if workload.device == "cuda" else "no CUDA graph"
    gate.ready(Ready(torch.get_num_threads(), detail))
    train_for_ever(step, workload.batch_size, gate)


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
    in_effect: tuple[str, ...] = ()

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
