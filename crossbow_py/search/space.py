"""The search space: ranges and choices, from plain mappings, and which of them exist for a trial. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, fits, setting, suggestion

if TYPE_CHECKING:  # Optuna is an extra
    from optuna.trial import BaseTrial

Value: TypeAlias = bool | int | float | str | None
Conditions: TypeAlias = tuple[tuple[str, tuple[Value, ...]], ...]
MAX_POINTS = 10_000
FIELDS = ("low", "high", "log", "step", "num", "choices", "when")
_MOST = 2**53  # of whole numbers, and of steps: samplers compute in 64-bit floats
_PLAIN = "numbers, text, true, false or null"
_OFF_STEP = 1e-8  # of a step: samplers multiply in floats
_DIGITS = 12  # of a grid point, so that 0.1 + 2 · 0.1 is 0.3

_NEAR = math.sqrt(2)  # a factor between sizes of models, of which the smaller is padded
_LONGEST_SHOWN = 80
_EXAMPLE = "for example optimizer.learning_rate: {low: 0.001, high: 0.1, log: true}"


@dataclass(frozen=True)
class Space:
    """The parameters of a search, each after those that its conditions name; otherwise as they were written."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def from_mapping(cls, plain: Any) -> Space:
        """Parse YAML values: dotted configuration keys, each with a range or choices, and optional conditions.

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
        _check_conditions({parameter.key: parameter for parameter in parameters})
        space = cls(_in_order(parameters))
        space._requirements()
        return space

    def suggest(self, trial: BaseTrial) -> dict[str, Value]:
        """Return the parameters of one trial, by key, asked for in the order of the space."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.exists(values):
                values[parameter.key] = parameter.suggest(trial)
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
        """Return a trial's values as a configuration takes them."""
        own = {parameter.key: parameter for parameter in self.parameters}
        return {key: own[key].meant(value) if key in own else value for key, value in params.items()}

    def wider(self, params: Mapping[str, Value], prefix: str) -> list[dict[str, Value]]:
        """Return parameters in which those that begin with `prefix` have their `wider` values: all, then each alone.

        For ranks of adapters, which are small beside their base, that is the greatest.
        """
        own = {each.key: each for each in self.parameters if each.key.startswith(prefix)}
        near = {f"{prefix}lora.rank": math.inf}
        raised = {key: own[key].wider(value, near.get(key, _NEAR)) for key, value in params.items() if key in own}
        raised = {key: value for key, value in raised.items() if value != params[key]}
        found = [{**params, **raised}] if raised else []
        return found + ([{**params, key: value} for key, value in raised.items()] if len(raised) > 1 else [])

    def features(self, params: Mapping[str, Any]) -> tuple[float, ...]:
        """Return parameters as numbers from 0 to 1, by their positions in their ranges; 0.5 without one."""
        return tuple(own.position(params[own.key]) if own.key in params else 0.5 for own in self.parameters)

    def grid(self) -> list[dict[str, Value]]:
        """Return every combination once, the last parameter changing fastest.

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
        """Return a few assignments that together set every parameter to both its ends, or to each of its choices.

        For checking a space against a configuration before any trial is started.
        """
        required = self._requirements()
        found: list[dict[str, Value]] = []
        for parameter in self.parameters:
            for end in parameter.ends():
                if not any(parameter.key in corner and contains((end,), corner[parameter.key]) for corner in found):
                    found.append(self._corner({**required[parameter.key], parameter.key: (end,)}, len(found)))
        return found

    def to_plain(self) -> list[dict[str, Any]]:
        """Plain values, to compare with the space of a resumed search; their order counts, as values follow from it."""
        return [parameter.to_plain() for parameter in self.parameters]

    def _corner(self, fixed: Mapping[str, Sequence[Value]], index: int) -> dict[str, Value]:
        """Return an assignment with what is `fixed`; of what the rest may be, others at each index."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.exists(values):
                allowed = fixed.get(parameter.key, parameter.ends())
                values[parameter.key] = allowed[index % len(allowed)]
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
                    f"space: {parameter.key} never exists: its conditions want several values of {never[0]}; drop one."
                )
            required[parameter.key] = own
        return required


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def laid_over(plain: Any, key: str, entry: Any) -> Any:
    """Return a space, as parsed YAML, with an entry laid over its `key`: a parameter, a field of one, or a group.

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


def _check_conditions(known: Mapping[str, Parameter]) -> None:
    for own, parameter in known.items():
        for key, allowed in parameter.when:
            if key not in known:
                raise UserError(f"space: {own}.when names {key!r}, which is not searched{suggestion(key, known)}")
            for value in allowed:
                if not known[key].can_be(value):
                    raise UserError(
                        f"space: {own}.when wants {key} to be {value!r}, and it is {known[key].describe()}; "
                        "name one of its choices or whole numbers."
                    )


def _in_order(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return each after those its conditions name. Raises UserError for conditions in a circle."""
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
    """Return the keys of a circle; every one of `parameters` waits for another of them."""
    waits_for = {parameter.key: {key for key, _ in parameter.when} for parameter in parameters}
    path = [parameters[0].key]
    while path[-1] not in path[:-1]:
        path.append(min(waits_for[path[-1]] & waits_for.keys()))
    return " when ".join(path[path.index(path[-1]) :])


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A configuration key with what it may be: `choices`, or a range from `low` to `high`, both included.

    Attributes:
        key: dotted key of the configuration.
        lists: choices that are lists, as the text that stands for them: samplers know no others.
        when: keys of other parameters with values, one of which each must have for this parameter to exist.
        integer: whether the range, and its step where there is one, is of whole numbers.
    """

    key: str
    low: float | None = setting(None, "lower end of the range")
    high: float | None = setting(None, "upper end of the range")
    log: bool = setting(False, "whether values are spread evenly in their logarithm")
    step: float | None = setting(None, "distance of the values", above=0)
    num: int | None = setting(None, "how many values a grid takes from the range", minimum=2, maximum=MAX_POINTS)
    choices: tuple[Value, ...] | None = setting(None, "values in place of a range")
    when: Conditions = ()
    lists: tuple[str, ...] = ()
    integer: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        numbers = [number for number in (self.low, self.high, self.step) if number is not None]
        whole = all(isinstance(number, int) for number in numbers) and self.choices is None
        try:
            check(self)
        except UserError as error:
            raise UserError(f"space: {self.key}.{error}") from None
        if self.choices is not None:
            self._check_choices(self.choices)
            return
        if whole:
            object.__setattr__(self, "integer", True)
            for name in ("low", "high", "step"):  # `check` has made them floats
                number = getattr(self, name)
                object.__setattr__(self, name, None if number is None else int(number))
        self._check_range()

    def exists(self, values: Mapping[str, Value]) -> bool:
        """Return whether its conditions hold for these values of the parameters before it."""
        return all(key in values and contains(allowed, values[key]) for key, allowed in self.when)

    def can_be(self, value: Value) -> bool:
        """Return whether a condition may name the value: a choice, or a whole number of the range, never a fraction."""
        if self.choices is not None:
            return contains(self.choices, value)
        if not self.integer or isinstance(value, bool) or not isinstance(value, int):
            return False
        low, high, step = self._whole()
        return low <= value <= high and (value - low) % step == 0

    def takes(self, value: Value) -> bool:
        """Return whether a trial may have the value."""
        if self.choices is not None or self.integer:
            return self.can_be(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        low, high = self._ends()
        steps = (value - low) / (self.step or 1)
        return low <= value <= high and (self.step is None or abs(steps - round(steps)) < _OFF_STEP)

    def suggest(self, trial: BaseTrial) -> Value:
        """Return what an Optuna trial suggests under the parameter's key."""
        if self.choices is not None:
            value: Value = trial.suggest_categorical(self.key, self.choices)
            return value
        if self.integer:
            low, high, step = self._whole()
            return trial.suggest_int(self.key, low, high, step=step, log=self.log)
        return trial.suggest_float(self.key, *self._ends(), step=self.step, log=self.log)

    def meant(self, value: Value) -> Any:
        """Return what a configuration is given for a value: the list that a text stands for, else the value itself."""
        return json.loads(value) if isinstance(value, str) and value in self.lists else value

    def wider(self, value: Value, near: float = _NEAR) -> Value:
        """Return a value from `value` to less than `near` times it: the same for all values that are near each other.

        They are the greatest value, the greatest below it by `near`, and so on. What is no whole number is returned as
        it is, and so is a choice among others than whole numbers.
        """
        if type(value) is not int or any(type(each) is not int for each in self.choices or ()):
            return value

        def greatest(limit: float) -> int:
            if self.choices is not None:
                return max(each for each in self.choices if isinstance(each, int) and each <= limit)
            low, _, step = self._whole()
            return low + (math.floor(limit) - low) // step * step

        found = greatest(max(each for each in self.ends() if isinstance(each, int)))
        while found / near >= value:
            found = greatest(found / near)
        return found

    def ends(self) -> tuple[Value, ...]:
        """Both ends of the range, or every choice."""
        return self._ends() if self.choices is None else self.choices

    def position(self, value: Value) -> float:
        """Return the position of a value, from 0 (the lower end, or the first choice) to 1."""
        if self.choices is not None:
            index = next(n for n, choice in enumerate(self.choices) if contains((choice,), value))
            return index / max(1, len(self.choices) - 1)
        assert isinstance(value, int | float), "a range is of numbers"
        low, high = self._ends()
        if self.log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def num_points(self) -> int:
        """Return an upper bound of its points in a grid. Raises UserError if nothing says which points."""
        if self.choices is not None:
            return len(self.choices)
        if self.num is not None:
            return self.num
        step = self._grid_step()
        if step is None:
            raise UserError(f"space: {self.key} must have num, step or choices for a grid, got none of them; set num.")
        low, high = self._ends()
        return int((_exactly(high) - _exactly(low)) / _exactly(step)) + 1

    def points(self) -> tuple[Value, ...]:
        """Return its points in a grid, ascending, or as its choices are written."""
        count = self.num_points()
        if self.choices is not None:
            return self.choices
        if self.num is None:
            low, step = _exactly(self._ends()[0]), _exactly(self._grid_step() or 1)
            exact = [low + index * step for index in range(count)]
            return tuple(int(point) if self.integer else float(point) for point in exact)
        return tuple(dict.fromkeys(round(point) if self.integer else point for point in self._spread(count)))

    def to_plain(self) -> dict[str, Any]:
        """Return its key and what was set, as plain values."""
        plain = {name: getattr(self, name) for name in ("key", *FIELDS[:-1], "integer")}
        plain["when"] = {key: list(allowed) for key, allowed in self.when} or None
        plain["choices"] = None if self.choices is None else list(self.choices)
        return {name: value for name, value in plain.items() if value is not None and value is not False}

    def describe(self) -> str:
        """Return what it may be, for a message."""
        if self.choices is not None:
            return f"one of {', '.join(map(repr, self.choices))}"
        steps = f" in steps of {self.step}" if self.step is not None else ""
        return f"a {'whole ' if self.integer else ''}number from {self.low} to {self.high}{steps}"

    def _spread(self, count: int) -> list[float]:
        low, high = self._ends()
        shares = [index / (count - 1) for index in range(1, count - 1)]
        if self.log:
            between = [math.exp(math.log(low) + share * (math.log(high) - math.log(low))) for share in shares]
        else:
            between = [low + share * (high - low) for share in shares]
        rounded = (float(f"{point:.{_DIGITS}g}") for point in between)
        return [low, *(min(max(point, low), high) for point in rounded), high]

    def _grid_step(self) -> float | None:
        # Whole numbers have a step by themselves, but not where they are spread by their logarithm.
        return 1 if self.step is None and self.integer and not self.log else self.step

    def _ends(self) -> tuple[float, float]:
        assert self.low is not None, f"{self.key} is no range"
        assert self.high is not None, f"{self.key} is no range"
        return self.low, self.high

    def _whole(self) -> tuple[int, int, int]:
        low, high = self._ends()
        return int(low), int(high), int(self.step or 1)

    def _check_choices(self, choices: tuple[Value, ...]) -> None:
        of_ranges = [name for name in ("low", "high", "step", "num") if getattr(self, name) is not None]
        of_ranges += ["log"] if self.log else []
        if of_ranges:
            raise self._refuse(f"must have choices or a range, got choices and {', '.join(of_ranges)}; leave one out")
        if not choices:
            raise self._refuse("must have choices, got an empty list; name the values to try")
        for index, choice in enumerate(choices):
            if choice in choices[:index]:  # 1, 1.0 and true are equal: no sampler could tell them apart
                first = choices[choices.index(choice)]
                raise self._refuse(f"must have choices that differ, got {first!r} and {choice!r}; leave one out")

    def _check_range(self) -> None:
        if self.low is None or self.high is None:
            raise self._refuse(
                f"must have low and high, or choices, got low {self.low} and high {self.high}; set both ends"
            )
        if self.low >= self.high:
            raise self._refuse(
                f"has an empty range: low must be less than high, got low {self.low} and high {self.high}; raise high"
            )
        if self.log and self.low <= 0:
            raise self._refuse(f"must have low greater than 0 where log is true, got {self.low}; raise it or drop log")
        if self.step is not None:
            self._check_step(self.low, self.high, self.step)

    def _check_step(self, low: float, high: float, step: float) -> None:
        other = "log" if self.log else "num" if self.num is not None else None
        if other:
            raise self._refuse(f"must have step or {other}, got both; leave one out")
        whole, rest = divmod(_exactly(high) - _exactly(low), _exactly(step))
        if whole > _MOST:
            raise self._refuse(f"must have at most {_MOST} steps, got steps of {step} from {low} to {high}; raise step")
        if rest:
            nearest = _exactly(low) + max(whole, 1) * _exactly(step)
            raise self._refuse(
                f"must have a whole number of steps, got steps of {step} from {low} to {high}; "
                f"set high={int(nearest) if self.integer else float(nearest)}"
            )

    def _refuse(self, text: str) -> UserError:
        return UserError(f"space: {self.key} {text}.")


