"""Composing the command line's configuration, and errors for mistakes in it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import ClassVar

import pytest

from crossbow_py.averaging import RULES, SMA, Independent
from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.configuration import compose, group_options, options_for, read_option
from crossbow_py.cli.overrides import expand_sweeps
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.engine.executors import EXECUTORS, Executor, SerialExecutor
from crossbow_py.engine.executors import _executors as executors_from
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.models import MLP, LeNet
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig, config_from_mapping, config_to_mapping


def test_compose_without_overrides_is_the_classes_defaults() -> None:
    config = compose([], TrainConfig)
    groups = {"model": MLP(), "optimizer": SGD(), "averaging": SMA()}
    groups |= {"data": TrainConfig.GROUPS["data"]["digits"](), "schedule": TrainConfig.GROUPS["schedule"]["constant"]()}
    assert config == TrainConfig(**groups)


def test_default_of_a_key_can_be_filled_in_elsewhere() -> None:
    config = compose(["max_learners=${batch_size}", "order_seed=${distributed.check_every_rounds}"], TrainConfig)
    assert (config.max_learners, config.order_seed) == (config.batch_size, config.distributed.check_every_rounds)


def test_registered_class_is_an_option_with_its_defaults() -> None:
    chosen = {"model": "vgg16", "data": "cifar10", "optimizer": "muon", "schedule": "step", "averaging": "papa"}
    config = compose([f"{group}={name}" for group, name in chosen.items()], TrainConfig)
    for group, name in chosen.items():
        assert getattr(config, group) == TrainConfig.GROUPS[group][name]()


def kind_of(experiment: str) -> type[TrainConfig]:
    return SearchConfig if "space" in read_option("experiment", experiment) else TrainConfig


@pytest.mark.parametrize(("group", "key", "owner"), [("averaging", "pull", "papa"), ("optimizer", "beta1", "adamw")])
def test_key_of_another_choice_of_its_group_is_refused_naming_that(group: str, key: str, owner: str) -> None:
    with pytest.raises(UserError, match=f"unknown key {group}.{key}, which {group}={owner} has; choose that, or leave"):
        compose(["+experiment=digits", f"{group}.{key}=0.1"], TrainConfig)


@pytest.mark.parametrize("experiment", sorted(group_options("experiment", TrainConfig)))
def test_experiment_dry_run_composes_under_its_own_name_and_says_what_it_is(experiment: str) -> None:
    config = compose([f"+experiment={experiment}"], kind_of(experiment))
    assert config.experiment == experiment
    assert config.max_epochs is not None
    assert group_options("experiment", TrainConfig)[experiment]
    assert isinstance(config, SearchConfig) or config_from_mapping(config_to_mapping(config)) == config


def test_experiment_of_another_command_is_refused_with_the_right_one() -> None:
    with pytest.raises(UserError, match=r"search_digits is for python -m crossbow_py\.search: it sets"):
        compose(["+experiment=search_digits"], TrainConfig)


# The space of a search names keys of its own optimizer.
@pytest.mark.parametrize(
    "experiment", sorted(name for name in group_options("experiment", TrainConfig) if kind_of(name) is TrainConfig)
)
def test_experiment_with_another_group_option_leaks_nothing_into_it(experiment: str) -> None:
    options = ["averaging=independent", "optimizer=adamw", "schedule=constant", "data=synthetic"]
    config = compose([f"+experiment={experiment}", *options], TrainConfig)
    assert config.averaging == Independent()
    assert config.optimizer == AdamW()
    assert config.schedule == TrainConfig.GROUPS["schedule"]["constant"]()
    assert config.data == TrainConfig.GROUPS["data"]["synthetic"]()


def test_option_that_a_recipe_has_too_is_without_its_keys_if_it_is_chosen() -> None:
    recipe = compose(["+experiment=alexnet"], TrainConfig)
    assert recipe.optimizer == SGD(learning_rate=0.01, momentum=0.9, weight_decay=5e-4)
    chosen = compose(["+experiment=alexnet", "optimizer=sgd", "optimizer.momentum=0.5"], TrainConfig)
    assert chosen == dataclasses.replace(recipe, optimizer=SGD(momentum=0.5))
    kept = compose(["optimizer.momentum=0.5", "+experiment=alexnet"], TrainConfig)
    assert kept.optimizer == dataclasses.replace(recipe.optimizer, momentum=0.5)


def test_group_chosen_for_a_search_keeps_what_its_own_file_sets() -> None:
    config = compose(["+experiment=search_lenet", "data=digits", "optimizer=sgd"], SearchConfig)
    assert (config.data.NAME, config.data.validation_fraction, config.optimizer) == ("digits", 0.1, SGD())


def test_compose_with_values_sets_them_in_their_own_type() -> None:
    words = ["batch_size=8", "max_epochs=3", "optimizer.learning_rate=1e-2", "resume=auto", "model=mlp"]
    config = compose([*words, "model.hidden=[64]"], TrainConfig)
    assert (config.batch_size, config.max_epochs, config.resume) == (8, 3.0, "auto")
    assert config.optimizer.learning_rate == 0.01
    assert config.model == MLP(hidden=(64,))
    assert compose(["optimizer.learning_rate=[0.1,0.2]"], TrainConfig).optimizer.learning_rate == (0.1, 0.2)


def test_compose_with_arguments_of_a_custom_model_takes_any_key() -> None:
    words = ["model=custom", "model.target=pkg.mod.fn", "model.args={depth:3}", "model.args.width=64"]
    config = compose(words, TrainConfig)
    assert config.model.args == {"depth": 3, "width": 64}


def test_compose_with_debug_first_lets_it_win_over_the_experiment() -> None:
    config = compose(["+debug=fast", "+experiment=lenet"], TrainConfig)
    assert (config.experiment, config.max_rounds, config.max_evaluation_batches) == ("lenet", 2, 2)
    assert config.model == LeNet()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+experiment=lenett"], ["unknown experiment 'lenett'", "'lenet'"]),
        (["+experiment=zzz"], ["unknown experiment 'zzz'", "digits", "resnet32"]),
        (["experiment=lenet"], ["write +experiment=lenet"]),
        (["+experiment=[digits,lenet]"], ["unknown experiment"]),
        (["nun_learners=3"], ["unknown key nun_learners", "'num_learners'"]),
        (["optimizer.learnin_rate=1"], ["unknown key optimizer.learnin_rate", "'optimizer.learning_rate'"]),
        (["learning_rate=0.1"], ["unknown key learning_rate", "'optimizer.learning_rate'"]),
        (["lr=0.1"], ["unknown key lr", "'optimizer.learning_rate'"]),
        (["epochs=3"], ["unknown key epochs", "'max_epochs'"]),
        (["gamma=3"], ["unknown key gamma", "'schedule.gamma'"]),
        (["modle=lenet"], ["unknown key modle", "'model'"]),
        (["model=lenett"], ["unknown model 'lenett'", "'lenet'"]),
        (["optimizer=alexnet"], ["unknown optimizer 'alexnet'; it is a recipe: +experiment=alexnet."]),
        (["model=null"], ["unknown model None", "resnet32"]),
        (["~model"], ["model must be one of", "got nothing; write model=NAME"]),
        (["logger.wandb.project=x"], ["logger is a list, which has no key 'wandb'", "[tensorboard]", "WANDB_PROJECT"]),
        (["logger.mlflow=true"], ["logger is a list, which has no key 'mlflow'", "MLFLOW_TRACKING_URI."]),
        (["+experiment=digits", "model.hidden.foo=2"], ["model.hidden is a list", "'foo'", "model.hidden=[256,256]."]),
        (["optimizer.learning_rate=interval(start=1e-3,end=0.1)"], ["rate={low:1e-3,high:0.1}' for python -m"]),
        (["model.name=vgg"], ["model.name", "'vgg16'"]),
        (["averaging=independent", "averaging.correction_rate=0.1"], ["averaging.correction_rate means nothing to"]),
        (["averaging=synchronous_sgd", "averaging.pull=0.1"], ["leave it out, or choose averaging=papa"]),
        (["averaging=independent", "averaging.average_ema=1"], ["averaging.average_ema means nothing to"]),
        (["averaging.average_ema=0"], ["averaging.average_ema must be greater than 0", "got 0", "how far back"]),
        (["seed=a"], ["seed must be a whole number", "'a'"]),
        (["num_learners=2.5"], ["num_learners must be a whole number", "2.5"]),
        (["num_learners=0"], ["num_learners must be at least 1", "0"]),
        (["optimizer.learning_rate=-1"], ["optimizer.learning_rate must be at least 0", "-1"]),
        (["target_accuracy=97"], ["target_accuracy must be at most 1", "97"]),
        (["precision=fp16"], ["precision must be one of auto, fp32, bf16", "'fp16'"]),
        (["seed.x=1"], ["seed must be a whole number"]),
        (["seed"], ["cannot read 'seed'", "key=value"]),
        (["=3"], ["sets no key"]),
        (["seed=[1"], ["cannot read 'seed=[1'"]),
        (["seed=1,2"], ["'seed=1,2' lists several values", "-m"]),
        (["hydra.verbose=true"], ["sets what is Hydra's own", "are what counts", "leave it out"]),
        (["+hydra/launcher=joblib"], ["sets what is Hydra's own", "goes with -m, on the command line"]),
        (["experiment.0=lenet"], ["experiment must be text", "{'0': 'lenet'}"]),
        (["space.seed=[1]"], ["unknown key space, which is for python -m crossbow_py.search"]),
        (["data.num_classes=10", "~data"], ["data has keys but no name", "data=NAME"]),
        (["executor=${"], ["executor", "write"]),
        (["memory@x=1"], ["has an @", "KEY=VALUE without it"]),
        (["group/sub=1"], ["has a / in its key", "GROUP=OPTION"]),
        (["max_epochs={a:[{null:1}]}"], ["key null", "give it a name"]),
        (["schedule=multistep", "schedule.milestones={a:1}"], ["schedule.milestones is a list or a mapping"]),
        (["distributed={1:2}"], ["unknown key distributed.1", "timeout_s"]),
        (["model=custom", "model.target=a.b", "model.args={1:2}"], ["model.args must have names as its keys", "got 1"]),
        (["seed=" + "[" * 51 + "]" * 51], ["nested more than 50 deep"]),
        (["schedule.milestones=['" + "]" * 51 + "'," + "[" * 51 + "]" * 51 + "]"], ["nested more than 50 deep"]),
        (["data=mnist", "data.root=a[b]"], ["cannot read 'data.root=a[b]'; ", "in quotes: key='\"a=b\"'"]),
        (["model=custom", 'model.args={"a b": 1}'], ["keys in a mapping have no quotes: write {a b: 1}"]),
        (["schedule.milestones=[" + "1," * 2000 + "1]"], ["more than 2,000 values"]),
        (["executor=${a.b}"], ["executor: Interpolation key 'a.b' not found;", "write the value itself"]),
        (["output_dir=2024"], ["output_dir must be text or null, got 2024; text is written in quotes"]),
        (["+debug=fast", "++optimizer=sgd"], ["optimizer is chosen without a plus: write optimizer=sgd"]),
        (["data.root=${oc.env:CROSSBOW_NO_SUCH_VARIABLE}"], ["CROSSBOW_NO_SUCH_VARIABLE"]),
        (["+model=lenet"], ["model"]),
    ],
)  # fmt: skip
def test_compose_with_a_mistake_is_one_sentence_that_names_it(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        compose(overrides, TrainConfig)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a[b]", "a[b", "a]b", "{a", "a}", "x,y", "a=b", "a:b", "a(b", "~[x", "@a/b", "null", "1", "[" * 60, "," * 2500,
        "it's", 'say "a"', "a\\[b", "[\\", "#a", " [a ", "]" * 60 + "{",
    ],
)  # fmt: skip
def test_text_in_quotes_is_one_value_whatever_brackets_and_commas_are_in_it(text: str) -> None:
    words = ["model=custom", "model.target=a.b", f"model.args={{a: {quoted(text)}, b: 1}}", "data=mnist"]
    config = compose([*words, f"data.root={quoted(text)}"], TrainConfig)
    assert (config.data.root, config.model.args) == (text, {"a": text, "b": 1})
    jobs = expand_sweeps(["data=mnist", f"data.root={quoted(text)},'c,[d'"])
    assert [compose(job, TrainConfig).data.root for job, _ in jobs] == [text, "c,[d"]


@pytest.mark.parametrize("path", ["~", "~/runs/a-b_1.2", "~me/x@y+z%", "~/größe"])
def test_path_in_the_home_folder_needs_no_quotes(path: str) -> None:
    assert compose(["data=mnist", f"data.root={path}"], TrainConfig).data.root == path


def quoted(text: str) -> str:
    """Return text in Hydra's double quotes, in which backslashes count only before a quote."""
    doubled = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', r"\""), text)
    return f'"{doubled}"'


