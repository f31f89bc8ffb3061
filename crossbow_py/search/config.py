"""The configuration of a search, and the configuration of one of its trials as a training run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from crossbow_py.cli.configuration import group_options, read_option
from crossbow_py.cli.overrides import as_override
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting, shown, suggestion, written
from crossbow_py.packs.policies import Policy
from crossbow_py.search.hyperband import Bracket, Method, make_brackets
from crossbow_py.search.space import Space, laid_over
from crossbow_py.train.config import JobConfig, TrainConfig, config_to_mapping, with_values
from crossbow_py.train.evaluation.evaluator import PERPLEXITY

_SEARCHED_GROUPS = ("model", "optimizer", "schedule")
_SEARCHED = ("batch_size", "label_smoothing", "seed", "data.crop_padding", "data.flip", "data.random_erasing")
_MEASURED = ("accuracy", "loss")
SamplerName = Literal["random", "tpe", "grid", "gp", "cmaes", "qmc", "nsgaii"]
# Keys of the whole search: a trial alone has the default of a run.
_OF_THE_SEARCH = ("experiment", "output_dir", "resume", "max_time_s", "target_accuracy", "checkpoint_every_s")

_USAGE = """\
usage: python -m crossbow_py.search [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [-m] [--list] [--help]

Trains many configurations of a run, the trials, for a while and the best of them on, packed side by side on a device.
It takes those keys of crossbow_py.train that all trials have in common, and the space of what differs between them.
Trials are compared on validation data, data.validation_fraction=0.1 of the training data unless set otherwise; the
test data is measured once, for the best.

  python -m crossbow_py.search +experiment=search_digits
  python -m crossbow_py.search +experiment=search_lenet sampler=tpe num_trials=60 max_epochs=9
  python -m crossbow_py.search +experiment=search_digits '+space.batch_size=[16,32]' packing=none
  python -m crossbow_py.search +experiment=search_digits metric=f1 metrics.f1.target=pkg.mod.F1 maximize=true
  python -m crossbow_py.search model=lenet data=mnist '+space.optimizer.learning_rate={low:0.001,high:0.5,log:true}'
  torchrun --standalone --nproc-per-node=gpu -m crossbow_py.search +experiment=search_lenet        # a worker a GPU

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
Several machines need a storage that all reach, the same in each command: storage=postgresql://USER@HOST/NAME; where
output_dir is a folder they share too, any of them trains a trial on, and elsewhere it begins that trial anew.
launcher=ray starts workers over a cluster of Ray, or on this machine, and follows the search until they end.

Writes search.json (trials, best, times), model.safetensors of the best trial, console.log, tensorboard, and with
matplotlib parallel_coordinates.png and learning_curves.png. Shows the crossbow_py.train command of the best trial.

Exit codes: 0 done, 2 a mistake in what was asked for, 143 after SIGTERM, 130 after Ctrl-C, 1 anything else.
"""


@dataclass(frozen=True, kw_only=True)
class SearchConfig(JobConfig):
    """Everything `crossbow_py.search` can be told: what its trials are, and how they are searched and packed."""

    CONF: ClassVar[str] = "search"
    USAGE: ClassVar[str] = _USAGE
    MEANINGS: ClassVar[Mapping[str, str]] = {
        "seed": "seed of what is sampled, of the sample order of all trials, and of each trial's own seed",
        "experiment": "name of the search's recipe; chosen with +experiment=NAME",
        "output_dir": "the search's folder; null is runs/<experiment>/<time>",
        "resume": "auto goes on with or joins the newest unfinished search like this one; null never, or "
        "the path of a search's folder",
    }
    LAID_OVER: ClassVar[Mapping[str, Callable[[Any, str, Any], Any]]] = {"space": laid_over}

    max_epochs: float = setting(9.0, "passes over the training set of a trial that trains to the end", above=0)
    max_time_s: float | None = setting(
        None, "stop the search after that many seconds, and take the best so far", above=0
    )
    target_accuracy: float | None = setting(
        None, "stop the search at that validation accuracy, between 0 and 1", above=0, maximum=1
    )
    space: dict[str, Any] = setting({}, "what is searched: a mapping from keys of a run to ranges or choices")
    # To a type checker that is str; help, completion and the reference list the names.
    sampler: SamplerName | str = setting(
        "random",
        "how trials are sampled: at random, every point of a grid, by another of Optuna's, or by a dotted name",
    )
    method: Method = setting(
        "hyperband", "which trials train on: hyperband, successive_halving, or none (all of them to the end)"
    )
    num_trials: int | None = setting(None, "trials in all; null is one pass of the method", minimum=1)
    min_epochs: float = setting(1.0, "epochs before trials are compared for the first time", above=0)
    eta: int = setting(3, "one in that many trials goes on from rung to rung", minimum=2)
    metric: str = setting(
        "accuracy", "what is compared, of the validation data: accuracy (greater is better), loss, or one of metrics"
    )
    maximize: bool | None = setting(
        None, "whether greater values of a metric are better; null is what it says itself, as those of torchmetrics do"
    )
    packing: Policy = setting(
        "signature",
        "which trials train side by side: signature (those that fuse), batch_size, random, knn, or none (one by one)",
    )
    max_pack_size: int = setting(32, "most trials side by side", minimum=1)
    storage: str | None = setting(
        None,
        "journal:PATH, or an address as sqlite:///PATH, postgresql://..., mysql://..., redis://..., grpc://HOST:PORT; "
        "null is a journal in the search's folder",
    )
    study: str | None = setting(None, "name of the search in the storage; null is the experiment's")
    checkpoint_every_s: float | None = setting(
        300.0, "save trials between rungs every that many seconds; null only when the search is stopped", above=0
    )
    lease_s: float = setting(
        60.0, "seconds without a sign of life after which other workers take over what a worker holds", above=1
    )

    def __post_init__(self) -> None:
        _check_sampler(self.sampler)
        super().__post_init__()
        if self.metric not in _MEASURED and not {self.metric, self.metric.partition("/")[0]} & set(self.metrics):
            remedy = f"name one of them, or give metrics.{self.metric or 'NAME'}.target"
            if self.metric == PERPLEXITY:
                remedy = "metric=loss orders trials alike"
            raise UserError(
                f"metric must be one of {', '.join([*_MEASURED, *self.metrics])}, got {self.metric!r}; {remedy}."
            )
        if self.metric in _MEASURED and self.maximize is not None:
            raise UserError(
                f"maximize={written(self.maximize)} is for a metric of metrics, got metric={self.metric}; leave it out."
            )
        if self.target_accuracy is not None and self.metric != "accuracy":
            raise UserError(
                f"target_accuracy ends a search by metric=accuracy, got metric={self.metric}; leave one of them out."
            )
        if self.data.augmentation.mixes:
            raise UserError(
                f"{self.data.augmentation.shown_mixing} mixes batches, which trials share; set mixup and cutmix to 0."
            )
        for parameter in self.parsed_space.parameters:
            _check_key(parameter.key)
        for params in self.parsed_space.corners():
            _check_options(self, params)
            trial_config(self, params, seed=0)  # which a run would refuse
        self.brackets()

    @property
    def parsed_space(self) -> Space:
        """The parsed `space`."""
        return Space.from_mapping(self.space)

    def brackets(self) -> tuple[Bracket, ...]:
        """Return the brackets; a grid has as many trials as points. Raises UserError if there can be none."""
        num_trials = self.num_trials
        if self.sampler == "grid":
            points = len(self.parsed_space.grid())
            if num_trials is not None and num_trials > points:
                raise UserError(
                    f"num_trials={num_trials} is more than the {points} points of the grid; lower it, or set null."
                )
            num_trials = num_trials or points
        return make_brackets(
            self.method, num_trials=num_trials, min_epochs=self.min_epochs, max_epochs=self.max_epochs,
            eta=self.eta,
        )  # fmt: skip


def _check_sampler(name: object) -> None:
    """Raise UserError for what is neither the name of a sampler nor a dotted one."""
    known = get_args(SamplerName)
    if isinstance(name, Mapping):
        raise UserError(
            f"sampler must be a name, got {shown(name)}; for its settings write a function that takes a seed."
        )
    if isinstance(name, str) and name not in known and "." not in name:
        meant = name.lower().removesuffix("sampler")  # as Optuna's class is called
        remedy = f"did you mean {meant!r}?" if meant in known else "write one of these."
        raise UserError(
            f"sampler must be one of {', '.join(known)}, or a dotted name such as package.module.Sampler, got "
            f"{shown(name)}; {remedy}"
        )


def _check_options(config: SearchConfig, params: Mapping[str, Any]) -> None:
    """Raise UserError for a key that only some of the searched options of a group have, if it has no `when`."""
    for key in params:
        group, _, name = key.partition(".")
        if not name or params.get(group) not in group_options(group, TrainConfig):
            continue
        choices = next(each for each in config.parsed_space.parameters if each.key == group).ends()
        having = [choice for choice in choices if name.split(".")[0] in _option_fields(group, choice)]
        if having and params[group] not in having:
            wanted = as_override(having[0] if len(having) == 1 else having)
            raise UserError(f"space: {key} is no key of {group}={params[group]}; give it when: {{{group}: {wanted}}}.")


def _option_fields(group: str, option: Any) -> set[str]:
    """Return the keys beneath a group if an option of it is chosen; none for an unknown option."""
    if option not in group_options(group, TrainConfig):
        return set()
    name = read_option(group, option).get("name", option)
    return {field.name for field in dataclasses.fields(TrainConfig.GROUPS[group][name])}


def _check_key(key: str) -> None:
    group, _, field = key.partition(".")
    if field and group in _SEARCHED:
        raise UserError(_nothing_beneath(key, group))
    if key.endswith(".name") and group in _SEARCHED_GROUPS:
        raise UserError(f"space: {key} comes with its own settings; search {group}, with names of its options.")
    if key in _SEARCHED or group in _SEARCHED_GROUPS:
        return
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    if group not in known:
        raise UserError(f"space has no key {key!r}{suggestion(group, [*_SEARCHED, *_SEARCHED_GROUPS])}")
    raise UserError(
        f"space: {key} is the same for all trials of a search; what can be searched are "
        f"{', '.join(f'{own}, {own}.*' for own in _SEARCHED_GROUPS)}, {', '.join(_SEARCHED)}."
    )


def trial_config(config: SearchConfig, params: Mapping[str, Any], seed: int) -> TrainConfig:
    """Return the configuration of a trial as a run with one learner. Raises UserError if its parameters do not fit."""
    known = {field.name for field in dataclasses.fields(TrainConfig)} - {*_OF_THE_SEARCH}
    plain = {key: copy.deepcopy(value) for key, value in config_to_mapping(config).items() if key in known}
    order_seed = config.seed if config.order_seed is None else config.order_seed
    plain.update(
        num_learners=1, seed=seed, order_seed=order_seed,
        averaging={"name": "sma", "batch_norm": "mean"},  # trials are compared with their running statistics
    )  # fmt: skip
    return with_values(plain, config.parsed_space.meant(params), "space", _nothing_beneath)


def _nothing_beneath(key: str, known: str) -> str:
    return (
        f"space has {key!r}, and a run has nothing beneath {known!r}; a range is written "
        f"{known}: {{low: ..., high: ...}}, and --help shows the keys."
    )
