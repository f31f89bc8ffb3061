"""The sampling of a trial's parameters by Optuna's samplers, apart from the storage.

A trial is sampled in memory and then kept in the storage as one record with all of its parameters, so that no crash
leaves one half sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import BaseTrial, FixedTrial, FrozenTrial, TrialState, create_trial

from crossbow_py.search.space import Space

SamplerName = Literal["random", "tpe", "grid"]


class Sampling:
    """Samples trials of a space.

    `random` and `grid` follow from the seed and the trial's number alone. `tpe` (Bergstra et al., "Algorithms for
    Hyper-Parameter Optimization", NeurIPS 2011) follows from the history too: trials that were trained to the end come
    before those that were measured on the way, among which more epochs come first, and then the better value. Trials
    that have no value yet count as bad ones, so that those sampled together differ.
    """

    def __init__(self, space: Space, sampler: SamplerName, seed: int, maximize: bool) -> None:
        self._space, self._sampler, self._seed, self._maximize = space, sampler, seed, maximize
        self._grid = space.grid() if sampler == "grid" else []

    def sampled(self, trial: int, history: Sequence[FrozenTrial]) -> FrozenTrial:
        """Return a trial as a record for a storage, with its number as the attribute `trial`.

        Args:
            trial: its number; of a grid, which point.
            history: the search's trials so far, with their values, also those of trials that go on; read by `tpe`
                only.
        """
        asked = self._asked(trial, history)
        self._space.suggest(asked)
        return create_trial(
            state=TrialState.RUNNING,
            params=asked.params,
            distributions=asked.distributions,
            user_attrs={"trial": trial},
        )

    def _asked(self, trial: int, history: Sequence[FrozenTrial]) -> BaseTrial:
        if self._sampler == "grid":
            assert trial < len(self._grid), f"the grid has {len(self._grid)} points, and point {trial} was asked for"
            return FixedTrial(self._grid[trial])
        seed = int(np.random.SeedSequence([self._seed, trial]).generate_state(1)[0])
        sampler: BaseSampler = RandomSampler(seed)
        if self._sampler == "tpe":
            sampler = TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="maximize" if self._maximize else "minimize")
        if self._sampler == "tpe":
            study.add_trials([_as_measured(record) for record in history])
        return study.ask()


def _as_measured(record: FrozenTrial) -> FrozenTrial:
    """Return a copy that is ranked by its last value, of a trial that goes on and has one.

    Optuna would count it as a bad one, as it does all that run: those that lead would be bad, and those that they have
    beaten good. A pruned one it ranks by its last step, and then by the value there.
    """
    if record.state is not TrialState.RUNNING or not record.intermediate_values:
        return record
    return create_trial(
        state=TrialState.PRUNED,
        params=record.params,
        distributions=record.distributions,
        user_attrs=record.user_attrs,
        intermediate_values=record.intermediate_values,
    )