def parse_parameter(key: str, plain: Any) -> Parameter:
    """Parse a parameter from YAML values: a mapping with the fields of `Parameter`, or a list of choices.

    Raises:
        UserError: names the key, the rule and what was received.
    """
    _check_sizes(key, plain)
    if isinstance(plain, list | tuple):
        plain = {"choices": plain}
    if not isinstance(plain, Mapping):
        raise UserError(
            f"space: {key} must be {{low, high}}, {{choices}} or a list of choices, got {plain!r}; write a list."
        )
    for name in plain:
        if name not in FIELDS:
            raise UserError(f"space: {key} has no field {name!r}{suggestion(str(name), FIELDS)}")
    choices = plain.get("choices")
    lists: tuple[str, ...] = ()
    if isinstance(choices, list | tuple):
        lists = tuple(json.dumps(each) for each in choices if isinstance(each, list | tuple) and _are_plain(each))
        choices = [
            json.dumps(each) if isinstance(each, list | tuple) and _are_plain(each) else each for each in choices
        ]
        plain = {**plain, "choices": choices}
    if choices is not None and not _are_plain(choices):
        raise UserError(
            f"space: {key}.choices must be a list of {_PLAIN}, or lists of them, got {choices!r}; write [a, b]."
        )
    return Parameter(key=key, lists=lists, **{**plain, "when": _conditions(key, plain.get("when"))})


