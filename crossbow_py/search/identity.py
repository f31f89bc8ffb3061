"""The identity of a search: the values that all of its workers agree on, whenever it goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from crossbow_py.core.plain_values import differences, filled, without
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.checkpoints.checkpoint import upgraded as upgraded_settings
from crossbow_py.train.config import TrainConfig, config_to_mapping
from crossbow_py.train.run_folder.folder import MAY_CHANGE as RUN_MAY_CHANGE

_MAY_CHANGE = frozenset(
    RUN_MAY_CHANGE - {"max_epochs", "metrics"} | {"lease_s", "max_pack_size", "packing", "storage", "study"}
)
# Searches of earlier versions have every key of a run, those that mean nothing to a search too.
_OF_RUNS_ALONE = frozenset(
    {field.name for field in dataclasses.fields(TrainConfig)}
    - {field.name for field in dataclasses.fields(SearchConfig)}
)


def identity(config: SearchConfig) -> dict[str, Any]:
    """Return the plain values that are equal for all workers of a search, whenever it goes on.

    That is all but stops, logging, paths and packing.
    """
    return without(config_to_mapping(config), _MAY_CHANGE)


def defaults_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the keys of an identity; those of a group are the defaults of the option chosen there."""
    found = {key: value for key, value in _defaults(SearchConfig).items() if key in identity}
    for group, registry in SearchConfig.GROUPS.items():
        if isinstance(own := identity.get(group), Mapping):
            found[group] = {"name": own["name"], **_defaults(registry[own["name"]])}
    return found


def upgraded(theirs: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a search of another version with the keys of this one.

    Keys that did not exist when it began have their defaults. Its space stays as it was.
    """
    found = filled(upgraded_settings(without(theirs, _OF_RUNS_ALONE), defaults), defaults)
    return {**found, **({"space": theirs["space"]} if "space" in theirs else {})}


def changes(recorded: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return `key: recorded → ours` for everything that makes a recorded configuration another search than `ours`."""
    return differences(upgraded(without(recorded, _MAY_CHANGE), defaults_of(ours)), ours)


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of the fields that have one, as plain values."""
    fields = dataclasses.fields(kind)
    given = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    given |= {each.name: each.default_factory() for each in fields if each.default_factory is not dataclasses.MISSING}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
