"""A search's configuration: its space against the keys of a run, its trials as runs, and their commands."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from typing import Any

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.search.config import SearchConfig, trial_config
from crossbow_py.search.space import Space
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.run_folder.recorded_config import train_command

DIGITS = ["+experiment=search_digits"]
TWO_OPTIMIZERS = [
    "data=digits", "model=mlp",
    "space={optimizer:[sgd,adamw],optimizer.learning_rate:{low:0.01,high:0.1},"
    "optimizer.momentum:{low:0.5,high:0.9,when:{optimizer:sgd}},"
    "optimizer.beta1:{choices:[0.8,0.9],when:{optimizer:adamw}}}",
]  # fmt: skip
CUSTOM = ["data=digits", "model=custom", "model.target=package.of.mine", "space.seed=[1,2]"]


def search(*overrides: str) -> SearchConfig:
    return compose(overrides, SearchConfig)


@pytest.fixture(scope="module")
def digits() -> SearchConfig:
    return search(*DIGITS)


def composed(command: str) -> TrainConfig:
    """What `train` is told by a command as a shell splits it."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "crossbow_py.train"]
    return compose(words[3:], TrainConfig)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        DIGITS,
        [*DIGITS, "order_seed=7", "seed=3", "precision=fp32", "executor=serial"],
        ["+experiment=search_lenet", "channels_last=false", "checkpoint_every_s=60"],
        TWO_OPTIMIZERS,
        ["data=digits", "space.model=[mlp,resnet20]"],
        ["data=digits", "model=mlp", "space.model.hidden=[[32],[64,16],[]]"],
        ["data=digits", "space.schedule=[constant,cosine,exponential]", "space.batch_size=[8,64]"],
        [
            "data=cifar10",
            "space.data.crop_padding={low:0,high:4}",
            "space.data.flip=[true,false,alternating]",
            "space.data.random_erasing={low:0.0,high:0.5}",
        ],
        [
            *CUSTOM,
            "model.args.inner={}",
            "space.model.args.width={low:1,high:64}",
            "space.model.args.inner.text=['a b','it\\'s']",
        ],
    ],
)
def test_command_of_a_trial_composes_to_exactly_its_configuration(overrides: list[str]) -> None:
    config = search(*overrides)
    for number, params in enumerate(config.parsed_space.corners()[:3]):
        trial = trial_config(config, params, seed=number + 5)
        assert composed(train_command(trial)) == trial


@pytest.mark.parametrize("is_last", [False, True])
def test_space_on_the_command_line_has_groups_beside_what_is_in_them_in_any_order(is_last: bool) -> None:
    group = "space.optimizer=[sgd,adamw]"
    parts = ["space.optimizer.learning_rate={low:0.01,high:0.1}", "space.optimizer.momentum={low:0.5,high:0.9}"]
    words = [*parts, group] if is_last else [group, *parts]
    config = search("data=digits", "model=mlp", *words, "space.optimizer.momentum.when={optimizer:sgd}",
                    "space.optimizer.learning_rate.high=0.05")  # fmt: skip
    expected = Space.from_mapping(
        {
            "optimizer": ["sgd", "adamw"],
            "optimizer.learning_rate": {"low": 0.01, "high": 0.05},
            "optimizer.momentum": {"low": 0.5, "high": 0.9, "when": {"optimizer": "sgd"}},
        }
    )
    assert set(config.parsed_space.parameters) == set(expected.parameters)


def test_trial_is_one_learner_with_its_own_seed_and_the_order_of_the_search() -> None:
    config = search(*DIGITS, "seed=3", "output_dir=x", "resume=auto", "max_time_s=60", "target_accuracy=0.5")
    trial = trial_config(config, {"optimizer.learning_rate": 0.25, "optimizer.momentum": 0.75}, seed=11)
    assert (trial.num_learners, trial.seed, trial.order_seed, trial.batch_size) == (1, 11, 3, 16)
    assert isinstance(trial.optimizer, SGD)
    assert (trial.optimizer.learning_rate, trial.optimizer.momentum) == (0.25, 0.75)
    assert (trial.output_dir, trial.resume, trial.max_time_s, trial.target_accuracy) == (None, None, None, None)
    assert trial_config(search(*DIGITS, "order_seed=8", "seed=3"), {}, seed=11).order_seed == 8


