"""The room of trust: what this model and this machine may be relied on for.

`compare` has the comparison of two ways to run a model and the table of tolerances, `side_effects` finds what a model
does besides computing values, and `devices` remembers what has held on a device.
"""

from crossbow_py.engine.trust.devices import GRAPHS, Outcome, RememberedOutcomes, facts, in_use, proven, why_not

__all__ = ["GRAPHS", "Outcome", "RememberedOutcomes", "facts", "in_use", "proven", "why_not"]
