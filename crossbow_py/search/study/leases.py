"""How long a worker process counts as alive: until its lease ends, or until its process is seen to have ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crossbow_py.core.settings import check

_LATE = 0.1  # of a lease: how much later it ends for others, for clocks that differ and calls that take time


@dataclass(frozen=True)
class Lease:
    """One worker's hold on all that it claimed.

    It ends by the clock, in seconds since 1970, so the hosts' clocks are to agree to within a tenth of `lease_s`. On
    the worker's own host it ends with its process: a search that was killed there goes on at once.

    Attributes:
        until: when it ends for its holder.
        lease_s: how long it was given for.
        host: where its process numbers mean something; empty where that cannot be told.
        process: number of its process.
        started: when that was started, in the kernel's ticks: numbers are used again.
    """

    until: float
    lease_s: float
    host: str
    process: int
    started: str

    @classmethod
    def taken(cls, now: float, lease_s: float) -> Lease:
        """One for this process."""
        return cls(now + lease_s, lease_s, _host(), os.getpid(), _started(os.getpid()))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Lease:
        """What `to_plain` gave. Raises UserError or TypeError for anything else."""
        lease = cls(**plain)
        check(lease)
        return lease

    def to_plain(self) -> dict[str, Any]:
        """Numbers and text by field."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """Whether its process runs on this host, in a container of its own or not."""
        return self.host.partition(" ")[0] == _host().partition(" ")[0]

    def is_over_for_others(self, now: float) -> bool:
        """Whether what its holder had may be taken."""
        return now >= self.until + _LATE * self.lease_s or self._has_ended()

    def _has_ended(self) -> bool:
        return bool(self.host) and self.host == _host() and _started(self.process) != self.started


def _host() -> str:
    """The running kernel, its space of process numbers (containers have their own), and the user: all of it is seen."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    return ""


def _started(process: int) -> str:
    """When the process was started; empty when it has ended, also where nobody has waited for it yet."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in ("Z", "X") else fields[18]
    return ""
