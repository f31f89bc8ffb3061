"""Words that set Hydra's own configuration: what they mean, and a sentence for each of the others."""

from __future__ import annotations

import pytest

from crossbow_py.cli.hydra_words import HydraWords, split_hydra
from crossbow_py.core.errors import UserError


def test_words_of_hydra_are_apart_from_the_others() -> None:
    words = [
        "seed=1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "+hydra.launcher.more.x=1", "hydrate=1",
        "hydra.sweep.dir='a b'", "++hydra.sweep.subdir=${seed}",
    ]  # fmt: skip
    asked, own = split_hydra(words)
    assert own == ["seed=1", "hydrate=1"]
    assert asked == HydraWords(
        launcher="joblib",
        settings=("hydra.launcher.n_jobs=2", "+hydra.launcher.more.x=1"),
        sweep_dir="a b",
        sweep_subdir="${seed}",
    )


@pytest.mark.parametrize("value", ["runs/a", "'a b'", "runs/${now:%Y}", "~/runs"])
def test_folder_of_one_run_is_its_output_dir_as_it_is_written(value: str) -> None:
    asked, own = split_hydra(["seed=1", f"hydra.run.dir={value}"])
    asked.check_one_run()
    assert asked.with_run_dir(own) == ["seed=1", f"output_dir={value}"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hydra/sweeper=optuna", "crossbow_py.search samples trials"),
        ("hydra.sweeper.params.seed='1,2'", "-m runs every combination"),
        ("+hydra.job.env_set.X=1", "hydra/launcher, hydra.launcher.KEY"),
        ("hydra={}", "hydra/launcher, hydra.launcher.KEY"),
        ("hydra/launcher=joblib,basic", "lists several values"),
        ("hydra.launcher.n_jobs=1,2", "lists several values"),
        ("+hydra/launcher=joblib", "without a plus: write hydra/launcher=joblib"),
        ("~hydra/launcher", "hydra/launcher must be text"),
        ("hydra/launcher=", "hydra/launcher must be text"),
        ("hydra.run.dir=2024", "hydra.run.dir must be text"),
        ("hydra/launcher@x=joblib", "has an @"),
    ],
)
def test_word_of_hydra_that_means_nothing_is_one_sentence(word: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        split_hydra(["seed=1", word])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value) and str(raised.value)[-1] in ".?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra/launcher=joblib"], "add -m"),
        (["hydra.launcher.n_jobs=2"], "add -m"),
        (["hydra.sweep.dir=x"], "add -m, or write output_dir=PATH"),
        (["hydra.sweep.subdir=x"], "add -m"),
    ],
)
def test_what_is_of_a_sweep_is_refused_for_one_run(words: list[str], said: str) -> None:
    asked, _ = split_hydra(words)
    with pytest.raises(UserError, match=said):
        asked.check_one_run()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.run.dir=x"], "with -m write hydra.sweep.dir=PATH"),
        (["hydra.launcher.n_jobs=2"], "add hydra/launcher=NAME"),
        (["hydra/launcher=basic", "hydra.launcher.n_jobs=2"], "add hydra/launcher=NAME"),
        (["hydra.sweep.dir=x", "output_dir=y"], "name the same folder"),
    ],
)
def test_what_is_of_one_run_is_refused_for_a_sweep(words: list[str], said: str) -> None:
    asked, own = split_hydra(words)
    with pytest.raises(UserError, match=said):
        asked.check_sweep(own)


def test_folder_or_launcher_that_is_named_twice_is_refused() -> None:
    asked, own = split_hydra(["hydra.run.dir=x", "++output_dir=y"])
    with pytest.raises(UserError, match="name the same folder"):
        asked.with_run_dir(own)
    with pytest.raises(UserError, match="chosen twice"):
        split_hydra(["hydra/launcher=joblib", "hydra/launcher=basic"])
