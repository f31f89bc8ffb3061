"""The memory of what was found out about models and devices, so that each question is asked once a process.

A *question* is a name, such as "fused graph". Its key holds everything that the answer depends on: device, precision,
batch. Answers about a model are forgotten with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import nn

from crossbow_py.core.measured import Remembered

Answer = TypeVar("Answer")
_Known = dict[tuple[str, Hashable], Any]  # answers by question and key
_OF_THE_MACHINE: _Known = {}
_OF_MODELS: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_ASSUMED: dict[str, Any] = {}
UNKNOWN = object()


def once(question: str, key: Hashable, find: Callable[[], Answer], model: nn.Module | None = None) -> Answer:
    """Return the answer that `find` gave when the question was first asked with this key, about this model."""
    if (answer := _ASSUMED.get(question, UNKNOWN)) is not UNKNOWN:
        return cast(Answer, answer)
    known = _OF_THE_MACHINE if model is None else _OF_MODELS.setdefault(model, {})
    if (question, key) not in known:
        known[question, key] = find()
    return cast(Answer, known[question, key])


def refusal(
    question: str, key: Hashable, check: Callable[[], object], error: type[Exception], model: nn.Module | None = None
) -> str | None:
    """Return the message of the `error` that a check raises, or None if it passes; see `once`.

    Other exceptions, such as one that memory has run out, are raised, and the check is made again the next time.
    """

    def find() -> str | None:
        try:
            check()
        except error as refused:
            return str(refused)
        return None

    return once(question, key, find, model)


@contextmanager
def assumed(question: str, answer: Any) -> Iterator[None]:
    """Have a question answered in the block without finding out, for tests; with `UNKNOWN` it is found out as usual."""
    before = dict(_ASSUMED)
    _ASSUMED[question] = answer
    try:
        yield
    finally:
        _ASSUMED.clear()
        _ASSUMED.update(before)


class RememberedAnswers(Remembered):
    """The answers to a question that later processes are to know, in a small file of the user's cache.

    Args:
        question: names the file, and what `assumed` answers in its place.
        path: the file; None is the user's.
    """

    def __init__(self, question: str, path: Path | None = None) -> None:
        super().__init__(f"{question}s.json", path)
        self._question = question

    def recall(self, key: str) -> str | None:
        answer = _ASSUMED.get(self._question, UNKNOWN)
        return super().recall(key) if answer is UNKNOWN else cast("str | None", answer)

    def remember(self, key: str, choice: str) -> bool:
        return _ASSUMED.get(self._question, UNKNOWN) is UNKNOWN and super().remember(key, choice)


def forget(question: str) -> None:
    """Have a question asked anew."""
    for known in (_OF_THE_MACHINE, *_OF_MODELS.values()):
        for own in [each for each in known if each[0] == question]:
            del known[own]


def not_used(what: str, reason: str) -> str:
    """Return the message for the user that a run goes without something: one sentence, the same form for all."""
    is_one = what.startswith("Executor ")
    return f"{what} {'is' if is_one else 'are'} not used: {reason.rstrip('.')}."


def reason_in(message: str) -> str:
    """Return the reason that a message of `not_used` gives, without its full stop; "" if it is another message."""
    return message.partition(" not used: ")[2].removesuffix(".")
