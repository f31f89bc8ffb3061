"""The search space: what is searched, from plain mappings; which parameters exist follows from others' values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import suggestion
from crossbow_py.search.parameter import FIELDS, MAX_POINTS, Parameter, Suggester, Value, contains, parse_parameter

_LONGEST_SHOWN = 80
_EXAMPLE = "for example optimizer.learning_rate: {low: 0.001, high: 0.1, log: true}"


@dataclass(frozen=True)
class Space:
    """The parameters of a search, each after those that its conditions name; otherwise as they were written."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def from_mapping(cls, plain: Any) -> Space:
        """From parsed YAML: dotted configuration keys, each with a range or choices, and conditions where wanted.

            optimizer.learning_rate: {low: 0.001, high: 0.5, log: true}
            optimizer: [sgd, adam]                                        # short for {choices: [sgd, adam]}
            optimizer.momentum: {low: 0, high: 0.9, step: 0.3, when: {optimizer: sgd}}

        Keys may be nested too, `optimizer: {momentum: {low: 0, high: 0.9}}`; what is written later is laid over
        what was there. A value alone is a choice of one.

        Raises:
            UserError: names the key, the rule, what was received and what to do.
        """
        if not isinstance(plain, Mapping) or not plain:
            raise UserError(f"space must be a mapping with at least one key to search, got {plain!r}; {_EXAMPLE}.")
        plain = _flattened(plain)
        parameters = [parse_parameter(key, entry) for key, entry in plain.items()]
        for parameter in parameters:
            _check_conditions(parameter, {each.key: each for each in parameters})
        space = cls(_in_order(parameters))
        space._requirements()
        return space

    def suggest(self, suggester: Suggester) -> dict[str, Value]:
        """The parameters of one trial, by key, asked for in the order of the space."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.exists(values):
                values[parameter.key] = parameter.suggest(suggester)
        return values

    def mistake_in(self, params: Mapping[str, Any]) -> str:
        """Say which of these parameters no trial of this space has, with its value; empty where there is none."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.exists(values):
                if parameter.key not in params:
                    return f"no {parameter.key}"
                value = values[parameter.key] = params[parameter.key]
                if not parameter.takes(value):
                    return f"{parameter.key}={_short(value)}, and it is {parameter.describe()}"
        other = next((key for key in params if key not in values), None)
        return "" if other is None else f"{other}={_short(params[other])}, which is not searched there"

    def meant(self, params: Mapping[str, Value]) -> dict[str, Any]:
        """A trial's values as a configuration takes them."""
        own = {parameter.key: parameter for parameter in self.parameters}
        return {key: own[key].meant(value) if key in own else value for key, value in params.items()}

    def grid(self) -> list[dict[str, Value]]:
        """Every combination once, the last parameter changing fastest.

        Raises:
            UserError: a range says neither `step` nor `num`, or there are more than 10,000 combinations.
        """
        combinations: list[dict[str, Value]] = [{}]
        for parameter in self.parameters:
            exists = [parameter.exists(values) for values in combinations]
            if not any(exists):
                continue
            count = sum(parameter.num_points() if there else 1 for there in exists)
            if count > MAX_POINTS:
                raise UserError(
                    f"space must have at most {MAX_POINTS} combinations for a grid, got {count} or more with "
                    f"{parameter.key}; take fewer values, or another sampler."
                )
            points = parameter.points()
            combinations = [
                {**values, parameter.key: point} if there else values
                for values, there in zip(combinations, exists, strict=True)
                for point in (points if there else points[:1])
            ]
        return combinations

    def corners(self) -> list[dict[str, Value]]:
        """A few assignments that together set every parameter to both its ends, or to each of its choices.

        For checking a space against a configuration before any trial is started.
        """
        required = self._requirements()
        left = {parameter.key: list(parameter.ends()) for parameter in self.parameters}
        found = []
        while any(left.values()):
            wanted = next(key for key, values in left.items() if values)
            found.append(self._corner({**required[wanted], wanted: tuple(left[wanted])}, left))
        return found

    def to_plain(self) -> list[dict[str, Any]]:
        """Plain values, to compare with the space of a resumed search; their order counts, as values follow from it."""
        return [parameter.to_plain() for parameter in self.parameters]

    def _corner(self, fixed: Mapping[str, Sequence[Value]], left: Mapping[str, list[Value]]) -> dict[str, Value]:
        """One assignment with what is `fixed` and, for the rest, values that are `left`, which it takes from there."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.exists(values):
                allowed = fixed.get(parameter.key, parameter.ends())
                pending = [value for value in left[parameter.key] if contains(allowed, value)]
                values[parameter.key] = chosen = (pending or allowed)[0]
                if pending:
                    left[parameter.key].remove(chosen)
        return values

    def _requirements(self) -> dict[str, dict[str, tuple[Value, ...]]]:
        """Per parameter, the values that others must have for it to exist, its conditions' own conditions included.

        Raises UserError for a parameter that never exists.
        """
        required: dict[str, dict[str, tuple[Value, ...]]] = {}
        for parameter in self.parameters:
            own: dict[str, tuple[Value, ...]] = {}
            for condition in (dict(parameter.when), *(required[key] for key, _ in parameter.when)):
                for key, allowed in condition.items():
                    own[key] = tuple(value for value in own.get(key, allowed) if contains(allowed, value))
            never = [key for key, allowed in own.items() if not allowed]
            if never:
                raise UserError(
                    f"space: {parameter.key} never exists, as its conditions want different values of "
                    f"{never[0]} at once; change one of them."
                )
            required[parameter.key] = own
        return required


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def laid_over(plain: Any, key: str, entry: Any) -> Any:
    """A space, as parsed YAML, with an entry laid over what is there of `key`: a parameter, a field of one, or a group.

    Whatever is no mapping stays what it is, for `Space.from_mapping` to refuse. Raises UserError as that does.
    """
    if not isinstance(plain, Mapping):
        return plain
    for name in reversed(key.split(".")):
        entry = {name: entry}
    laid = _flattened(plain)
    for own, value in _flattened(entry).items():
        laid[own] = _merged(laid.get(own), value)
    return laid


def _flattened(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One level of dotted keys. A mapping is a parameter when it has a field of one, and else holds parameters."""
    flat: dict[str, Any] = {}
    for name, entry in plain.items():
        if not isinstance(name, str) or not name:
            raise UserError(
                f"space must have dotted configuration keys, got {name!r}; write one such as optimizer.learning_rate."
            )
        key = f"{prefix}{name}"
        if isinstance(entry, Mapping) and entry and not any(field in entry for field in FIELDS):
            found = _flattened(entry, f"{key}.")
        else:
            found = {key: entry if isinstance(entry, Mapping | list | tuple) else [entry]}
        for own, value in found.items():
            flat[own] = _merged(flat.get(own), value)
    return flat


