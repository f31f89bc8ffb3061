"""Seconds of one search for the largest batch size, in a process of its own, so that nothing is remembered.

    python experiments/estimate/time_search.py '{"model": "resnet50", "num_learners": 1, "limit_bytes": 17179869184,
                                                 "way": "doubling"}'

prints one line of JSON. Both ways begin without the model; starting Python and importing torch counts for neither:

    estimate   two probes, and the answer worked out from them
    doubling   1, 2, 4, ... until memory is exceeded, then halving; every question is a round of training
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.sizing.memory import Job, LearnerModel, Sample
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.optimizers import SGD
from experiments.estimate.truth import SUBJECTS, Subject, TrainingRun, doubling_search


def by_estimate(model: str, num_learners: int, limit_bytes: int) -> tuple[int, int]:
    found = estimate(SUBJECTS[model])
    return found.largest_batch_size(limit_bytes, num_learners, num_learners), len(found.activations.probes)


def by_doubling(model: str, num_learners: int, limit_bytes: int) -> tuple[int, int]:
    run, tried = TrainingRun(SUBJECTS[model], num_learners, num_learners), []

    def fits(batch_size: int) -> bool:
        tried.append(batch_size)
        return run.fits(limit_bytes, batch_size)

    return doubling_search(fits), len(tried)


WAYS: dict[str, Callable[[str, int, int], tuple[int, int]]] = {"estimate": by_estimate, "doubling": by_doubling}


def main(argument: str) -> dict[str, Any]:
    asked = json.loads(argument)
    search = WAYS[asked["way"]]
    begin, busy = time.perf_counter(), time.process_time()
    batch_size, tries = search(asked["model"], asked["num_learners"], asked["limit_bytes"])
    took_s, busy_s = time.perf_counter() - begin, time.process_time() - busy
    return {"batch_size": batch_size, "tries": tries, "seconds": took_s, "processor_seconds": busy_s}


def estimate(subject: Subject) -> LearnerModel:
    job = Job(nn.functional.cross_entropy, SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4), SMA(), FP32)
    staged = subject.sample_bytes + 8  # a target is an int64
    return estimate_learner(subject.make_model, Sample(subject.input_shape), job, staged_sample_bytes=staged)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
