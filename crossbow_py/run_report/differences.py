"""In what configurations differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossbow_py.core.settings import written

# What says where a run was written, and not what it was.
_OF_THE_FOLDER = frozenset({"output_dir", "resume", "data.root", "data.cache_dir"})


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By key, what every run has, of all keys that are not alike; `–` where a run has no such key.

    A key that only the rules or models of some runs have is there as well.
    """
    keys = dict.fromkeys(key for config in configs for key in config if key not in _OF_THE_FOLDER)
    found = {key: [written(config[key]) if key in config else "–" for config in configs] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
