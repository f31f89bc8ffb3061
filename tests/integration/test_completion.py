"""Completion in shells: what a press of Tab offers, and that all of it is taken."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossbow_py.cli import completion
from crossbow_py.cli.completion import completion_script, words
from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.search.config import SearchConfig
from crossbow_py.train import __main__ as train
from crossbow_py.train.config import TrainConfig

pytestmark = pytest.mark.slow

# What bash sets before it calls the function: the line so far, and its words.
PRESS_TAB = """
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
compopt() { echo "compopt $1 $2"; }
_crossbow_complete
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module", autouse=True)
def found_once() -> Iterator[None]:
    """All recipes are composed to find the words of a command, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "words", functools.cache(words))
        yield


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bash"
    path.write_text(completion_script("bash") + PRESS_TAB)
    return path


def offered(script: Path, line: str, folder: Path) -> list[str]:
    done = subprocess.run(["bash", str(script), line], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("crossbow-train +experiment=resnet32", ["resnet32", "resnet32_short"]),
        ("crossbow-train averaging=sl", ["slowmo"]),
        ("/some/bin/crossbow-train +experiment=digits executor=fused_", ["fused_threads"]),
        ("crossbow-train optimizer.learn", ["compopt -o nospace", "optimizer.learning_rate="]),
        ("crossbow-train trace=", ["true", "false"]),
        ("crossbow-search sampler=t", ["tpe"]),
        ("crossbow-estimate mem", ["compopt -o nospace", "memory="]),
        ("crossbow-predict --h", ["--help"]),
        ("crossbow-search launcher.num", ["compopt -o nospace", "launcher.num_workers="]),
        ("crossbow-train launcher=", ["ray"]),
        ("crossbow-train output_dir=ru", ["runs"]),
        ("crossbow-report ru", ["runs"]),
        ("crossbow-train resume=two", [r"two\ words"]),
        ("crossbow-report two", [r"two\ words"]),
        ("crossbow-train conf", ["compopt -o nospace", "config="]),
        ("crossbow-train +experiment=evil", [""]),
        ("crossbow-train +experiment=mi", ["mine"]),
        ("crossbow-train optimizer=gen", ["gentle"]),
        ("crossbow-train nothing_like_this", [""]),
    ],
)
def test_tab_offers_what_may_follow(script: Path, line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "two words").mkdir()
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "evil$(touch owned).yaml").write_text("")
    for own in ("experiment/mine", "optimizer/gentle"):
        (tmp_path / "conf" / own).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / f"{own}.yaml").write_text("")
    assert offered(script, line, tmp_path) == expected
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", [TrainConfig, SearchConfig])
def test_every_recipe_and_option_that_is_offered_is_taken(kind: type[TrainConfig] | type[SearchConfig]) -> None:
    found = words(kind)
    recipes = [word for word in found if word.startswith("+experiment=")]
    assert ("+experiment=search_digits" in recipes) == (kind is SearchConfig)
    for word in found:
        if word.startswith(("averaging=", "schedule=", "model=resnet", "executor=", "precision=")):
            compose([recipes[0], word], kind)


@pytest.mark.parametrize(("shell", "check"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_script_is_one_that_the_shell_can_read(shell: str, check: list[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not there")
    (tmp_path / "script").write_text(completion_script(shell))
    subprocess.run([shell, *check, str(tmp_path / "script")], check=True)


def test_completion_is_printed_and_another_shell_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--completion", "fish"]) == 0
    assert "complete -c crossbow-train -f -a '+experiment=digits'" in capsys.readouterr().out
    assert train.main(["--completion", "zhs"]) == 2
    assert "did you mean 'zsh'" in capsys.readouterr().err
    with pytest.raises(UserError, match="takes a shell, got ''"):
        completion_script("")
