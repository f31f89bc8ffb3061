"""Whole commands with odd values: they train, or end with exit code 2 and one line; never with a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import strategies as st

from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.__main__ import main
from crossbow_py.train.config import TrainConfig
from tests.caches import link_native
from tests.said import called
from tests.unit.fuzz.examining import depths, examine
from tests.unit.fuzz.test_config_values import keys_of

FAST = ["+debug=fast", "device=cpu", "precision=fp32", "executor=serial", "num_learners=2", "max_evaluation_batches=1",
        "output_dir=run"]  # fmt: skip
# What asks for much time or many processes, or for a module by its name, is what it says.
LEFT_OUT = {"max_rounds", "num_learners", "num_workers", "compile_model", "executor"}
OPTIONS = [
    "data=synthetic", "data=digits", "data=mnist", "data=custom", "data=image_folder", "optimizer=sgd",
    "optimizer=adamw", "schedule=cosine", "schedule=step", "averaging=sma", "averaging=independent", "model=mlp",
    "model=custom",
]  # fmt: skip
VALUES = [
    "null", "true", "0", "1", "-1", "2", "1e30", "1e-300", "0.5", "0.999999", "9" * 30, "1" + "0" * 18, "''",
    "'" + "x" * 300 + "'", "'é漢😀'", "'a\nb'", "'\0'", "'\udce9'", "~nobody_at_all/x", "/dev/null", "/dev/full/x",
    "/proc/self/mem", "a.b", "'a..b'", "'.b'", "a.", "[1,2]", "[1e30]", "[]", "{}", "{a:1}", "'\\${'", "auto",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_at_home(in_an_empty_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_native(tmp_path / "home" / ".cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CROSSBOW_DATA_DIR", raising=False)


def commands() -> st.SearchStrategy[list[str]]:
    """An option of a group, with values for its keys and for those of every run."""
    top_level = [key for key in keys_of(TrainConfig) if "." not in key and key not in {*LEFT_OUT, *TrainConfig.GROUPS}]

    def of_option(option: str) -> st.SearchStrategy[list[str]]:
        group, name = option.split("=")
        own = keys_of(TrainConfig.GROUPS[group][name], f"{group}.")
        pair = st.builds("{}={}".format, st.sampled_from([*top_level, *own, *own]), st.sampled_from(VALUES))
        small = ["data.num_train=64"] if option == "data=synthetic" else []
        small += ["model.hidden=[8]"] if group != "model" else []
        return st.lists(pair, min_size=1, max_size=2).map(lambda pairs: [*FAST, option, *small, *pairs])

    return st.sampled_from(OPTIONS).flatmap(of_option)


@depths(6, 200)
def test_command_with_odd_values_trains_or_says_one_line(examples: int) -> None:
    def check(arguments: list[str]) -> None:
        code, said = called(main, arguments)
        assert "Traceback" not in said
        # 1 is a loss that went non-finite, which such learning rates may well do.
        assert code in (0, 1, 2), code
        assert said.count("\n") == (code != 0), said
        if code == 0:
            status = read_summary(next(Path().glob("**/summary.json")).parent)["status"]
            assert status in ("finished", "target_reached")
        for left in Path().iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    examine(commands(), check, examples, most_mib=1000)