def test_config_through_yaml_and_back_is_the_same(tmp_path: Path) -> None:
    words = ["+experiment=lenet", "optimizer.learning_rate=[0.1,1e-5]", "data.root='/a b/$c'", "max_time_s=60"]
    config = compose(words, TrainConfig)
    plain = config_to_mapping(config)
    (tmp_path / "config.yaml").write_text(write_yaml(plain))
    assert read_yaml(tmp_path / "config.yaml") == plain
    assert config_from_mapping(plain) == config


def test_read_yaml_of_a_broken_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: [1\n")
    with pytest.raises(UserError, match=r"cannot read .*config\.yaml"):
        read_yaml(tmp_path / "config.yaml")


def test_expand_sweeps_over_lists_and_ranges_is_their_product() -> None:
    assert expand_sweeps(["+experiment=digits,lenet", "batch_size=8", "seed=range(1,3)"]) == [
        ([f"+experiment={name}", "batch_size=8", f"seed={seed}"], f"experiment={name},seed={seed}")
        for name in ("digits", "lenet")
        for seed in (1, 2)
    ]
    assert expand_sweeps(["seed=3"]) == [(["seed=3"], "")]


def test_sweep_of_more_than_two_thousand_runs_is_a_user_error() -> None:
    assert len(expand_sweeps(["seed=range(1,1001)", "batch_size=8,16"])) == 2000
    for words in (["seed=range(1,1002)", "batch_size=8,16"], ["seed=range(1,2002)"]):
        with pytest.raises(UserError, match="a sweep runs at most 2,000 jobs, got more"):
            expand_sweeps(words)


@pytest.mark.parametrize(
    ("override", "said"), [("seed=interval(0,1)", "is a range to sample from"), ("model=glob(*)", "cannot sweep")]
)
def test_expand_sweeps_over_what_has_no_list_is_a_user_error(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        expand_sweeps([override])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("glob(*)", ["lenet", "resnet20", "resnet32", "vgg16"]),
        ("glob(resnet*)", ["resnet20", "resnet32"]),
        ("glob([vgg*,le*])", ["lenet", "vgg16"]),
        ("glob(*,exclude=resnet*)", ["lenet", "vgg16"]),
        ("glob([res*,l*],exclude=[*32,x])", ["lenet", "resnet20"]),
    ],
)
def test_glob_is_a_sweep_over_the_options_of_a_group(value: str, names: list[str]) -> None:
    options = {"model": ["lenet", "resnet20", "resnet32", "vgg16"]}
    jobs = expand_sweeps([f"model={value}", "seed=3"], lambda group: options.get(group, []))
    assert jobs == [([f"model={name}", "seed=3"], f"model={name}") for name in names]


