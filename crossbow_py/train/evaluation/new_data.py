"""New data for a run's current models: their evaluation, and predictions.

All ranks call these together, with nothing in flight, and get the same.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import check_data, in_tensors, input_shape, with_zeros
from crossbow_py.data.feed import Feed
from crossbow_py.data.streaming.streamed_data import StreamedData
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.train.build import evaluation_feed, new_feed
from crossbow_py.train.checks.probe import probe_inputs
from crossbow_py.train.evaluation.current_models import current_states, evaluate
from crossbow_py.train.evaluation.evaluator import Evaluation
from crossbow_py.train.run import Run


class Predicted(NamedTuple):
    """What a model says about N samples, on the host.

    `outputs` [N, ...] are what it returns, in float32: logits where the loss is cross-entropy. `classes` [N], or
    [N, ...] of tokens and pixels, int64, are those of the highest output; None where samples have no classes.
    """

    outputs: Tensor
    classes: Tensor | None


def evaluate_on(run: Run, data: Any) -> Evaluation:
    """Evaluate the current model on `data`, in the form of test data; of independent learners return the mean.

    Raises UserError for data that do not fit the model, the loss or the metrics.
    """
    with run.ranks.together():
        source = in_tensors(data)
        _check(run, source)
        feed = evaluation_feed("new", source, run.evaluator, run.data, run.settings, run.choices, run.ranks)
    with closing(feed):
        measured = evaluate(run, "new", feed=feed)
    assert measured is not None, "there is a feed"
    return measured[0]


def predict(run: Run, data: Any) -> Predicted:
    """Return the outputs for `data` of the current model, of independent learners the first; see `Trainer.predict`."""
    full = dataclasses.replace(run.choices.precision, compute=run.choices.precision.master)
    evaluator = copy.copy(run.evaluator)
    evaluator.precision = full  # as `Trainer.model` has it
    with run.ranks.together():
        feed = _inputs_of(run, data, full)
        probe_inputs(evaluator.template, full, feed.first_samples(2), "new")
    state = current_states(run)[0]
    with closing(feed), run.ranks.together():
        found = [scores.cpu() for scores, _ in evaluator.scores(state, feed)]
        shapes = {scores.shape[1:] for scores in found}
        if len(shapes) > 1:
            got = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise UserError(f"predict() needs outputs of one shape, got {got}; pad samples to one length.")
        outputs, dim = torch.cat(found), run.evaluator.dim_of_classes(run.train_feed)
        if len(outputs) != feed.num_samples:
            raise UserError(
                f"predict() needs an output for every sample, got {len(outputs)} for {feed.num_samples}; leave out "
                "samples that cannot be read."
            )
    return Predicted(outputs, None if dim is None else outputs.argmax(dim))


def _inputs_of(run: Run, data: Any, precision: Precision) -> Feed:
    """Return a feed of `data`, whose targets are not looked at. Raises UserError for what are no inputs."""
    if getattr(data, "ndim", 2) < 2:
        raise UserError(f"predict() needs samples [N, ...], got shape {list(data.shape)}; give one sample as x[None].")
    alone, sets = with_zeros(data), run.data
    if alone is not None:
        sets = dataclasses.replace(sets, labels_as_input=False)
    source = in_tensors(data) if alone is None else alone
    _check(run, source)
    choices = dataclasses.replace(run.choices, precision=precision)
    return new_feed(source, 1, None, sets, run.settings, choices, training=False, ranks=run.ranks)


def _check(run: Run, data: Any) -> None:
    """Raise UserError for what are no data, and samples with other dimensions than those that were trained on."""
    check_data(data, "the new data")
    trained: Any = run.data.train
    if isinstance(data, StreamedData) or isinstance(trained, StreamedData):
        return
    own, known = input_shape(data), input_shape(trained)
    if len(own) != len(known):
        raise UserError(
            f"the new data have samples of shape {list(own)}, and the model was trained on {list(known)}; give as many "
            "dimensions, one sample as x[None]."
        )
