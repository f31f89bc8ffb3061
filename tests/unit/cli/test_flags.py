"""The flags of a command line, and what is said of those that are not there."""

from __future__ import annotations

import pytest

from crossbow_py.cli.flags import Flags, read_flags
from crossbow_py.core.errors import UserError

KEYS = ("batch_size", "optimizer")


def read(*arguments: str) -> Flags:
    return read_flags(arguments, KEYS)[0]


def test_words_and_flags_may_stand_in_any_order() -> None:
    arguments = ["a=1", "--cfg", "job", "-p", "model", "+b=2", "--resolve", "-cd=x", "c=3", "-cn", "mine"]
    flags, words = read_flags(arguments, KEYS)
    assert words == ["a=1", "+b=2", "c=3"]
    assert flags == Flags(cfg="job", package="model", resolve=True, config_dir="x", config_name="mine")


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ([], Flags()),
        (["-m"], Flags(multirun=True)),
        (["--multirun", "seed=1,2"], Flags(multirun=True)),
        (["--list"], Flags(list=True)),
        (["-c", "all"], Flags(cfg="all")),
        (["--cfg=hydra", "--package=hydra.launcher"], Flags(cfg="hydra", package="hydra.launcher")),
        (["--info"], Flags(info="all")),
        (["--info", "seed=1"], Flags(info="all")),
        (["-i", "+experiment=digits"], Flags(info="all")),
        (["-i", "defaults"], Flags(info="defaults")),
        (["--info=plugins"], Flags(info="plugins")),
        (["--completion", "bash"], Flags(completion="bash")),
        (["--completion"], Flags(completion="")),
        (["--config-name", "mine", "--config-dir", "more"], Flags(config_name="mine", config_dir="more")),
    ],
)
def test_flags_ask_for(arguments: list[str], flags: Flags) -> None:
    assert read(*arguments) == flags


def test_flags_of_every_job_are_those_of_folders_and_files() -> None:
    assert read("-m", "-cd", "more", "-cn", "mine").of_every_job == ["--config-dir=more", "--config-name=mine"]
    assert read("-m").of_every_job == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cfg"], ["--cfg: expected one argument; --help"]),
        (["--cfg", "seed=1"], ["'seed=1'", "choose from 'job', 'hydra', 'all'"]),
        (["--info", "x"], ["--info: invalid choice: 'x'", "'plugins'"]),
        (["--resolve"], ["how --cfg shows", "add --cfg job"]),
        (["-p", "model"], ["--package say how --cfg shows"]),
        (["--cfg", "job", "-p"], ["--package: expected one argument"]),
        (["-m", "--cfg", "job"], ["give one of them"]),
        (["--info", "--cfg", "job"], ["give one of them"]),
        (["-cn"], ["--config-name: expected one argument"]),
        (["--multirun=1"], ["--multirun: ignored explicit argument '1'"]),
        (["--config-path=conf"], ["unknown option --config-path=conf; did you mean '--config-"]),
        (["--hydra-help"], ["unknown option --hydra-help; did you mean '--help'?"]),
        (["--cgf"], ["unknown option --cgf; did you mean '--cfg'?"]),
        (["--batch-size=3"], ["keys have no dashes: write batch_size=3."]),
        (["-batch_size=3"], ["keys have no dashes: write batch_size=3."]),
        (["-cfg"], ["unknown option -cfg; did you mean '--cfg'?"]),  # no -c with the value fg
        (["-mi"], ["unknown option -mi"]),
        (["--config-dir="], ["--config-dir takes a value, got nothing; write --config-dir VALUE."]),
        (["--cfg", "job", "--package="], ["--package takes a value, got nothing"]),
        (["--"], ["unknown option --"]),
    ],
)
def test_mistake_in_a_flag_is_one_sentence_with_the_remedy(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        read(*arguments)
    assert "\n" not in str(raised.value) and str(raised.value)[-1] in ".?"
    for word in words:
        assert word in str(raised.value)