def test_options_for_a_glob_are_those_that_the_command_takes() -> None:
    assert options_for("model", TrainConfig) == sorted(group_options("model", TrainConfig))
    assert {"digits", "lenet"} <= set(options_for("experiment", TrainConfig))
    assert not [name for name in options_for("experiment", TrainConfig) if name.startswith("search_")]
    assert options_for("experiment", SearchConfig) == ["search_digits", "search_lenet"]
    assert options_for("debug", TrainConfig) == ["fast", "profile"]
    assert options_for("seed", TrainConfig) == []


@pytest.mark.parametrize("word", ["seed=range(3,1)", "seed=range(0,1,-1)"])
def test_sweep_over_no_value_is_a_user_error(word: str) -> None:
    with pytest.raises(UserError, match="lists no value"):
        expand_sweeps([word])


def test_executor_in_one_file_is_a_value_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(SerialExecutor):
        NAME = "backwards"

    assert Backwards in executors_from(Executor)
    monkeypatch.setitem(EXECUTORS, "backwards", Backwards)
    assert compose(["+experiment=digits", "executor=backwards"], TrainConfig).executor == "backwards"
    with pytest.raises(UserError, match="executor must be one of auto, serial, .*, backwards, got 'forwards'"):
        compose(["+experiment=digits", "executor=forwards"], TrainConfig)


