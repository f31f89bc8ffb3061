"""The texts of --help and --list, made from the settings classes and the option files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from crossbow_py.cli.config_files import config_dir, read_yaml
from crossbow_py.core.settings import allowed, written
from crossbow_py.predict.config import PredictConfig
from crossbow_py.search.config import MEANINGLESS, SearchConfig
from crossbow_py.train.config import (
    APPENDED_GROUPS,
    REGISTRIES,
    CommandConfig,
    EstimateConfig,
    TrainConfig,
    group_options,
    read_option,
)

_TRAIN = """\
usage: python -m crossbow_py.train [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [-m] [--list] [--help]

Trains several learners at once and keeps them together by synchronous model averaging.

  python -m crossbow_py.train +experiment=digits
  python -m crossbow_py.train +experiment=lenet num_learners=4 optimizer.learning_rate=0.05
  python -m crossbow_py.train model=resnet20 data=cifar10 data.root=/data max_epochs=5
  python -m crossbow_py.train -m +experiment=digits seed=1,2,3

  +experiment=NAME   a complete run; --list shows them
  +debug=fast        two rounds of everything, to see whether a configuration works
  config=RUN         what the config.yaml in that run's folder says, in a new folder; other keys are laid over it
  -m, --multirun     run every combination of comma-separated values, each in its own folder
  --list             the experiments and the options of every group
  --completion SHELL a script that completes all commands' words in bash, zsh or fish; source it
  --help             this text

Exit codes: 0 done, 2 a mistake in what was asked for, 143 after SIGTERM, 130 after Ctrl-C, 1 anything else.
"""

_ESTIMATE = """\
usage: python -m crossbow_py.estimate [+experiment=NAME] [memory=AMOUNT] [GROUP=OPTION ...] [KEY=VALUE ...] [--help]

Says how large batches may be, how many learners fit, and how many workers feed them. It takes what crossbow_py.train
takes, and the keys memory, held_back and images_per_s. Neither the data set nor the device has to be there.

  python -m crossbow_py.estimate +experiment=resnet50 memory=16GiB
  python -m crossbow_py.estimate +experiment=resnet32 memory=8GiB num_learners=4 precision=fp32
  python -m crossbow_py.estimate model=custom model.target=pkg.mod.fn data=cifar10 memory=24GiB output_dir=sized
  python -m crossbow_py.estimate +experiment=flowers

With memory, tensors are counted without a device; it is taken for a GPU unless device=cpu.
Without memory, a visible GPU is measured by real rounds, and a CPU is held against the memory that is free now.
Nothing is written unless output_dir is set: then estimate.json, and with matplotlib estimate.png.

Exit codes: 0 answered, also when nothing fits; 2 a mistake in what was asked for; 1 anything else.
"""

_PREDICT = """\
usage: python -m crossbow_py.predict models=[RUN,...] [data=NAME] [KEY=VALUE ...] [--help]

Runs trained models over the test part of a data set, each alone and all as an ensemble: the mean of their
probabilities. Shows accuracies, images/s, and how long an answer takes for batches of 1 to 64 samples.

  python -m crossbow_py.predict models=[runs/digits/a,runs/digits/b]     # or just their folders
  python -m crossbow_py.predict models=[runs/digits/a/model_0.safetensors,runs/digits/b] executor=serial
  python -m crossbow_py.predict models=[runs/lenet/a] data=fashion_mnist latency_s=0 output_dir=predicted

A run with averaging=independent has a model for every learner, and its folder stands for all of them. Without data
the models' own data set is taken, which must be the same. Models of one architecture run as rows of one bank.
Writes predict.json, and predictions.npz: members [K, N, C], ensemble [N, C], targets [N], names [K].

Exit codes: 0 done, 2 a mistake in what was asked for, 130 after Ctrl-C, 1 anything else.
"""

_SEARCH = """\
usage: python -m crossbow_py.search [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [-m] [--list] [--help]

Trains many configurations of a run, the trials, for a while and the best of them on, packed side by side on a device.
It takes what crossbow_py.train takes, as what all trials have in common, and the space of what differs between them.
Trials are compared on validation data, data.validation_fraction=0.1 of the training data when nothing is said; the
test data is measured once, for the best.

  python -m crossbow_py.search +experiment=search_digits
  python -m crossbow_py.search +experiment=search_lenet sampler=tpe num_trials=60 max_epochs=9
  python -m crossbow_py.search +experiment=search_digits '+space.batch_size=[16,32]' packing=none
  python -m crossbow_py.search model=lenet data=mnist '+space.optimizer.learning_rate={low:0.001,high:0.5,log:true}'

The space of an experiment, in YAML; conf/experiment/search_digits.yaml is one to copy:

  space:
    optimizer: [sgd, adamw]                                        # choices, short for {choices: [sgd, adamw]}
    optimizer.learning_rate: {low: 0.001, high: 0.5, log: true}    # a range, spread evenly by logarithm
    optimizer.momentum: {low: 0.0, high: 0.9, step: 0.1, when: {optimizer: sgd}}    # exists only with sgd
    batch_size: {low: 16, high: 64, step: 16}                      # of whole numbers, as both ends are

What can be searched: model, optimizer and schedule with all that is beneath them, batch_size, label_smoothing, seed,
data.crop_padding, data.flip and data.random_erasing. With sampler=grid, every combination is a trial; ranges then have
a step, or num values: {low: 0.001, high: 0.1, log: true, num: 3}.

The same command goes on with a search that was stopped or killed; nothing that is finished is trained again. Started
while the search runs, it joins: workers share the trials. The default storage serves the processes of one machine.
Several machines need a data base, the same in each command: storage=postgresql://USER@HOST/NAME or mysql://...; where
output_dir is a folder they share too, any of them trains a trial on, and elsewhere it begins that trial anew.

Writes search.json (trials, best, times), model.safetensors of the best trial, console.log, tensorboard, and with
matplotlib parallel_coordinates.png and learning_curves.png. Shows the crossbow_py.train command of the best trial.

Exit codes: 0 done, 2 a mistake in what was asked for, 143 after SIGTERM, 130 after Ctrl-C, 1 anything else.
"""

_USAGES: dict[type[CommandConfig], str] = {
    TrainConfig: _TRAIN,
    EstimateConfig: _ESTIMATE,
    PredictConfig: _PREDICT,
    SearchConfig: _SEARCH,
}
# Keys that mean something else to another command than to training.
_MEANINGS: dict[tuple[type[CommandConfig], str], str] = {
    (EstimateConfig, "output_dir"): "folder for estimate.json and estimate.png; null writes nothing",
    (SearchConfig, "max_epochs"): "passes over the training set of a trial that trains to the end",
    (SearchConfig, "max_time_s"): "stop the search after that many seconds, and take the best so far",
    (SearchConfig, "target_accuracy"): "stop the search at that validation accuracy, between 0 and 1",
    (SearchConfig, "num_learners"): "a trial is one learner",
    (SearchConfig, "seed"): "seed of what is sampled, of the sample order of all trials, and of each trial's own seed",
    (SearchConfig, "experiment"): "name of the search's recipe; chosen with +experiment=NAME",
    (SearchConfig, "output_dir"): "the search's folder; null is runs/<experiment>/<time>",
    (SearchConfig, "resume"): "auto goes on with or joins the newest unfinished search like this one; null never, or "
    "the path of a search's folder",
    **{(SearchConfig, key): "not in a search" for key in MEANINGLESS},
}


@dataclass(frozen=True)
class Key:
    """A key of the command line, in words.

    Attributes:
        name: as it is written, dotted.
        default: its value when nothing is said, as it is written.
        meaning: a line.
        values: what it may be.
        options: those of its group that have it; none where all do, and for a key of no group.
    """

    name: str
    default: str
    meaning: str
    values: str
    options: tuple[str, ...] = ()


def help_text(kind: type[CommandConfig] = TrainConfig) -> str:
    """Usage, then every key with its meaning and default, group by group; `kind` is the command's configuration."""
    lines = [_USAGES[kind], "Keys (with the value they have when nothing is said):"]
    lines += map(_key_line, command_keys(kind))
    for field in dataclasses.fields(kind):
        if field.name in REGISTRIES:
            lines += ["", f"{field.name}=OPTION: {field.metadata['help']}"]
            lines += [f" OPTION is one of {', '.join(group_options(field.name))}"]
            lines += map(_key_line, group_keys(field.name))
    return "\n".join(lines)


def list_text() -> str:
    """The experiments and the options of every group, each with a line on what it is."""
    blocks = []
    for group in (*APPENDED_GROUPS, *REGISTRIES):
        plus = "+" if group in APPENDED_GROUPS else ""
        options = option_meanings(group)
        width = max(map(len, options))
        lines = [f"  {name:<{width}}  {meaning}" for name, meaning in options.items()]
        blocks.append("\n".join([f"{plus}{group}=", *lines]))
    return "\n\n".join(blocks)


def option_meanings(group: str) -> dict[str, str]:
    """The options of a group, each with a line on what it is."""
    return {name: comment or _meaning(group, name) for name, comment in group_options(group).items()}


def command_keys(kind: type[CommandConfig]) -> list[Key]:
    """The keys of a command that are in no group."""
    said = read_yaml(config_dir() / f"{kind.CONF}.yaml")
    keys = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            owner: type[Any] = type(field.default)
            keys += [_key(owner, each, f"{field.name}.") for each in dataclasses.fields(owner)]
        elif field.name not in REGISTRIES:
            key, meaning = _key(kind, field), _MEANINGS.get((kind, field.name))
            default = written(said[field.name]) if field.name in said else key.default
            keys.append(dataclasses.replace(key, default=default, meaning=meaning or key.meaning))
    return keys


def group_keys(group: str) -> list[Key]:
    """Every key of a group once for each of its meanings and defaults, with the options that have it."""
    owners: dict[str, dict[Key, list[str]]] = {}
    for option, settings in REGISTRIES[group].items():
        for field in dataclasses.fields(settings):
            key = _key(settings, field, f"{group}.")
            owners.setdefault(field.name, {}).setdefault(key, []).append(option)
    everyone = len(REGISTRIES[group])
    return [
        key if len(options) == everyone else dataclasses.replace(key, options=tuple(options))
        for keys in owners.values()
        for key, options in keys.items()
    ]


def _key(owner: type[Any], field: dataclasses.Field[Any], prefix: str = "") -> Key:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Key(prefix + field.name, written(default), field.metadata.get("help", ""), allowed(owner, field.name))


def _key_line(key: Key) -> str:
    options = f" ({', '.join(key.options)})" if key.options else ""
    return f"  {key.name + '=' + key.default:<35} {key.meaning}{options}"


def _meaning(group: str, option: str) -> str:
    """The first line of the docstring of the class an option file names."""
    registered = REGISTRIES.get(group, {}).get(read_option(group, option).get("name", ""))
    return (registered.__doc__ or "").strip().split("\n")[0].rstrip(":") if registered else ""
