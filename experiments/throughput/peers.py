"""The sides of other people's ways to many models on a device, or to one large batch: which of them are planned where.

| side | what it is |
|---|---|
| `compiled` | one model through torch.compile and one CUDA graph, on the images of K learners a step |
| `vmap` | K models by torch.func, in one CUDA graph |
| `jax_vmap` | K models by JAX |
| `mps_processes` | K processes with a captured model each, sharing the device by NVIDIA's multi-process service |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COMPILED, VMAP, JAX_VMAP, MPS = "compiled", "vmap", "jax_vmap", "mps_processes"
PEER_SIDES = (COMPILED, VMAP, JAX_VMAP, MPS)
# Written for JAX in jax_models.py.
JAX_MODELS = ("mlp", "lenet", "resnet32")
# On a CPU they are slow to build (Inductor) or to run (vmap), so they are measured there only if asked for by name.
_BY_DEFAULT: Mapping[str, tuple[str, ...]] = {"cuda": PEER_SIDES}


class PlannedPeers(NamedTuple):
    """Names of the sides to measure, and of wanted ones that cannot be, why."""

    sides: tuple[str, ...]
    absent: dict[str, str]

    def of(self, model: str) -> list[str]:
        """The sides that there are of a model."""
        return [side for side in self.sides if side != JAX_VMAP or model in JAX_MODELS]

    def without(self, name: str, reason: str) -> PlannedPeers:
        """The same, but for a side that cannot be measured after all."""
        return PlannedPeers(tuple(side for side in self.sides if side != name), {**self.absent, name: reason})


def plan_peers(device: str, asked: Sequence[str] | None, missing: Mapping[str, str]) -> PlannedPeers:
    """Which peers to measure on a type of device. Pure.

    Args:
        device: cpu or cuda.
        asked: names that were asked for; None for those of the device.
        missing: by name, why a side cannot be had here.
    """
    wanted = _BY_DEFAULT.get(device, ()) if asked is None else tuple(dict.fromkeys(asked))
    absent = {name: missing[name] for name in wanted if name in missing}
    return PlannedPeers(tuple(name for name in wanted if name not in absent), absent)


def missing_on(device: str) -> dict[str, str]:
    """What this machine lacks for a type of device, but for what only a try can tell."""
    missing = {}
    if importlib.util.find_spec("jax") is None:
        missing[JAX_VMAP] = "JAX is not installed"
    if device != "cuda":
        missing[MPS] = "MPS is for CUDA devices"
    return missing