def _check_sizes(key: str, plain: Any) -> None:
    if isinstance(plain, Mapping | list | tuple):
        for entry in plain.values() if isinstance(plain, Mapping) else plain:
            _check_sizes(key, entry)
    elif isinstance(plain, int) and abs(plain) > _MOST:
        raise UserError(f"space: {key} must have whole numbers of at most 53 bits, got a larger one; take a smaller.")


def _conditions(key: str, plain: Any) -> Conditions:
    if plain is None:
        return ()
    if not isinstance(plain, Mapping) or not plain:
        raise UserError(
            f"space: {key}.when must be a mapping from another key to values, got {plain!r}; write {{KEY: [VALUE]}}."
        )
    conditions = [(other, tuple(v) if isinstance(v, list | tuple) else (v,)) for other, v in plain.items()]
    for other, allowed in conditions:
        if not isinstance(other, str) or not allowed or not _are_plain(allowed):
            raise UserError(
                f"space: {key}.when must have a key with {_PLAIN}, one or a list of them, "
                f"got {{{other!r}: {plain[other]!r}}}; write when: {{KEY: [VALUE]}}."
            )
    return tuple(conditions)


def _are_plain(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(fits(value, Value) for value in values)


def contains(allowed: Sequence[Value], value: Value) -> bool:
    """Return whether the value is one of them; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _exactly(number: float) -> Fraction:
    """Return the number as it is written: 0.1 is a tenth."""
    return Fraction(str(number))
