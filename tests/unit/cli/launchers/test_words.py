"""The words that choose a launcher of our own, and a sentence for each mistake in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.cli.launchers.placement import RayLauncher
from crossbow_py.cli.launchers.words import split_launcher
from crossbow_py.core.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_words_without_a_launcher_stay_as_they_are() -> None:
    words = ["seed=1", "launchers=2", "+x.launcher=3", "hydra/launcher=joblib"]
    assert split_launcher(words) == (None, words)


def test_launcher_has_the_values_of_its_words_and_defaults() -> None:
    words = ["launcher.num_workers=4", "seed=1,2", "launcher=ray", "++launcher.address=auto"]
    found, own = split_launcher(words)
    assert own == ["seed=1,2"]
    assert found == RayLauncher(address="auto", num_workers=4, cpus_per_worker=None, max_restarts=3)


def test_file_of_ones_own_is_a_launcher_and_words_go_before_it() -> None:
    Path("conf/launcher").mkdir(parents=True)
    Path("conf/launcher/lab.yaml").write_text("name: ray\naddress: head:6379\ncpus_per_worker: 8\n")
    found, _ = split_launcher(["launcher=lab", "launcher.cpus_per_worker=2"])
    assert found == RayLauncher(address="head:6379", cpus_per_worker=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launcher=rya"], "unknown launcher 'rya'; did you mean 'ray'?"),
        (["launcher=joblib"], "launcher=joblib is a launcher of Hydra; write hydra/launcher=joblib."),
        (["launcher=3"], "unknown launcher 3; known: ray."),
        (["launcher="], "unknown launcher ''; known: ray."),
        (["launcher=ray", "launcher=ray"], "launcher is chosen twice; choose it once."),
        (["launcher=ray,lab"], "lists several values, and one launcher starts all jobs"),
        (["launcher=ray", "launcher.num_workers=1,2"], "lists several values"),
        (["+launcher=ray"], "without a plus: write launcher=ray."),
        (["~launcher"], "only the command line chooses one; leave it out."),
        (["launcher.num_workers=2"], "is for a launcher, and none is chosen; add launcher=ray."),
        (["launcher=ray", "launcher.num_worker=2"], "did you mean 'launcher.num_workers'?"),
        (["launcher=ray", "launcher.num_workers=0"], "launcher.num_workers must be at least 1, got 0"),
        (["launcher=ray", "launcher.address=here"], "launcher.address must be auto or HOST:PORT, got 'here'"),
        (["launcher=ray", "launcher.address=ray://a:10001"], "launcher.address must be auto or HOST:PORT"),
        (["launcher=ray", "launcher.address='a:70000'"], "launcher.address must be auto or HOST:PORT"),
    ],
)
def test_mistake_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        split_launcher(["seed=1", *words])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value) and str(raised.value)[-1] in ".?"
