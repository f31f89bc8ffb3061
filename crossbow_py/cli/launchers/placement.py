"""The settings of `launcher=ray`, and the share of a cluster that each job gets. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting, shown

_FEWER_CORES = ", or launcher.cpus_per_worker"
AUTO = "auto"  # the cluster that RAY_ADDRESS names, or that runs on this machine


@dataclass(frozen=True, kw_only=True)
class RayLauncher:
    """Ray Core, which finds each job a place in a cluster: a GPU where there are any, and cores."""

    GROUP: ClassVar[str] = "launcher"
    NAME: ClassVar[str] = "ray"

    address: str | None = setting(
        None,
        "the cluster: HOST:PORT, auto (RAY_ADDRESS, or one that runs on this machine); null starts one of this machine "
        "alone",
    )
    num_workers: int | None = setting(
        None, "most runs at a time, or workers of a search; null is as many as have a place", minimum=1
    )
    cpus_per_worker: int | None = setting(
        None, "cores of each; null is a GPU's share of its machine, and without GPUs an equal share for each", minimum=1
    )
    max_restarts: int = setting(
        3, "times that a run or worker is started again, after its process or its machine was lost", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.address in (None, AUTO):
            return
        host, _, port = str(self.address).rpartition(":")
        if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
            remedy = "write the address that ray start has printed, on a machine of the cluster"
            raise UserError(f"launcher.address must be auto or HOST:PORT, got {shown(self.address)}; {remedy}.")


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster: its resources for jobs, as Ray counts them."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Share:
    """The resources of each job, and how many jobs have a place at once."""

    cpus: int
    gpus: int
    places: int

    @property
    def text(self) -> str:
        """The share in words."""
        cores = f"{self.cpus} core{'s' * (self.cpus != 1)}"
        return f"a GPU and {cores}" if self.gpus else cores


def share_of(machines: Sequence[Machine], launcher: RayLauncher, devices: Sequence[str]) -> Share:
    """Return the share of each job: a GPU, if the cluster has any and a device is not cpu, and cores.

    Without GPUs a job gets all cores of the smallest machine, or as many as give `num_workers` jobs a place.

    Args:
        machines: those of the cluster that are alive.
        launcher: the settings.
        devices: the key `device` of each job.

    Raises UserError if no job would ever have a place, or fewer than `num_workers` at once.
    """
    wants_gpus = any(device != "cpu" for device in devices)
    gpus = 1 if wants_gpus and any(machine.gpus >= 1 for machine in machines) else 0
    if not gpus and "cuda" in devices:
        raise UserError("device=cuda needs a GPU, and the Ray cluster has none; set device=cpu, or take another one.")
    able = [machine for machine in machines if machine.gpus >= gpus and machine.cpus >= 1 - gpus]
    if not able:
        raise UserError("no machine of the Ray cluster has a core for jobs; start one with ray start --num-cpus=N.")
    cpus = _cpus(able, launcher, gpus)
    share = Share(cpus, gpus, sum(_places(machine, cpus, gpus) for machine in able))
    if not share.places:
        most = max(int(machine.cpus) for machine in able)
        largest = f"the largest machine {'with a GPU ' * gpus}in the Ray cluster"
        raise UserError(f"launcher.cpus_per_worker must be at most {most}, as {largest} has, got {cpus}; lower it.")
    if launcher.num_workers is not None and launcher.num_workers > share.places:
        rule = f"launcher.num_workers must be at most {share.places}, as each takes {share.text} of the Ray cluster"
        fewer = _FEWER_CORES * (launcher.cpus_per_worker is not None)
        raise UserError(f"{rule}, got {launcher.num_workers}; lower it{fewer}.")
    return share


def _cpus(able: Sequence[Machine], launcher: RayLauncher, gpus: int) -> int:
    if launcher.cpus_per_worker is not None:
        return launcher.cpus_per_worker
    if gpus:
        return min(int(machine.cpus) // int(machine.gpus) for machine in able)
    smallest = min(int(machine.cpus) for machine in able)
    if launcher.num_workers is None:
        return smallest
    largest = max(int(machine.cpus) for machine in able)
    enough = (
        cpus
        for cpus in range(largest, 0, -1)
        if sum(_places(machine, cpus, gpus) for machine in able) >= launcher.num_workers
    )
    return next(enough, 1)


def _places(machine: Machine, cpus: int, gpus: int) -> int:
    by_cpus = int(machine.cpus) // cpus if cpus else int(machine.gpus)
    return min(by_cpus, int(machine.gpus)) if gpus else by_cpus