@pytest.mark.parametrize(
    "override",
    [
        "num_learners=1", "max_learners=2", "max_samples=100", "max_rounds=3", "target_loss=0.1",
        "max_evaluation_batches=3", "trace=false", "profile=true", "compile_model=true", "on_nonfinite=stop",
        "learning_statistics=true", "checkpoint_every_epochs=1", "keep_checkpoints=3", "distributed.timeout_s=60",
        "averaging=independent", "averaging.average_ema=1",
    ],
)  # fmt: skip
def test_key_of_a_run_that_a_search_has_not_is_refused_by_name(override: str) -> None:
    key = re.split(r"[.=]", override)[0]
    with pytest.raises(UserError, match=rf"^unknown key {key}, which is for python -m crossbow_py\.train"):
        search(*DIGITS, override)


def test_option_that_is_configured_already_keeps_what_it_was_given() -> None:
    config = search("data=digits", "model=mlp", "model.hidden=[16]", "space.model=[mlp,lenet]")
    assert trial_config(config, {"model": "mlp"}, seed=0).model.hidden == (16,)
    assert trial_config(config, {"model": "lenet"}, seed=0).model.NAME == "lenet"


def test_trial_of_a_searched_group_has_the_options_own_values_and_what_is_searched_beneath_it() -> None:
    config = search(*TWO_OPTIMIZERS)
    sgd = trial_config(config, {"optimizer.momentum": 0.7, "optimizer": "sgd"}, seed=0).optimizer
    assert (sgd.NAME, sgd.momentum) == ("sgd", 0.7)
    adamw = trial_config(config, {"optimizer.beta1": 0.8, "optimizer": "adamw"}, seed=0).optimizer
    assert (adamw.NAME, adamw.beta1, adamw.beta2) == ("adamw", 0.8, 0.999)


