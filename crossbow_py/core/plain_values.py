"""Plain nested values, as in a recorded configuration: compared, filled up, and with keys left out. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from crossbow_py.core.settings import written

# Keys that say where a run was written, not what was trained.
_PATHS = frozenset({"output_dir", "resume", "data.root", "data.cache_dir"})


def differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """Return `key: saved → current` for every leaf at which two plain nested values differ.

    Where the `name` of a group's choice differs, only the name is listed: settings of different choices do not compare.
    """
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        renamed = saved.get("name") != current.get("name")
        keys = ["name"] if renamed else sorted(set(saved) | set(current), key=str)
        nested = (differences(saved.get(k), current.get(k), f"{path}.{k}" if path else str(k)) for k in keys)
        return [line for lines in nested for line in lines]
    return [] if saved == current else [f"{path}: {written(saved)} → {written(current)}"]


def filled(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old plain values filled up with the new ones' defaults, so that keys newer than `old` do not differ.

    Settings of a group whose `name` differs are left as they are.
    """
    if old.get("name") != new.get("name"):
        return dict(old)
    shared = [key for key, value in new.items() if isinstance(value, Mapping) and isinstance(old.get(key), Mapping)]
    return {**new, **old, **{key: filled(old[key], new[key]) for key in shared}}


def without(plain: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values without the dotted `keys`."""
    return {
        key: without(value, keys, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in plain.items()
        if f"{prefix}{key}" not in keys
    }


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return, for every key on which runs differ, the value of each run; `–` for a run without that key."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in _PATHS)
    found = {key: [written(config[key]) if key in config else "–" for config in configs] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def told_apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `key=value, ...` for each configuration: in what it differs from the others.

    Keys that follow from the choice of their group, such as the settings of an averaging rule that one run alone has,
    are left out.
    """
    found = differing(configs)

    def follows(key: str) -> bool:
        group = found.get(key.rpartition(".")[0], [])
        return bool(group) and len(set(zip(group, found[key], strict=True))) == len(set(group))

    told = {key: values for key, values in found.items() if not follows(key)}
    return [
        ", ".join(f"{key}={values[place]}" for key, values in told.items() if values[place] != "–")
        for place in range(len(configs))
    ]
