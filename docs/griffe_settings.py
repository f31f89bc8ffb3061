"""For the reference: settings classes with the meaning and the default of every field, as `setting(...)` has them.

An extension of griffe, which reads source and so knows `setting(0.1, "what it is", minimum=0)` as an expression alone.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import griffe

from crossbow_py.core.settings import allowed


class Settings(griffe.Extension):
    """Writes defaults into signatures, and an `Args` section into docstrings that have none."""

    def on_class_members(
        self, *, node: ast.AST | griffe.ObjectNode, cls: griffe.Class, agent: Any, **kwargs: Any
    ) -> None:
        """Called when the members of a class are known."""
        for member in cls.members.values():
            if member.docstring is not None and member.docstring.value.startswith("See "):
                member.docstring = None  # overrides what the base says; without words it is not shown
        if cls.docstring is not None:
            cls.docstring.value = cls.docstring.value.replace("::\n", ":\n")  # equations are indented blocks here too
        if not _has_settings(cls):
            return
        owner = griffe.dynamic_import(cls.path)
        fields = [field for field in dataclasses.fields(owner) if "help" in field.metadata]
        for field in fields:
            member = cls.members.get(field.name)
            if isinstance(member, griffe.Attribute):
                member.value = repr(_default(field))
        if cls.docstring is not None and "Args:" not in cls.docstring.value:
            lines = [f"    {field.name}: {_words(owner, field)}" for field in fields]
            cls.docstring.value = "\n".join([cls.docstring.value.rstrip(), "", "Args:", *lines])


def _has_settings(cls: griffe.Class) -> bool:
    """Whether a class is a dataclass some of whose fields, inherited ones too, are settings."""
    if not any("dataclass" in str(decorator.value) for decorator in cls.decorators):
        return False
    return any("help" in field.metadata for field in dataclasses.fields(griffe.dynamic_import(cls.path)))


def _words(owner: type[Any], field: dataclasses.Field[Any]) -> str:
    """What it means and what it may be, in the words of Python."""
    text = f"{field.metadata['help']}; {allowed(owner, field.name)}."
    for plain, python in ((r"\bnull\b", "None"), (r"\btrue or false\b", "True or False")):
        text = re.sub(plain, python, text)
    return text


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
