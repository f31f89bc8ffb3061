"""How much of the processor others took while a window was measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from crossbow_py.core.host import usable_core_ids

_STAT = Path("/proc/stat")
# Columns of a cpuN line: user nice system idle iowait irq softirq steal; guest times are contained in user and nice.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class LoadSnapshot:
    """Seconds so far: wall clock, this process's processor time, and busy time of the usable cores (None: unknown).

    Time the hypervisor took away (steal) counts as busy: to this process it is the same as a foreign one.
    """

    wall_s: float
    own_s: float
    busy_s: float | None
    cores: int

    @classmethod
    def take(cls) -> LoadSnapshot:
        """Now."""
        cores = usable_core_ids()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        busy = busy_ticks(_STAT.read_text(), cores) if _STAT.exists() else None
        return cls(
            wall_s=time.perf_counter(),
            own_s=time.process_time(),
            busy_s=None if busy is None else busy / ticks_per_s,
            cores=len(cores),
        )


def busy_ticks(stat: str, cores: set[int]) -> int:
    """Busy clock ticks of `cores`, summed, from the text of /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *columns = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            total += sum(int(columns[index]) for index in _BUSY_COLUMNS)
    return total


def foreign_share(before: LoadSnapshot, after: LoadSnapshot) -> float | None:
    """Share (0 to 1) of the usable cores that others kept busy between two snapshots.

    None when the kernel does not tell: no /proc/stat, or one that does not even count this process's own time.
    """
    if before.busy_s is None or after.busy_s is None:
        return None
    own, busy = after.own_s - before.own_s, after.busy_s - before.busy_s
    if busy < own / 2:
        return None
    return max(0.0, busy - own) / (after.cores * (after.wall_s - before.wall_s))
