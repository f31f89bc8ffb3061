"""--help and --list say everything there is."""

from __future__ import annotations

import dataclasses

from crossbow_py.config import APPENDED_GROUPS, REGISTRIES, TrainConfig, group_options
from crossbow_py.help_text import help_text, list_text


def test_help_text_has_every_key_of_every_option_once_for_each_meaning() -> None:
    lines = help_text().splitlines()
    for field in dataclasses.fields(TrainConfig):
        if dataclasses.is_dataclass(field.default):
            keys = [f"  {field.name}.{nested.name}=" for nested in dataclasses.fields(field.default)]
        else:
            keys = [f"{'' if field.name in REGISTRIES else '  '}{field.name}="]
        for key in keys:
            assert sum(line.startswith(key) for line in lines) == 1
    for group, registry in REGISTRIES.items():
        for settings in registry.values():
            for field in dataclasses.fields(settings):
                described = [line for line in lines if line.startswith(f"  {group}.{field.name}=")]
                assert any(field.metadata["help"] in line for line in described)


def test_help_text_of_a_key_whose_default_differs_names_the_options_that_have_it() -> None:
    rates = [line for line in help_text().splitlines() if line.startswith("  optimizer.learning_rate=")]
    assert [(line.split()[0].split("=")[1], line.split()[-1]) for line in rates] == [
        ("0.1", "(sgd)"),
        ("0.001", "(adamw)"),
    ]


def test_list_text_says_what_every_option_is() -> None:
    blocks = dict(block.split("=\n", 1) for block in list_text().split("\n\n"))
    assert list(blocks) == [*(f"+{group}" for group in APPENDED_GROUPS), *REGISTRIES]
    for group, block in blocks.items():
        described = dict(line.split(maxsplit=1) for line in block.splitlines())
        assert list(described) == sorted(group_options(group.removeprefix("+")))
