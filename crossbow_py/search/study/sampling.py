"""Samples a search's trials by Optuna's samplers, in memory: a storage is given whole trials alone."""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseGASampler,
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.study import Study
from optuna.trial import BaseTrial, FixedTrial, FrozenTrial, TrialState, create_trial

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.targets import import_target
from crossbow_py.search.space import Space

# By name, each made with the seed of a trial, and that of the search. What they cannot do for a space with conditions
# or choices they leave to random sampling, which they would otherwise say of each trial.
_NAMED: Mapping[str, Callable[[int, int], BaseSampler]] = {
    "random": lambda seed, _: RandomSampler(seed),
    "tpe": lambda seed, _: TPESampler(seed=seed, constant_liar=True),
    "gp": lambda seed, _: GPSampler(seed=seed, warn_independent_sampling=False),
    "cmaes": lambda seed, _: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "qmc": lambda seed, of_search: QMCSampler(
        scramble=True, seed=of_search, independent_sampler=RandomSampler(seed), warn_independent_sampling=False
    ),
    "nsgaii": lambda seed, _: NSGAIISampler(seed=seed),
}
_NEEDS: Sequence[tuple[type[BaseSampler], str]] = (
    (GPSampler, "scipy"), (QMCSampler, "scipy"), (CmaEsSampler, "cmaes"),
)  # fmt: skip
# They keep nothing from one trial to the next but what is in the trials. Classes derived from them may.
_FORGETFUL = (RandomSampler, TPESampler, GPSampler)
# They learn from trials that are COMPLETE alone.
_OF_COMPLETE = (GPSampler, CmaEsSampler, BaseGASampler)
_ENOUGH = 10  # trials at a rung to learn from; a Gaussian process begins with as many


class Sampling:
    """Samples trials of a space, to be kept as one record each: no crash leaves one half sampled.

    Every trial has a sampler of its own, made with a seed of its own, which is told of the other trials.

    - `random` and `grid` follow from the seed and the trial's number alone.
    - `tpe` (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011) and `gp` are given the trials
      so far. To `tpe`, trials that were trained to the end come before those that were measured on the way, among which
      more epochs come first, and then the better value. Trials that have no value yet count as bad ones, so that those
      sampled together differ.
    - Other samplers may remember what they did: CMA-ES its distribution, quasi-Monte Carlo its place in the sequence.
      Such a sampler samples all trials before once more, in their order, each of which then has the values that are
      known by now. So nothing of theirs is kept in a storage, where CMA-ES would unpickle what anybody wrote.

    Args:
        sampler: a name, or a dotted path of what makes one of Optuna's samplers, called with `seed`.
        seed: the seed of the search.
        maximize: whether greater values are better.

    Raises UserError for a sampler that cannot be made, or whose package is not installed.
    """

    def __init__(self, space: Space, sampler: str, seed: int, maximize: bool) -> None:
        self._space, self._name, self._seed, self._maximize = space, sampler, seed, maximize
        self._grid = space.grid() if sampler == "grid" else []
        self._target = None if sampler == "grid" or sampler in _NAMED else import_target("sampler", sampler)
        if sampler != "grid":
            with _quietly():
                first = self._new_sampler(0)
            missing = [name for kind, name in _NEEDS if isinstance(first, kind) and not importlib.util.find_spec(name)]
            if missing:
                raise UserError(
                    f"sampler={sampler} needs {missing[0]}, which is not installed; run pip install {missing[0]}."
                )

    def sampled(self, trial: int, history: Sequence[FrozenTrial]) -> FrozenTrial:
        """Return a trial as a record for a storage, with its number as the attribute `trial`.

        `history` has the search's trials so far, by their attribute `trial`, with their values, also those that go on.
        """
        try:
            with _quietly():
                asked = self._asked(trial, history)
                self._space.suggest(asked)
        except Exception as error:
            if self._target is None or isinstance(error, UserError):
                raise
            raise UserError(
                f"sampler={self._name} failed with {one_line(error)} when it sampled trial {trial}; correct it."
            ) from error
        attributes, own = {"trial": trial}, asked.distributions
        return create_trial(state=TrialState.RUNNING, params=asked.params, distributions=own, user_attrs=attributes)

    def _asked(self, trial: int, history: Sequence[FrozenTrial]) -> BaseTrial:
        if self._name == "grid":
            assert trial < len(self._grid), f"the grid has {len(self._grid)} points, and point {trial} was asked for"
            return FixedTrial(self._grid[trial])
        sampler = self._new_sampler(trial)
        study = optuna.create_study(sampler=sampler, direction="maximize" if self._maximize else "minimize")
        if type(sampler) is RandomSampler:
            return study.ask()
        known = at_one_rung(history, _enough(sampler)) if isinstance(sampler, _OF_COMPLETE) else _as_measured(history)
        if type(sampler) in _FORGETFUL:
            study.add_trials(known)
            return study.ask()
        by_number = {record.user_attrs["trial"]: record for record in known}
        for number in range(trial):
            self._sample_again(study, by_number.get(number))
        return study.ask()

    def _sample_again(self, study: Study, record: FrozenTrial | None) -> None:
        """Have the sampler sample a trial as if for the first time, and tell it what became of the one on record.

        Another process may be sampling it at the moment: then there is no record, and the sampler's own guess stands.
        """
        if record is not None:
            study.enqueue_trial(record.params)
        asked = study.ask()
        _ = asked.relative_params  # computed when it is first looked at: the sampler remembers having been asked
        self._space.suggest(asked)
        if record is None or record.state is TrialState.RUNNING:
            return
        for step, value in record.intermediate_values.items():
            asked.report(value, step)
        study.tell(asked, record.value if record.state is TrialState.COMPLETE else None, record.state)

    def _new_sampler(self, trial: int) -> BaseSampler:
        seed = _number(self._seed, trial)
        if self._target is None:
            return _NAMED[self._name](seed, _number(self._seed))
        try:
            found = self._target(seed=seed)
        except Exception as error:  # of the user's
            raise UserError(
                f"sampler={self._name} called with seed={seed} failed with {one_line(error)}; name what takes a seed."
            ) from error
        if not isinstance(found, BaseSampler):
            raise UserError(
                f"sampler={self._name} must give a sampler of Optuna, got {type(found).__name__}; derive it from one."
            )
        return found


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what Optuna says of samplers that may change yet, which would be for every trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _number(*entropy: int) -> int:
    """Return a seed of 32 bits."""
    return int(np.random.SeedSequence(list(entropy)).generate_state(1)[0])


