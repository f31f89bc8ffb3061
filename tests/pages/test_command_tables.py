"""The tables that the site's page of commands gets: the keys of every command and group, as --help has them."""

from __future__ import annotations

import dataclasses

import pytest

from crossbow_py.train.config import TrainConfig
from docs.command_tables import on_page_markdown, table
from tests.pages.snippets import ROOT


def rows(part: str) -> dict[str, list[list[str]]]:
    """By key, the other cells of its rows."""
    found: dict[str, list[list[str]]] = {}
    for line in table(part).splitlines()[2:]:
        key, *cells = line.strip("| ").split(" | ")
        found.setdefault(key.strip("`"), []).append(cells)
    return found


def test_table_of_training_has_every_key_with_default_values_and_meaning() -> None:
    found, nested = rows("train"), ("auto_tuner", "distributed")
    assert set(found) == {
        *({field.name for field in dataclasses.fields(TrainConfig)} - {*TrainConfig.GROUPS, *nested}),
        "auto_tuner.objective", "distributed.timeout_s", "distributed.check_every_rounds",
    }  # fmt: skip
    assert found["batch_size"] == [["`16`", "a whole number, at least 1", "samples a learner takes per round"]]


@pytest.mark.parametrize("group", list(TrainConfig.GROUPS))
def test_table_of_a_group_has_the_keys_of_all_of_its_options(group: str) -> None:
    fields = {field.name for settings in TrainConfig.GROUPS[group].values() for field in dataclasses.fields(settings)}
    assert set(rows(group)) == {f"{group}.{field}" for field in fields}


def test_table_of_a_group_says_which_options_have_a_key_and_which_default() -> None:
    found = rows("averaging")
    assert [(cells[0], cells[-1]) for cells in found["averaging.rate_scaling"]] == [
        ("`none`", "crossbow, diloco, snoo, local_sgd, slowmo, elastic, papa, synchronous_sgd"),
        ("`sqrt`", "sma, grouped_sma"),
    ]
    assert found["averaging.average_ema"][0][-1] == "all but independent"


def test_table_of_search_has_what_training_has_not_or_otherwise() -> None:
    found = rows("search")
    assert {"space", "sampler", "resume", "max_epochs"} <= set(found)
    assert not {"batch_size", "trace"} & set(found)
    assert set(rows("estimate")) == {"memory", "held_back", "find_learning_rate", "images_per_s", "output_dir"}


def test_table_of_the_launcher_has_its_keys() -> None:
    found = rows("launcher")
    assert set(found) == {f"launcher.{key}" for key in ("address", "num_workers", "cpus_per_worker", "max_restarts")}
    assert found["launcher.max_restarts"][0][:2] == ["`3`", "a whole number, at least 0"]


def test_table_of_options_escapes_what_would_be_markup() -> None:
    images = next(line for line in table("options/data").splitlines() if line.startswith("| `image_folder`"))
    assert "train/&lt;class>/\\*" in images


def test_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keys:other is none of train"):
        on_page_markdown("<!-- keys:other -->")


def test_page_of_commands_gets_the_table_of_every_command_and_group() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    groups = list(TrainConfig.GROUPS)
    parts = ["train", "many", "search", "estimate", "predict", "check", "launcher", *groups]
    parts += [f"options/{group}" for group in (*groups, "experiment", "debug")]
    built = on_page_markdown(page)
    assert [part for part in parts if table(part) not in built] == []
    assert "| key |" not in page, "the repository keeps no tables of keys"
    assert "<!-- keys:" not in built
