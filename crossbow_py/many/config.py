"""The configuration of `crossbow_py.many`, and the members that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.settings import dotted, setting, shown, written
from crossbow_py.data.sources import DataSource
from crossbow_py.many.members import Member, folds
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD
from crossbow_py.train.config import TrainConfig, config_to_mapping, first_model, with_values

_OWN = ("model", "optimizer", "schedule", "batch_size", "max_epochs", "label_smoothing", "data")
_OF_DATA = ("crop_padding", "flip", "random_erasing")

_USAGE = """\
usage: python -m crossbow_py.many [+experiment=NAME] [seeds=N] [folds=K] [members=[...]] [GROUP=OPTION ...] [--help]

Trains many models side by side: seeds, folds of the training data, and settings that differ, in every combination.
It takes the recipes of crossbow_py.train. Each member is one learner that nothing is averaged with: what recipes say
of num_learners and averaging means nothing here.

  python -m crossbow_py.many +experiment=digits seeds=8
  python -m crossbow_py.many +experiment=digits folds=5 seeds=8 max_epochs=10 output_dir=runs/study
  python -m crossbow_py.many +experiment=digits seeds=4 'members=[{optimizer.learning_rate: 0.01}, {batch_size: 64}]'
  python -m crossbow_py.many +experiment=digits seeds=4 members=variants.yaml

members is a list, or a YAML file with one, of what each has of its own: name, and keys of optimizer, schedule and
model, batch_size, max_epochs, label_smoothing, data.crop_padding, data.flip and data.random_erasing.
With folds every member is measured on the fold that it does not train on, and all predictions that were made out of
fold are kept. The same command with an output_dir goes on where it was stopped or killed.

Writes results.json (all members), curves.png with matplotlib, members/ (weights), adapters/ with model.lora,
out_of_fold.npy with folds, console.log and tensorboard.

Exit codes: 0 done, 2 a mistake in what was asked for, 143 after SIGTERM, 130 after Ctrl-C, 1 anything else.
"""


@dataclass(frozen=True, kw_only=True)
class ManyConfig(TrainConfig):
    """Everything `crossbow_py.many` can be told: a run, and the members that differ from it."""

    USAGE: ClassVar[str] = _USAGE
    # Keys of a run that mean nothing to members. Recipes may have them.
    UNUSED: ClassVar[Sequence[str]] = (
        "num_learners", "max_learners", "averaging", "auto_tuner", "accumulate", "compile_model", "on_nonfinite",
        "count_effective_samples", "class_weights", "learning_statistics", "resume", "max_evaluation_batches",
        "trace", "profile", "distributed", "max_samples", "max_time_s", "target_accuracy", "target_loss",
        "checkpoint_every_epochs", "keep_checkpoints", "listeners",
    )  # fmt: skip
    MEANINGS: ClassVar[Mapping[str, str]] = {
        "logger": "what records it beside its own files: [tensorboard], or [] for nothing",
        "seed": "seed of the order of samples and of the folds; member n of a combination has seed + n",
        "output_dir": "the folder, which the same command goes on in; null is a new runs/<experiment>/<time>",
    }

    checkpoint_every_s: float | None = setting(
        60.0, "seconds between checkpoints of members on their way; null only when it is stopped", above=0
    )
    seeds: int = setting(1, "seeds that each combination of the others is trained with", minimum=1)
    folds: int | None = setting(None, "folds of the training data, each held out in turn; null for none", minimum=2)
    members: str | tuple[dict[str, Any], ...] | None = setting(
        None, "what differs beside seeds and folds: a list of mappings from keys to values, or a YAML file with one"
    )
    max_pack_size: int = setting(256, "most members side by side", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for variant in self.variants():
            self._changed(variant)
        if set(self.logger) - {TENSORBOARD}:
            raise UserError(f"logger of members is [tensorboard] or [], got {shown([*self.logger])}; leave others out.")
        changed = {"class_weights": None, "accumulate": 1, "count_effective_samples": False}
        for key, usual in changed.items():  # which change what is learned: no recipe may have them unnoticed
            if getattr(self, key) != usual:
                raise UserError(f"{key} is for a run, got {written(getattr(self, key))}; set {key}={written(usual)}.")
        if self.max_epochs is None:
            raise UserError("max_epochs ends members, got null; set a number.")

    def variants(self) -> list[Mapping[str, Any]]:
        """Return what differs beside seeds and folds, one mapping at least. Raises UserError."""
        given: Any = self.members
        if isinstance(given, str):
            path = given_path("members", given)
            if not path.is_file():
                raise UserError(f"members={given} is no file; name a YAML file with a list, or write the list itself.")
            given = read_yaml(path)
        if given is None:
            return [{}]
        given = [*given] if isinstance(given, tuple) else given
        if not isinstance(given, list) or not given or not all(isinstance(each, Mapping) for each in given):
            raise UserError(
                f"members must be a list of mappings, such as [{{optimizer.learning_rate: 0.1}}], got {shown(given)}."
            )
        return [dotted(each) for each in given]

    def _changed(self, variant: Mapping[str, Any]) -> TrainConfig:
        values = {key: value for key, value in variant.items() if key != "name"}
        for key in values:
            group, _, name = key.partition(".")
            if group not in _OWN or (group == "data" and name not in _OF_DATA):
                raise UserError(f"members: {key} is the same for all; what may differ are {', '.join(_OWN[:-1])} and "
                                f"data.{', data.'.join(_OF_DATA)}.")  # fmt: skip
        known = TrainConfig.__dataclass_fields__
        plain = {key: value for key, value in config_to_mapping(self).items() if key in known}
        return with_values(plain, values, "members")

    def all_members(self, source: DataSource) -> list[Member]:
        """Return every combination of settings, folds and seeds. Raises UserError."""
        splits = [None] if self.folds is None else folds(source.train, self.folds, self.seed)
        found = []
        for variant in self.variants():
            config = self._changed(variant)
            make_model = partial(first_model, config.model, source.input_shape, source.num_classes, config.init_from)
            group = str(variant["name"]) if "name" in variant else _named(variant)
            for number, split in enumerate(splits):
                for seed in range(self.seeds):
                    parts = [group] if group else []
                    parts += [] if split is None else [f"fold {number}"]
                    parts += [f"seed {self.seed + seed}"] if self.seeds > 1 or not parts else []
                    found.append(
                        Member(
                            name=", ".join(parts),
                            group=group or None,
                            seed=self.seed + seed,
                            model=make_model,
                            optimizer=config.optimizer,
                            schedule=config.schedule,
                            batch_size=config.batch_size,
                            max_epochs=config.max_epochs,
                            label_smoothing=config.label_smoothing,
                            augmentation=config.data.augmentation,
                            subset=split,
                        )
                    )
        return found


def without_unused(words: list[str]) -> list[str]:
    """Return the words of a command line. Raises UserError for a key that means nothing to members."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if "=" in word and key.partition(".")[0] in ManyConfig.UNUSED:
            remedy = "the same output_dir goes on" if key == "resume" else "leave it out"
            raise UserError(f"{key} means nothing to members, which are not averaged and end by themselves; {remedy}.")
    return words


def _named(variant: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={written(value)}" for key, value in variant.items())
