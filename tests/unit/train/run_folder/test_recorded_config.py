"""`config=RUN`: another run begins with a run's configuration, and overrides change it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.averaging import LocalSGD
from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.configuration import compose, group_options
from crossbow_py.cli.overrides import expand_sweeps
from crossbow_py.core.errors import UserError
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.predict.config import PredictConfig
from crossbow_py.predict.trained_models import find_models
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig, config_to_mapping
from crossbow_py.train.run_folder.recorded_config import composed, overrides_of, recorded

RECIPES = [name for name in group_options("experiment", TrainConfig) if not name.startswith("search_")]
TOLD = [
    "+experiment=lenet", "data=fashion_mnist", "data.root=/some where/else", "optimizer=adamw",
    "optimizer.learning_rate=[0.001,1e-5]", "averaging=grouped_sma", "averaging.group_size=1", "num_learners=2",
    "schedule=multistep", "schedule.milestones=[3,5.5]", "max_epochs=null", "max_time_s=60",
    "init_from='a=b.safetensors'",
]  # fmt: skip


@functools.cache
def configuration(*overrides: str) -> TrainConfig:
    return compose(overrides, TrainConfig)


def run(folder: Path, *overrides: str, without: tuple[str, str] | None = None) -> Path:
    """Return a run folder with this configuration; a key of a group may be left out, as in earlier versions."""
    own = dataclasses.replace(configuration(*overrides), output_dir=str(folder), resume="auto")
    plain: dict[str, Any] = config_to_mapping(own)
    if without is not None:
        del plain[without[0]][without[1]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(write_yaml(plain))
    return folder


def digits_with(folder: Path, **changes: Any) -> str:
    """Write the configuration of a run with changes. Returns the word that names it."""
    plain = {**config_to_mapping(configuration("+experiment=digits")), **changes}
    (folder / "config.yaml").write_text(json.dumps(plain))
    return f"config={folder}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        TOLD,
        ["model=custom", "model.target=mine.net", "model.args={width:[1,2],name:'a b',inner:{x:null}}", "data=digits"],
        ["+experiment=digits", "averaging=independent", "num_learners=3", "+debug=fast"],
        *[[f"+experiment={name}"] for name in RECIPES],
    ],
)
def test_recorded_run_is_told_the_same_in_a_folder_of_its_own(tmp_path: Path, overrides: list[str]) -> None:
    targets = [text for text in overrides if text.startswith("model.target=")]
    words = [f"config={run(tmp_path, *overrides)}", *targets]
    assert composed(words, TrainConfig) == configuration(*overrides)


def test_recorded_run_may_be_named_by_its_file(tmp_path: Path) -> None:
    assert composed([f"config={run(tmp_path, *TOLD)}/config.yaml"], TrainConfig) == configuration(*TOLD)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a[b]", "seed=1,x={y"])
@pytest.mark.parametrize("multirun", [False, True])
def test_folder_with_brackets_in_its_name_is_found_where_it_is_quoted(
    tmp_path: Path, name: str, multirun: bool
) -> None:
    word = f"config='{run(tmp_path / name, '+experiment=digits', 'seed=3')}'"
    words = expand_sweeps([word, "batch_size=4"])[0][0] if multirun else [word]
    assert composed(words, TrainConfig).seed == 3


@pytest.mark.slow
@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${oc.env:HOME}", r"a\\${b}", "a ${x} 'b' ${y}"])
def test_text_that_looks_like_an_interpolation_stays_text(tmp_path: Path, text: str) -> None:
    assert composed([digits_with(tmp_path, init_from=text)], TrainConfig).init_from == text


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a\\\\\n", "a\n", "null\n", 'a"\n', "${oc.env:HOME}\n"])
def test_text_that_ends_a_line_stays_as_it_is(tmp_path: Path, text: str) -> None:
    word = digits_with(tmp_path, model={"name": "custom", "target": "mine.net", "args": {"text": text}})
    assert composed([word, "model.target=mine.net"], TrainConfig).model.args["text"] == text


@pytest.mark.parametrize(
    "args",
    [
        {"x:${oc.env:SECRET},y": 1},
        {"x=${oc.env:SECRET}": 1},
        {"${oc.env:SECRET}": 1},
        {"x": {"y:${oc.env:SECRET},z": 1}},
        {"x": [{"y:${oc.env:SECRET},z": 1}]},
        {"x": [[{"y:${oc.env:SECRET},z": 1}]]},
        {"a.b": 1},
        {" x": 1},
        {"": 1},
        {"x\n": 1},
    ],
)
@pytest.mark.parametrize("given", [[], ["model.target=mine.net"], ["model=mlp"]])
def test_key_of_a_recorded_run_that_is_more_than_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], given: list[str]
) -> None:
    monkeypatch.setenv("SECRET", "hush")
    word = digits_with(tmp_path, model={"name": "custom", "target": "mine.net", "args": args})
    with pytest.raises(UserError, match=r"keys of letters, digits, _, / and -, got ") as refused:
        composed([word, *given], TrainConfig)
    assert "hush" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "!!binary JHtvYy5lbnY6U0VDUkVUfQ==",
        "!!python/object/apply:pathlib.PosixPath ['${oc.env:SECRET}']",
        "!!str '${oc.env:SECRET}'",
        "!<tag:yaml.org,2002:binary> JHtvYy5lbnY6U0VDUkVUfQ==",
        "!!set {a}",
    ],
)
def test_recorded_run_with_a_yaml_tag_is_refused(tmp_path: Path, value: str) -> None:
    folder = run(tmp_path, "data=digits", "model=custom", "model.target=mine.net", "model.args={x:here}")
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("x: here", f"x: {value}"))
    with pytest.raises(UserError, match="must have no tags"):
        composed([f"config={folder}", "model.target=mine.net"], TrainConfig)


def test_code_that_a_recorded_run_names_is_called_only_when_it_is_named_again(tmp_path: Path) -> None:
    folder = run(tmp_path, "data=digits", "model=custom", "model.target=os.system", "model.args={command:'true'}")
    with pytest.raises(UserError, match=r"names model.target=os.system, code that would be run; .* say it again"):
        composed([f"config={folder}"], TrainConfig)
    assert composed([f"config={folder}", "model=mlp"], TrainConfig).model.NAME == "mlp"
    assert composed([f"config={folder}", "model.target=mine.net"], TrainConfig).model.target == "mine.net"


@pytest.mark.slow
def test_transform_that_a_recorded_run_names_is_called_only_when_it_is_named_again(tmp_path: Path) -> None:
    named = ["data.test_transform.target=os.system", "data.test_transform.command=x"]
    folder = run(tmp_path, "+experiment=digits", *named)
    for words in ([], ["data.test_transform={}"], ["data.transform.target=mine.crop"], ["data.flip=true"]):
        with pytest.raises(UserError, match="names data.test_transform.target=os.system, code that would be run"):
            composed([f"config={folder}", *words], TrainConfig)
    own = composed([f"config={folder}", "data.test_transform.target=mine.crop"], TrainConfig).data
    assert own.test_transform == {"target": "mine.crop", "command": "x"}
    assert composed([f"config={folder}", "data=mnist"], TrainConfig).data.test_transform == {}
    assert composed([f"config={folder}", "~data.test_transform"], TrainConfig).data.test_transform == {}


@pytest.mark.slow
def test_metric_that_a_recorded_run_names_is_called_only_when_it_is_named_again(tmp_path: Path) -> None:
    folder = run(tmp_path, "+experiment=digits", "metrics.m.target=os.system", "metrics.m.command='true'")
    for words in ([], ["metrics={}"], ["metrics.m={x: 1}"], ["metrics.n.target=mine.metric"]):
        with pytest.raises(UserError, match="names metrics.m.target=os.system, code that would be run; .* say it aga"):
            composed([f"config={folder}", *words], TrainConfig)
    for words in (["~metrics"], ["~metrics.m"]):
        assert composed([f"config={folder}", *words], TrainConfig).metrics == {}
    again = composed([f"config={folder}", "metrics.m.target=mine.metric"], TrainConfig)
    assert again.metrics == {"m": {"target": "mine.metric", "command": "true"}}


@pytest.mark.slow
def test_listeners_that_a_recorded_run_names_are_called_only_when_they_are_named_again(tmp_path: Path) -> None:
    folder = run(tmp_path, "+experiment=digits", "listeners=[os.getcwd]")
    for words in ([], ["listeners.0=mine.Listener"], ["logger=[]"]):
        with pytest.raises(UserError, match=r"names listeners=\[os.getcwd\], code that would be run; .* say it again"):
            composed([f"config={folder}", *words], TrainConfig)
    for words, expected in ((["~listeners"], ()), (["listeners=[]"], ()), (["listeners=[mine.Own]"], ("mine.Own",))):
        assert composed([f"config={folder}", *words], TrainConfig).listeners == expected


@pytest.mark.slow
def test_services_that_a_recorded_run_records_to_are_used_only_when_they_are_named_again(tmp_path: Path) -> None:
    folder = run(tmp_path, "logger=[tensorboard,wandb]")
    for words in ([], ["logger.0=wandb"]):
        with pytest.raises(UserError, match=r"names logger=\[tensorboard,wandb\], which would record under your"):
            composed([f"config={folder}", *words], TrainConfig)
    assert composed([f"config={folder}", "logger=[mlflow]"], TrainConfig).logger == ("mlflow",)
    assert composed([f"config={run(tmp_path / 'none', 'logger=[]')}"], TrainConfig).logger == ()


def test_keys_and_groups_are_laid_over_a_recorded_run_wherever_they_stand(tmp_path: Path) -> None:
    folder = run(tmp_path, *TOLD)
    own = ["averaging=local_sgd", "optimizer.beta1=0.5", "seed=7", f"config={folder}", "+debug=fast", "resume=auto"]
    found = composed(own, TrainConfig)
    assert isinstance(found.averaging, LocalSGD)
    assert found == dataclasses.replace(
        configuration(*TOLD), averaging=configuration("averaging=local_sgd").averaging, seed=7,
        max_rounds=2, executor="serial", resume="auto",
        max_evaluation_batches=2, optimizer=dataclasses.replace(configuration(*TOLD).optimizer, beta1=0.5),
    )  # fmt: skip


def test_estimate_takes_a_recorded_run(tmp_path: Path) -> None:
    found = composed([f"config={run(tmp_path, *TOLD)}", "memory=8GiB"], EstimateConfig)
    assert (found.memory, found.data, found.init_from) == ("8GiB", configuration(*TOLD).data, "a=b.safetensors")


def test_recipe_keeps_its_name_and_another_name_none() -> None:
    assert overrides_of(configuration("+experiment=digits", "seed=4"))[0] == "+experiment=digits"
    own = dataclasses.replace(configuration("+experiment=digits"), experiment="of_a_later_version")
    assert compose(overrides_of(own), TrainConfig).experiment == "custom"


def test_key_that_an_earlier_version_did_not_have_is_what_it_stood_for_then(tmp_path: Path) -> None:
    folder = run(tmp_path, "+experiment=digits", without=("averaging", "rate_scaling"))
    assert configuration("+experiment=digits").averaging.rate_scaling == "sqrt"
    assert recorded(str(folder)).averaging.rate_scaling == "none"


def test_rule_that_is_gone_is_told_and_its_models_are_found(tmp_path: Path) -> None:
    folder = run(tmp_path, "+experiment=digits", "averaging=grouped_sma")
    plain = json.loads(json.dumps(read_yaml(folder / "config.yaml")))
    plain["averaging"] |= {"averaging_momentum": 0.9, "final_correction_rate": None, "correction_rate": None}
    (folder / "config.yaml").write_text(json.dumps(plain))
    with pytest.raises(UserError, match="is of averaging=grouped_sma with Crossbow's average model"):
        composed([f"config={folder}"], TrainConfig)
    (folder / "model.safetensors").touch()
    (found,) = find_models([str(folder)])
    assert found.file == folder / "model.safetensors"


def test_tuner_of_an_earlier_run_maximises_throughput(tmp_path: Path) -> None:
    folder = run(tmp_path, "+experiment=digits", "num_learners=auto", without=("auto_tuner", "objective"))
    assert recorded(str(folder)).auto_tuner.objective == "throughput"


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["config=nowhere"], TrainConfig, "config=nowhere is neither the folder of a run nor a config.yaml"),
        (["config=~nobody-there/a"], TrainConfig, "config=~nobody-there/a is in the home folder of an unknown user"),
        ([f"config={'x' * 300}"], TrainConfig, "config must have names of at most 255 bytes"),
        (["config='a\x00b'"], TrainConfig, "which has a null character"),
        (["config=a", "config=b"], TrainConfig, "config is given 2 times"),
        (["config=a", "+experiment=digits"], TrainConfig, "config=a is a whole run, as .experiment is"),
        (["config=a"], SearchConfig, "config=a is for the commands train and estimate"),
        (["config=a"], PredictConfig, "config=a is for the commands train and estimate"),
    ],
)
def test_config_that_cannot_be_taken_is_refused(overrides: list[str], kind: type[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        composed(overrides, kind)


def test_config_that_is_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="loop is neither the folder of a run nor a config.yaml"):
        composed([f"config={tmp_path / 'loop'}"], TrainConfig)


def test_config_of_a_search_is_refused_with_where_its_best_trial_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("space: {seed: [1]}\n")
    with pytest.raises(UserError, match="give the folder best in it"):
        composed([f"config={tmp_path}"], TrainConfig)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"optimizer": {"name": "sgd", 1: 2}}, "unknown key optimizer.1; known"),
        ({"optimizer": {"name": "sgd", True: 2}}, "unknown key optimizer.True; known"),
        ({"model": {"hidden": [8]}}, "model has keys but no name"),
    ],
)
def test_mistake_in_a_recorded_configuration_names_its_file(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    (tmp_path / "config.yaml").write_text(write_yaml({**config_to_mapping(configuration()), **more}))
    for read in (lambda: composed([f"config={tmp_path}"], TrainConfig), lambda: find_models([str(tmp_path)])):
        with pytest.raises(UserError, match=f"^{tmp_path}/config.yaml: {message}"):
            read()
