"""The check before training that all ranks have the same code, libraries and configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import versions
from crossbow_py.core.plain_values import differences
from crossbow_py.core.version import PACKAGE
from crossbow_py.distributed.ranks import Ranks

# Paths may differ between hosts, and some keys are read by the first rank only.
_MAY_DIFFER = frozenset({"output_dir", "resume", "data.root", "data.folder", "data.cache_dir", "init_from"})
_SHOWN = 4


def check_ranks_agree(config: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UserError on all ranks, with the differences, if one has other code or settings than the first.

    `config` holds plain values. All ranks call this together.
    """
    if ranks.num_ranks == 1:
        return
    facts = {"code": _code(), "config": _compared(config)}
    every = [json.loads(text) for text in ranks.gather_texts(json.dumps(facts))]
    for rank, other in enumerate(every):
        if found := differences(every[0], other):
            shown = "; ".join(found[:_SHOWN]) + ("; ..." if len(found) > _SHOWN else "")
            remedy = "start all ranks with the same version of crossbow_py and of torch, and the same command"
            error = UserError(f"rank {rank} is not like rank 0 ({shown}); {remedy}.")
            ranks.raise_any(error if ranks.is_first else None)


def _code() -> dict[str, str]:
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c")]):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    found = versions()
    return {"crossbow_py": found["crossbow_py"], "source": digest.hexdigest()[:12], **found}


def _compared(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: _compared(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in _MAY_DIFFER
    }
