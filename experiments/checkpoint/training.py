"""Training that goes on while a checkpoint is written beside it: a thread a learner, as executor=threads has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from crossbow_py.models import MODELS

BATCH_SIZE = 16
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


class Training:
    """`num_learners` replicas of a model, each in a thread of its own with one intra-op thread."""

    def __init__(self, model: str, num_learners: int) -> None:
        self._rounds = [0] * num_learners
        self._changed = threading.Condition()
        self._runs, self._ends, self._standing = False, False, 0
        self._threads = [
            threading.Thread(target=self._train, args=(model, number), daemon=True) for number in range(num_learners)
        ]

    @property
    def rounds(self) -> float:
        """The rounds that a learner has trained, in the mean."""
        return sum(self._rounds) / len(self._rounds)

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        self.resume()
        try:
            yield
        finally:
            with self._changed:
                self._ends = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def pause(self) -> None:
        """Block until every learner has ended its round and stands still."""
        with self._changed:
            self._runs = False
            self._changed.wait_for(lambda: self._standing == len(self._threads))

    def resume(self) -> None:
        with self._changed:
            self._runs = True
            self._changed.notify_all()

    def _train(self, model: str, number: int) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(number)
        module = MODELS[model]().build((3, 32, 32), 10)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch takes all the same
        images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
        classes = torch.randint(10, (BATCH_SIZE,), generator=generator)
        weights: list[torch.Tensor] = list(module.parameters())
        momentum = [torch.zeros_like(weight) for weight in weights]
        while self._may_go_on():
            loss = nn.functional.cross_entropy(module(images), classes)
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_mul_(momentum, _MOMENTUM)
                torch._foreach_add_(momentum, gradients)
                torch._foreach_add_(weights, momentum, alpha=-_LEARNING_RATE)
            self._rounds[number] += 1

    def _may_go_on(self) -> bool:
        with self._changed:
            self._standing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._runs or self._ends)
            self._standing -= 1
            return not self._ends
