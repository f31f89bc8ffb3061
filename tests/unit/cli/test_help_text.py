"""--help and --list say everything there is."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import yaml

from crossbow_py.cli.configuration import APPENDED_GROUPS, CommandConfig, compose, group_options
from crossbow_py.cli.help_text import help_text, list_text
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.predict.config import PredictConfig
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.space import Space
from crossbow_py.train.config import TrainConfig


def test_help_text_has_every_key_once_with_all_of_its_meanings() -> None:
    lines = help_text(TrainConfig).splitlines()
    for field in dataclasses.fields(TrainConfig):
        if dataclasses.is_dataclass(field.default):
            keys = [f"  {field.name}.{nested.name}=" for nested in dataclasses.fields(field.default)]
        else:
            keys = [f"{'' if field.name in TrainConfig.GROUPS else '  '}{field.name}="]
        for key in keys:
            assert sum(line.startswith(key) for line in lines) == 1
    for group, registry in TrainConfig.GROUPS.items():
        for settings in registry.values():
            for field in dataclasses.fields(settings):
                (described,) = [line for line in lines if line.startswith(f"  {group}.{field.name}=")]
                assert field.metadata["help"] in described


def test_help_text_of_a_key_whose_default_differs_names_the_options_that_have_it() -> None:
    lines = [line.split(maxsplit=1) for line in help_text(TrainConfig).splitlines()]
    said = {words[0]: words[1] for words in lines if len(words) > 1}
    assert said["optimizer.learning_rate=0.1"].endswith(" (sgd; adamw: 0.001; muon: 0.02; torch: 0.01)")
    assert "(sgd); λ, decoupled weight decay (adamw: 0.01; muon); " in said["optimizer.weight_decay=0.0"]


@pytest.mark.parametrize("kind", [TrainConfig, EstimateConfig, PredictConfig, SearchConfig])
def test_help_text_of_every_command_has_its_usage_and_keys(kind: type[CommandConfig]) -> None:
    text = help_text(kind)
    assert text.startswith(f"usage: python -m crossbow_py.{'train' if kind is TrainConfig else _command(kind)} ")
    for field in dataclasses.fields(kind):
        nested = dataclasses.fields(field.default)[0].name if dataclasses.is_dataclass(field.default) else ""
        key = f"{field.name}.{nested}" if nested and field.name not in TrainConfig.GROUPS else field.name
        assert f"\n  {key}=" in text or f"\n{key}=" in text


def _command(kind: type[CommandConfig]) -> str:
    return kind.__name__.removesuffix("Config").lower()


def test_help_text_of_search_has_the_values_that_hold_for_a_search() -> None:
    lines = help_text(SearchConfig).splitlines()
    said = {line.split("=")[0].strip(): line.split()[0].split("=", 1)[1] for line in lines if line.startswith("  ")
            and "=" in line.split()[0]}  # fmt: skip
    assert (said["resume"], said["max_epochs"], said["checkpoint_every_s"]) == ("auto", "9.0", "300.0")
    assert not {"num_learners", "trace", "averaging"} & said.keys()


@pytest.mark.slow
def test_help_text_of_search_shows_a_space_that_can_be_parsed() -> None:
    lines = help_text(SearchConfig).splitlines()
    begin = lines.index("  space:")
    shown = "\n".join(lines[begin : lines.index("", begin)])
    plain = yaml.safe_load(shown)["space"]
    assert [parameter.key for parameter in Space.from_mapping(plain).parameters] == list(plain)
    config = compose(["+experiment=search_digits"], SearchConfig)
    assert len(dataclasses.replace(config, space=plain).parsed_space.parameters) == 4


@pytest.mark.slow
def test_help_text_of_search_shows_commands_that_can_be_composed() -> None:
    shown = [line.strip() for line in help_text(SearchConfig).splitlines() if line.startswith("  python -m")]
    assert len(shown) == 5
    for line in shown:
        config = compose(shlex.split(line)[3:], SearchConfig)
        assert config.parsed_space.parameters


def test_list_text_says_what_every_option_is() -> None:
    blocks = dict(block.split("=\n", 1) for block in list_text(TrainConfig).split("\n\n"))
    assert list(blocks) == [*(f"+{group}" for group in APPENDED_GROUPS), *TrainConfig.GROUPS, "launcher"]
    assert blocks.pop("launcher").split()[0] == "ray"
    for group, block in blocks.items():
        described = dict(line.split(maxsplit=1) for line in block.splitlines())
        assert list(described) == sorted(group_options(group.removeprefix("+"), TrainConfig))


def test_help_text_has_the_launcher_and_its_keys() -> None:
    lines = help_text(SearchConfig).splitlines()
    assert " OPTION is one of ray" in lines
    assert [line.split()[0].removeprefix("launcher.") for line in lines if line.startswith("  launcher.")] == [
        "address=null", "num_workers=null", "cpus_per_worker=null", "max_restarts=3",
    ]  # fmt: skip
