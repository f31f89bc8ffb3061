"""Switches in the environment for parts of executors on CUDA, to find out which part is at fault.

    CROSSBOW_KERNELS=none, or some of update,loss,batches,layers,convolutions    the Triton kernels to use
    CROSSBOW_GRAPHS=0 or 1                                                       whether to capture CUDA graphs

A switch that is set overrides what was found out about the device (`engine/trust/`). `convolutions` has the way of
each convolution measured, kernels included; `layers` without it runs them as one grouped operator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import shown

KERNELS = ("update", "loss", "batches", "layers", "convolutions")
KERNELS_VARIABLE, GRAPHS_VARIABLE = "CROSSBOW_KERNELS", "CROSSBOW_GRAPHS"


@dataclass(frozen=True)
class Switches:
    """The kernels to use, and whether to capture graphs; None where the environment leaves that open."""

    kernels: frozenset[str] | None = None
    graphs: bool | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that set these switches."""
        kernels = None if self.kernels is None else ",".join(each for each in KERNELS if each in self.kernels) or "none"
        graphs = None if self.graphs is None else str(int(self.graphs))
        variables = {KERNELS_VARIABLE: kernels, GRAPHS_VARIABLE: graphs}
        return {name: value for name, value in variables.items() if value is not None}


def read_switches(environment: Mapping[str, str] = os.environ) -> Switches:
    """Return the switches that are set. Raises UserError for a value that means nothing."""
    return Switches(_kernels(environment.get(KERNELS_VARIABLE, "")), _graphs(environment.get(GRAPHS_VARIABLE, "")))


def _kernels(text: str) -> frozenset[str] | None:
    names = [name for each in text.split(",") if (name := each.strip())]
    if not names:
        return None
    if names == ["none"]:
        return frozenset()
    if not set(names) <= set(KERNELS):
        raise UserError(
            f"{KERNELS_VARIABLE} must be none, or some of {', '.join(KERNELS)} with commas between, got {shown(text)}; "
            "unset it to use what this device was found to run."
        )
    if "convolutions" in names and "layers" not in names:
        raise UserError(
            f"{KERNELS_VARIABLE} has convolutions, which are part of layers, got {shown(text)}; add layers, too."
        )
    return frozenset(names)


def _graphs(text: str) -> bool | None:
    if text.strip() not in ("", "0", "1"):
        raise UserError(f"{GRAPHS_VARIABLE} must be 0 or 1, got {shown(text)}; set 0 to run without CUDA graphs.")
    return bool(int(text)) if text.strip() else None