def _enough(sampler: BaseSampler) -> int:
    """Return how many trials a sampler learns from at least."""
    size = sampler.population_size if isinstance(sampler, BaseGASampler) else None
    return size or _ENOUGH


def _as_measured(history: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials, of which those that go on and have a value are copies ranked by their last value.

    Optuna would count them as bad ones, as it does all that run: those that lead would be bad, and those that they have
    beaten good. A pruned one it ranks by its last step, and then by the value there.
    """
    return [
        _ended(record, TrialState.PRUNED)
        if record.state is TrialState.RUNNING and record.intermediate_values
        else record
        for record in history
    ]


def at_one_rung(history: Sequence[FrozenTrial], enough: int) -> list[FrozenTrial]:
    """Return copies of the trials in which those measured at one rung are COMPLETE, with their values there.

    It is the furthest rung that `enough` trials have reached, or else the one that most have, as in BOHB (Falkner et
    al., "BOHB: Robust and Efficient Hyperparameter Optimization at Scale", ICML 2018): values of different rungs are
    not compared. Trials without a value there are PRUNED, or still run.
    """
    measured = [record for record in history if record.state is not TrialState.FAIL]
    reached = Counter(step for record in measured for step in record.intermediate_values)
    step = max(reached, key=lambda step: (min(reached[step], enough), step), default=None)
    known = []
    for record in history:
        if record.state is TrialState.FAIL or not record.intermediate_values:
            known.append(record)
        elif step in record.intermediate_values:
            known.append(_ended(record, TrialState.COMPLETE, record.intermediate_values[step]))
        else:
            known.append(_ended(record, TrialState.PRUNED))
    return known


def _ended(record: FrozenTrial, state: TrialState, value: Any = None) -> FrozenTrial:
    return create_trial(
        state=state, value=value, params=record.params, distributions=record.distributions,
        user_attrs=record.user_attrs, intermediate_values=record.intermediate_values,
    )  # fmt: skip