@pytest.mark.parametrize(
    ("key", "entry", "words"),
    [
        ("optimiser.momentum", [0.1], ["space has no key 'optimiser.momentum'", "did you mean 'optimizer'"]),
        ("learning_rate", [0.1], ["space has no key 'learning_rate'", "optimizer"]),
        ("optimizer.momentun", [0.1], ["optimizer.momentun", "did you mean 'optimizer.momentum'"]),
        ("model", ["lenett"], ["unknown model 'lenett'", "did you mean 'lenet'"]),
        ("optimizer.name", ["sgd"], ["optimizer.name", "search optimizer"]),
        ("max_epochs", [1, 2], ["max_epochs is the same for all trials", "batch_size"]),
        ("num_learners", [1, 2], ["num_learners is the same for all trials"]),
        ("data.validation_fraction", [0.1], ["data.validation_fraction is the same"]),
        ("data", ["mnist"], ["data is the same"]),
        ("averaging.averaging_momentum", [0.1], ["averaging.averaging_momentum is the same"]),
        ("batch_size.x", [1], ["batch_size"]),
        ("batch_size", {"min": 8, "max": 16}, ["nothing beneath 'batch_size'", "batch_size: {low: ..., high: ...}"]),
        (
            "optimizer.learning_rate",
            {"min": 0, "max": 1},
            ["nothing beneath 'optimizer.learning_rate'", "optimizer.learning_rate: {low: ..., high: ...}"],
        ),
        ("optimizer.lr", [0.1], ["unknown key optimizer.lr; did you mean 'optimizer.learning_rate'?"]),
        ("batch_size", {"low": 0, "high": 8}, ["batch_size must be at least 1, got 0"]),
        ("batch_size", {"low": 1.5, "high": 8}, ["batch_size must be a whole number"]),
        ("optimizer.learning_rate", {"low": -1, "high": 1, "log": False}, ["optimizer.learning_rate must be", "-1"]),
        ("optimizer.learning_rate", {"low": 0.5, "high": 0.1}, ["space: optimizer.learning_rate", "0.5"]),
        ("optimizer.momentum", {"low": 0.5, "hihg": 0.9}, ["hihg", "did you mean 'high'"]),
        (
            "optimizer.momentum",
            {"low": 0.5, "high": 0.9, "when": {"optimizer": "sgd"}},
            ["'optimizer', which is not searched"],
        ),
    ],
)
def test_space_that_does_not_fit_a_run_is_refused(digits: SearchConfig, key: str, entry: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        dataclasses.replace(digits, space={**digits.space, key: entry})
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"optimizer": ["sgd", "adamw"], "optimizer.momentum": {"low": 0.5, "high": 0.9}},
            "space: optimizer.momentum is no key of optimizer=adamw; give it when: {optimizer: sgd}.",
        ),
        (
            {"optimizer": ["adamw", "muon", "sgd"], "optimizer.momentum": [0.5, 0.9]},
            "space: optimizer.momentum is no key of optimizer=adamw; give it when: {optimizer: [muon,sgd]}.",
        ),
        (
            {"optimizer": ["sgd", "adamw"], "optimizer.momentun": [0.5, 0.9]},
            "unknown key optimizer.momentun; did you mean 'optimizer.momentum'?",
        ),
        ({"model": ["mlp", "lenett"], "model.hidden": [[16]]}, "space: unknown model 'lenett'; did you mean 'lenet'?"),
    ],
)
def test_key_that_only_some_searched_options_have_is_refused_with_its_condition(
    digits: SearchConfig, space: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        dataclasses.replace(digits, space=space)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_epochs", None, ["max_epochs must be a number, got None"]),
        ("eta", 1, ["eta must be at least 2, got 1"]),
        ("min_epochs", 28, ["min_epochs", "28", "27"]),
        ("min_epochs", 0, ["min_epochs must be greater than 0"]),
        ("num_trials", 0, ["num_trials must be at least 1"]),
        ("max_epochs", math.inf, ["max_epochs must be a finite number, got inf"]),
        ("max_pack_size", 0, ["max_pack_size must be at least 1"]),
        ("lease_s", 0.5, ["lease_s must be greater than 1"]),
        ("metric", 'f1', ["metric must be one of accuracy, loss, got 'f1'"]),
        ("sampler", 'bayes', ["sampler must be one of random, tpe, grid", "'bayes'; write one of these."]),
        ("sampler", 'TPE', ["'TPE'; did you mean 'tpe'?"]),
        ("sampler", 'TPESampler', ["'TPESampler'; did you mean 'tpe'?"]),
        ("method", 'median', ["method must be one of"]),
        ("packing", 'all', ["packing must be one of"]),
        ("sampler", 'grid', ["must have num, step or choices for a grid"]),
    ],
)  # fmt: skip
def test_value_that_a_search_cannot_have_is_refused(
    digits: SearchConfig, key: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        dataclasses.replace(digits, **{key: value})
    for word in words:
        assert word in str(refused.value)


def test_search_without_a_space_or_without_a_number_of_trials_is_refused() -> None:
    with pytest.raises(UserError, match="space must be a mapping with at least one key"):
        search("data=digits")
    with pytest.raises(UserError, match="space must be a mapping"):
        search("data=digits", "space=3")
    with pytest.raises(UserError, match=r"'num_trials'"):
        search(*DIGITS, "nun_trials=3")
    with pytest.raises(UserError, match="num_trials must be set where method is none"):
        search(*DIGITS, "method=none", "num_trials=null")
    with pytest.raises(UserError, match=r"num_trials=5 is more than the 4 points of the grid; lower it"):
        search("data=digits", "space.batch_size=[8,16]", "space.seed=[1,2]", "sampler=grid", "num_trials=5")
    with pytest.raises(UserError, match="max_epochs must be a number, got None"):
        search(*DIGITS, "max_epochs=null", "max_time_s=9")
    with pytest.raises(UserError, match=r"target_accuracy .* metric=loss"):
        search(*DIGITS, "metric=loss", "target_accuracy=0.9")


def test_key_of_the_space_on_the_command_line_is_laid_over_the_experiments() -> None:
    fixed, narrowed, added = (
        search(*DIGITS, override).parsed_space.to_plain()
        for override in ("space.optimizer.momentum=0.9", "space.optimizer.momentum.low=0.8", "space.batch_size=[8,16]")
    )
    momentum = {"key": "optimizer.momentum", "low": 0.5, "high": 0.99}
    assert fixed[1] == {"key": "optimizer.momentum", "choices": [0.9]}
    assert narrowed[1] == {**momentum, "low": 0.8}
    assert added[1] == momentum
    assert added[-1] == {"key": "batch_size", "choices": [8, 16]}


def test_brackets_of_a_grid_have_as_many_trials_as_points() -> None:
    config = search("data=digits", "space.batch_size=[8,16]", "space.seed=[1,2,3]", "sampler=grid", "method=none")
    assert [bracket.num_trials for bracket in config.brackets()] == [6]
    assert sum(bracket.num_trials for bracket in search(*DIGITS).brackets()) == 27


def test_mixed_batches_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"data\.mixup=0\.2 data\.cutmix=1 mixes batches, which trials share"):
        search(*DIGITS, "data.mixup=0.2", "data.cutmix=1")
