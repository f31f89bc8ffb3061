"""Settings of a run over several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.core.settings import check, setting


@dataclass(frozen=True)
class DistributedSettings:
    """Settings that are read only if torchrun, or another launcher, has started several ranks."""

    GROUP: ClassVar[str] = "distributed"

    timeout_s: float = setting(
        300.0, "a rank that keeps the others waiting that long hangs; they end, and say so", above=0
    )
    check_every_rounds: int = setting(
        1000, "compare checksums of the central average model over ranks every that many rounds", minimum=1
    )

    def __post_init__(self) -> None:
        check(self)
