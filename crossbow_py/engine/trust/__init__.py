"""The room of trust: what this model and this machine may be relied on for.

`compare` has the comparison of two ways to run a model and the table of tolerances, `side_effects` finds what a model
does besides computing values, `remember` has each question asked once, and `devices` knows what has held on a device.
"""

from crossbow_py.engine.trust.devices import GRAPHS, Outcome, RememberedOutcomes, facts, in_use, proven, why_not
from crossbow_py.engine.trust.remember import RememberedAnswers, assumed, not_used, once, reason_in, refusal

__all__ = [
    "GRAPHS", "Outcome", "RememberedAnswers", "RememberedOutcomes", "assumed", "facts", "in_use", "not_used", "once",
    "proven", "reason_in", "refusal", "why_not",
]  # fmt: skip
