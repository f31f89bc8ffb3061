"""The reference is complete: fields of records, files of a run, and all that the package offers to Python."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import crossbow_py
from crossbow_py.averaging import RULES
from crossbow_py.core import errors
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.telemetry.class_counts import ClassFigures
from crossbow_py.telemetry.events import EpochRecord, LearnerCount, LearningStatistics, Summary
from crossbow_py.telemetry.rank_pace import RankPace, RankSpread
from crossbow_py.train.__main__ import main
from tests.event_files import read_events
from tests.pages.snippets import ROOT

REFERENCE = ROOT / "docs" / "reference"
_CODE = re.compile(r"`([^`]+)`")


def first_cells(page: str, heading: str) -> list[str]:
    """What is in backticks in the first column of the first table under a heading."""
    text = (REFERENCE / page).read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    rows = re.split(r"\n#", text)[0].split("\n|---")[1].splitlines()[1:]
    cells = [row.split("|")[1] for row in rows if row.startswith("|")]
    return [name for cell in cells for name in _CODE.findall(cell)]


def names(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("summary.json", names(Summary)),
        ("Classes", names(ClassFigures)),
        ("The slowest rank", names(RankSpread)),
        ("The pace of ranks", names(RankPace)),
        ("Ranks that hung", names(HangingRank)),
        ("metrics.jsonl", names(EpochRecord)),
        ("Lines of the auto-tuner", ["event", *names(LearnerCount)]),
        ("Statistics of learning", names(LearningStatistics)),
    ],
)
def test_page_of_a_runs_folder_has_every_field_once(heading: str, fields: list[str]) -> None:
    assert sorted(first_cells("run_folder.md", heading)) == sorted(fields)


@pytest.mark.parametrize("averaging", ["sma", "independent"])
def test_page_of_a_runs_folder_has_every_file(averaging: str, tmp_path: Path) -> None:
    options = [f"averaging={averaging}", "num_learners=2", "executor=serial", "trace=true", f"output_dir={tmp_path}"]
    assert main(["+experiment=digits", "+debug=fast", *options]) == 0
    found = {f"{path.name}/" if path.is_dir() else path.name for path in tmp_path.iterdir()}
    asked = {
        "report/", "profile.txt", "profile.json.gz", "mlflow.json", "wandb.json", "wandb/", "hang_rank0.txt",
        "hang_nccl_rank_0", "adapter/", "adapter_0/",
    }  # fmt: skip
    named = set(first_cells("run_folder.md", "Files")) - asked
    assert found <= named
    assert named - found == (
        {"model_0.safetensors", "model_1.safetensors", ".launch"}
        if averaging == "sma"
        else {"model.safetensors", ".launch"}
    )
    tags = read_events(tmp_path / "tensorboard").Tags()["scalars"]
    page = (REFERENCE / "run_folder.md").read_text(encoding="utf-8")
    assert [tag for tag in tags if f"`{re.sub('_[1-9]$', '_0', tag)}`" not in page] == []


def test_every_error_that_a_program_may_catch_is_offered_and_in_the_table_of_errors() -> None:
    raised = {
        name
        for name, error in vars(errors).items()
        if inspect.isclass(error) and issubclass(error, errors.CrossbowError)
    }
    assert raised == set(crossbow_py.errors.__all__)
    table = set(first_cells("python.md", "Errors"))
    assert table == raised - {"CrossbowError"}


def test_page_of_python_has_everything_that_the_package_offers_once() -> None:
    page = (REFERENCE / "python.md").read_text(encoding="utf-8")
    modules = ("averaging", "errors", "loggers", "optimizers", "schedules")
    found = re.findall(rf"^::: crossbow_py\.(?:(?:{'|'.join(modules)})\.)?(\w+)$", page, re.MULTILINE)
    own = {name for module in modules[1:] for name in getattr(crossbow_py, module).__all__}
    rules = {rule.__name__ for rule in RULES.values()} | {"AveragingRule"}
    assert sorted(found) == sorted({*crossbow_py.__all__, *own, *rules} - {*modules})


@pytest.mark.parametrize("name", [name for name in crossbow_py.__all__ if name != "__version__"])
def test_what_the_package_offers_says_what_it_is(name: str) -> None:
    offered = getattr(crossbow_py, name)
    assert offered.__doc__
    assert not offered.__doc__.startswith(f"{name}("), "the signature that dataclasses make up"
    for member, value in vars(offered).items() if inspect.isclass(offered) else ():
        if inspect.isfunction(value) and not member.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{member}"
