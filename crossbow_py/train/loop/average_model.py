"""The average model of a run over its ranks: what it is, how learners restart from it, how far they are from it.

Every function is called by all ranks together, with nothing in flight, unless it says otherwise.
"""

from __future__ import annotations

import math

from crossbow_py.core.errors import CentralModelError
from crossbow_py.distributed.synchronisation import differing_ranks
from crossbow_py.engine.bank.layout import checksum
from crossbow_py.engine.update import outer_step
from crossbow_py.train.run import Run


def restart(run: Run) -> None:
    """Restart the learners from z; see `SMA.restart_momentum`. Non-finite learners of this device do not count."""
    bring_up_to_date(run)
    run.bank.restart(run.rule.restart_momentum, run.ranks.adder, run.state.non_finite_learners)


def bring_up_to_date(run: Run) -> None:
    """Set z to the learners' mean, if z is as old as their last averaging."""
    if run.rule.shows_mean and not run.bank.z_is_learner:
        outer_step.bring_up_to_date(run.bank, run.collective, run.state.non_finite_learners)


def check_z(run: Run) -> None:
    """Compare z over ranks, on which it must be equal.

    Raises CentralModelError on the first rank, RankError on the others.
    """
    ranks = run.ranks
    if ranks.num_ranks == 1:
        return
    found = ranks.gather([ranks.node if run.collective.apart else 0, checksum(run.bank.z.storage)])
    if odd := differing_ranks(found):
        ranks.raise_any(CentralModelError(odd, run.state.round_index) if ranks.is_first else None)


def spread(run: Run) -> float | None:
    """Return the root mean square of |w_j − c| / |c| over the learners of all ranks.

    c is z, or the learners' mean if the rule evaluates that. None with one learner, or if c is zero or no learner is
    finite.
    """
    bank, excluded = run.bank, list(run.state.non_finite_learners)
    if bank.is_single:
        return None
    center = outer_step.mean_of_learners(bank, run.collective, excluded) if run.rule.shows_mean else None
    squares = bank.squared_distances(center, excluded)
    total, count = run.ranks.sum([sum(squares), len(squares)])
    return math.sqrt(total / count) if count else None
