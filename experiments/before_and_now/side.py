"""Trains by the package that PYTHONPATH names, of whichever commit: a window for every line of stdin.

It knows no other file of this tree, and of the package what is public and stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import torch

import crossbow_py
from crossbow_py import SGD, Augmentation, Listener, Trainer
from crossbow_py.models import MODELS

SHAPES = {"lenet": (1, 28, 28), "resnet32": (3, 32, 32)}
LEARNERS, BATCH, SAMPLES = 4, 16, 16384
_LEAD_IN_S = 0.4


class Windows(Listener):
    """Holds one long run between windows: stdin says how long the next is, and its end the run's.

    The first progress is answered with the seconds since the run was begun, each window with images/s, and the time
    that this process has had on processors so far.
    """

    BLOCKS = True

    def __init__(self, answers: TextIO, begun_s: float) -> None:
        self._answers, self._start, self._seconds = answers, (0.0, 0), 0.0
        self._begins_s, self._begun_s = -1.0, begun_s  # no window is wanted

    def on_progress(self, progress: Any) -> None:
        """Begin or end a window, or wait for one to be wanted."""
        now_s, seen = time.perf_counter(), progress.samples_seen
        if self._begins_s < 0:
            print(now_s - self._begun_s, file=self._answers, flush=True)
            self._await()
        elif not self._start[1]:
            if now_s >= self._begins_s:
                self._start = now_s, seen
        elif now_s - self._start[0] >= self._seconds:
            rate = (seen - self._start[1]) / (now_s - self._start[0])
            found = {"images_per_s": rate, "own_s": time.process_time()}
            print(json.dumps(found), file=self._answers, flush=True)
            self._await()

    def _await(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self._seconds, self._start, self._begins_s = float(line), (0.0, 0), time.perf_counter() + _LEAD_IN_S


def main(model: str, executor: str) -> None:
    """Say where the package is, and train."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints goes elsewhere
    print(crossbow_py.__file__, file=answers, flush=True)
    generator, shape = torch.Generator().manual_seed(0), SHAPES[model]
    images = torch.randint(0, 256, (SAMPLES, *shape), generator=generator, dtype=torch.uint8)
    begun_s = time.perf_counter()
    trainer = Trainer(
        model=lambda: MODELS[model]().build(shape, 10), batch_size=BATCH, num_learners=LEARNERS, executor=executor,
        train_data=(images, torch.randint(0, 10, (SAMPLES,), generator=generator)), device="cpu", seed=0,
        optimizer=SGD(learning_rate=0.001, momentum=0.9), augmentation=Augmentation(crop_padding=4, flip=True),
        mean=(0.5,) * shape[0], std=(0.25,) * shape[0], callbacks=[Windows(answers, begun_s)],
    )  # fmt: skip
    trainer.fit(max_epochs=10**6)


if __name__ == "__main__":
    main(*sys.argv[1:])