def _merged(earlier: Any, later: Any) -> Any:
    return {**earlier, **later} if isinstance(earlier, Mapping) and isinstance(later, Mapping) else later


def _check_conditions(parameter: Parameter, known: Mapping[str, Parameter]) -> None:
    for key, allowed in parameter.when:
        if key not in known:
            raise UserError(f"space: {parameter.key}.when names {key!r}, which is not searched{suggestion(key, known)}")
        for value in allowed:
            if not known[key].can_be(value):
                raise UserError(
                    f"space: {parameter.key}.when wants {key} to be {value!r}, and it is "
                    f"{known[key].describe()}; name one of its choices or whole numbers."
                )


def _in_order(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Each after those its conditions name. Raises UserError for conditions in a circle."""
    ordered: dict[str, Parameter] = {}
    left = list(parameters)
    while left:
        for parameter in left:
            if all(key in ordered for key, _ in parameter.when):
                ordered[parameter.key] = parameter
        after = [parameter for parameter in left if parameter.key not in ordered]
        if len(after) == len(left):
            raise UserError(f"space: conditions go in a circle, {_circle(after)}; take one of them away.")
        left = after
    return tuple(ordered.values())


def _circle(parameters: Sequence[Parameter]) -> str:
    """The keys of a circle; every one of `parameters` waits for another of them."""
    waits_for = {parameter.key: {key for key, _ in parameter.when} for parameter in parameters}
    path = [parameters[0].key]
    while path[-1] not in path[:-1]:
        path.append(min(waits_for[path[-1]] & waits_for.keys()))
    return " when ".join(path[path.index(path[-1]) :])
