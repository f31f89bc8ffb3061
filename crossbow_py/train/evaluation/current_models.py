"""A run's current models: their states, their evaluation, and the modules that `fit` returns.

All ranks call these together, with nothing in flight, and get the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from crossbow_py.core.errors import CrossbowError, UnknownIdError, is_of_data
from crossbow_py.data.feed import Feed
from crossbow_py.engine.update.outer_step import mean_of_learners
from crossbow_py.train.evaluation.evaluator import Measured, State, mean_evaluation
from crossbow_py.train.run import Run


def final_states(run: Run, ema: bool = True) -> list[State]:
    """Return the state dict of the average model, or of every independent learner.

    Non-finite learners count neither in BatchNorm's statistics nor in means of weights. With `ema` it is the EMA of the
    average model, if there is one.
    """
    if not run.rule.has_central_model:
        return [run.bank.learner_state(learner) for learner in range(run.bank.num_learners)]
    state = _central_state(run)
    if run.average_ema is not None and ema:
        state = run.average_ema.at(state, run.state.samples_seen)
    return [_recalibrated(run, state) if run.rule.batch_norm == "recalibrate" else state]


def current_states(run: Run) -> list[State]:
    """Return the states of `final_states`, or of the best models if `fit` has just returned these; after errors too."""
    if run.state.returned_best and run.state.best is not None:
        return run.state.best.states
    if run.choices.device.type == "cuda":
        torch.cuda.synchronize(run.choices.device)  # an error may have left streams at work
    run.bank.adopt_learner()
    return final_states(run)


def current_models(run: Run) -> list[nn.Module]:
    """Return the average model or its EMA, or every independent learner, in float32 and evaluation mode.

    Right after a `fit` that returned the best models, these.
    """
    return [run.evaluator.module(state) for state in current_states(run)]


def model_samples(run: Run) -> int:
    """Return the samples that the current models had seen: the run's, or those of the best models just returned."""
    state = run.state
    return state.best.samples_seen if state.returned_best and state.best else state.samples_seen


def evaluate(run: Run, which: str, states: Sequence[State] | None = None, feed: Feed | None = None) -> Measured | None:
    """Evaluate models, the current ones by default, on the `test` or `validation` data; None without such data.

    Other data are given as a `feed`, and `which` is what errors call them.

    Each rank evaluates a share of the samples. Returns the evaluation that stops look at, and for independent learners
    the evaluation of each; the first one is then their mean.
    """
    feed = feed or run.feed_of(which)
    if feed is None:
        return None
    try:
        each = tuple(
            run.evaluator.evaluate(state, feed, run.ranks, examples=number == 0)
            for number, state in enumerate(current_states(run) if states is None else states)
        )
    except UnknownIdError as error:
        raise UnknownIdError(f"of the {which} data, {error}") from error
    return (each[0], ()) if run.rule.has_central_model else (mean_evaluation(each), each)


def move_ema(run: Run) -> None:
    """Update the EMA of z."""
    assert run.average_ema is not None, "nothing asks for an EMA"
    run.average_ema.move(_central_state(run), run.state.samples_seen)


def _central_state(run: Run) -> State:
    """Return the state dict of z: the mean over nodes if each has its own, or the learners' mean by some rules."""
    bank, excluded = run.bank, list(run.state.non_finite_learners)
    state = bank.central_state(excluded, run.ranks.adder)
    if run.rule.shows_mean and not bank.is_single:
        return {**state, **mean_of_learners(bank, run.collective, excluded).shaped()}
    if not run.collective.apart:
        return state
    z = bank.new_flat()
    z.copy_row(0, bank.z)
    run.collective.mean_over_nodes(z.storage)
    return {**state, **z.shaped()}


def _recalibrated(run: Run, state: State) -> State:
    """Recalibrate BatchNorm on the training batches that come next, if they can be loaded."""
    share = range(run.ranks.rank, run.rule.recalibration_batches, run.ranks.num_ranks)
    starts = [run.state.samples_seen + number * run.train_feed.batch_size for number in share]
    try:
        with contextlib.closing(run.train_feed.aside(starts)) as batches:
            parts = (part.inputs for batch in batches for part in batch.parts(run.settings.accumulate))
            return run.evaluator.recalibrate(state, parts, run.ranks)
    except CrossbowError as error:
        if not is_of_data(error):
            raise
        run.notes.append(f"BatchNorm's statistics are means of the learners', not measured anew: {error}")
        return state
