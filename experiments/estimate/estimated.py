"""The estimator, asked as `crossbow_py.estimate` asks it, of data that is streamed, for the subjects of `truth`."""

from __future__ import annotations

from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.sizing.job import Job, Sample
from crossbow_py.engine.sizing.memory import LearnerModel
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.optimizers import SGD
from experiments.estimate.truth import Subject


def estimate(subject: Subject) -> LearnerModel:
    """Estimate a model by two probes without a device."""
    job = Job(nn.functional.cross_entropy, SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4), SMA(), FP32)
    staged = subject.sample_bytes + 8  # a target is an int64
    return estimate_learner(subject.make_model, Sample(subject.input_shape), job, staged_sample_bytes=staged)