def test_rule_in_one_file_is_an_option_of_the_command_line_without_a_yaml_file(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Halfway(SMA):
        NAME: ClassVar[str] = "halfway"

        strength: float = setting(0.5, "how far")

    monkeypatch.setitem(RULES, "halfway", Halfway)
    chosen = compose(["+experiment=resnet32", "averaging=halfway", "averaging.strength=0.25"], TrainConfig).averaging
    assert (type(chosen), chosen.strength, chosen.correction_rate) == (Halfway, 0.25, 1.0)
    assert "halfway" in group_options("averaging", TrainConfig)
    with pytest.raises(UserError, match="unknown averaging 'halfwy'; did you mean 'halfway'"):
        compose(["averaging=halfwy"], TrainConfig)


@pytest.fixture
def own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a user's recipe and optimizer to `conf` in the current folder, whose name is awkward."""
    folder = tmp_path / "it's, [mine] = x"
    for group, name, text in [
        ("experiment", "mine", """# @package _global_
# A recipe of mine.
defaults:
  - override /model: mlp
  - override /data: digits
  - override /optimizer: fast
experiment: mine
max_epochs: 3
"""),
        ("optimizer", "fast", "name: sgd\nlearning_rate: 0.25\n"),
    ]:
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(folder)
    return folder / "conf"


def test_options_in_conf_of_the_current_folder_are_options(own_options: Path) -> None:
    config = compose(["+experiment=mine"], TrainConfig)
    assert (config.experiment, config.max_epochs, config.optimizer.learning_rate) == ("mine", 3, 0.25)
    assert compose(["+experiment=digits", "optimizer=fast"], TrainConfig).optimizer.learning_rate == 0.25
    assert group_options("experiment", TrainConfig)["mine"] == "A recipe of mine."
    assert "digits" in group_options("experiment", TrainConfig)


def test_option_with_the_name_of_the_packages_is_refused_when_it_is_chosen(own_options: Path) -> None:
    (own_options / "optimizer" / "sgd.yaml").write_text("name: sgd\n")
    assert compose(["+experiment=mine"], TrainConfig).optimizer.learning_rate == 0.25
    with pytest.raises(UserError, match=r"optimizer sgd is both .* conf/optimizer/sgd.yaml; rename it"):
        compose(["optimizer=sgd"], TrainConfig)


def test_odd_files_in_conf_are_in_nobodys_way(own_options: Path) -> None:
    (own_options / "optimizer" / "folder.yaml").mkdir()
    (own_options / "optimizer" / "nowhere.yaml").symlink_to("missing")
    (own_options / "optimizer" / "old.yaml").write_bytes("# r\xe9sum\xe9\n".encode("latin-1"))
    assert compose(["+experiment=mine", "optimizer=adamw"], TrainConfig).optimizer.NAME == "adamw"
    assert {"old", "fast"} <= group_options("optimizer", TrainConfig).keys()
    assert not {"folder", "nowhere"} & group_options("optimizer", TrainConfig).keys()


def test_recipe_without_its_first_comment_says_what_it_lacks(own_options: Path) -> None:
    (own_options / "experiment" / "bare.yaml").write_text("max_epochs: 2\n")
    with pytest.raises(UserError, match=r"bare.yaml must begin with .# @package _global_.; add that line"):
        compose(["+experiment=bare"], TrainConfig)
