"""Trains by the package that PYTHONPATH names, of whichever commit: a window for every line of stdin.

It knows no other file of this tree, and of the package what is public and stays.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

import torch

import crossbow_py
from crossbow_py import SGD, Augmentation, Trainer
from crossbow_py.models import MODELS

SHAPES = {"lenet": (1, 28, 28), "resnet32": (3, 32, 32)}
LEARNERS, BATCH, SAMPLES = 4, 16, 4096


def main(model: str, executor: str) -> None:
    """Say where the package is; answer seconds on stdin with images/s and this process's time on processors so far."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints goes elsewhere
    print(crossbow_py.__file__, file=answers, flush=True)
    generator, shape = torch.Generator().manual_seed(0), SHAPES[model]
    images = torch.randint(0, 256, (SAMPLES, *shape), generator=generator, dtype=torch.uint8)
    trainer = Trainer(
        model=lambda: MODELS[model]().build(shape, 10), batch_size=BATCH, num_learners=LEARNERS, executor=executor,
        train_data=(images, torch.randint(0, 10, (SAMPLES,), generator=generator)), device="cpu", seed=0,
        optimizer=SGD(learning_rate=0.001, momentum=0.9), augmentation=Augmentation(crop_padding=4, flip=True),
        mean=(0.5,) * shape[0], std=(0.25,) * shape[0],
    )  # fmt: skip
    rounds = 20
    for line in sys.stdin:
        begun = time.perf_counter()
        trainer.fit(max_rounds=rounds)  # to warm up, and to learn how many rounds a window is
        rounds = max(1, math.ceil(rounds * float(line) / (time.perf_counter() - begun)))
        begun = time.perf_counter()
        trainer.fit(max_rounds=rounds)
        rate = rounds * LEARNERS * BATCH / (time.perf_counter() - begun)
        print(json.dumps({"images_per_s": rate, "own_s": time.process_time()}), file=answers, flush=True)
        rounds = max(1, rounds // 8)


if __name__ == "__main__":
    main(*sys.argv[1:])
