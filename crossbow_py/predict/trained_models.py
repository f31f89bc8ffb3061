"""Trained models of runs and searches: how they are found, what they were trained on, and how they are loaded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.core.errors import UserError
from crossbow_py.core.files import check_own, given_path
from crossbow_py.core.settings import to_mapping
from crossbow_py.many.store import MEMBERS_FOLDER
from crossbow_py.search.events import SEARCH_FILE
from crossbow_py.telemetry.records import BEST_FOLDER, CONFIG_FILE, SUMMARY_FILE, read_json, read_summary
from crossbow_py.train.checkpoints.checkpoint import holds_run, lost_rule, renamed
from crossbow_py.train.checkpoints.weights import MODEL_FILE, load_weights
from crossbow_py.train.checks.seeded_model import MakeModel, seeded_model
from crossbow_py.train.config import TrainConfig, config_from_mapping
from crossbow_py.train.run_folder.recorded_config import named_targets

_OF_A_LEARNER = re.compile(r"model_(\d+)\.safetensors")
# What may differ between runs on the same test data.
_NOT_OF_TEST_DATA = (
    "validation_fraction", "crop_padding", "flip", "random_erasing", "rand_augment", "mixup", "cutmix", "transform",
    "root", "download", "cache_dir",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedModel:
    """One model of a run: its name as the user wrote it, its file, and the run's configuration."""

    name: str
    file: Path
    config: TrainConfig

    def load(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The module, in evaluation mode. Raises UserError when the file does not fit such inputs and classes."""
        module: nn.Module = self.config.model.make(input_shape, num_classes)
        given = f"this model for samples of shape {list(input_shape)} and {num_classes} classes"
        remedy = "choose models that were trained on such data"
        load_weights(module, self.file, key="models", model=given, remedy=remedy)
        return module.eval()


def load_models(
    *paths: str | Path, model: MakeModel | None = None, targets: Sequence[str] = ()
) -> list[nn.Module]:
    """Load the models of runs and searches, as modules on the CPU and in evaluation mode.

    They take inputs as in training: images scaled to [0, 1] and normalised by the mean and std of the data set, which
    is read only where its settings do not say what its samples and classes are.

    Args:
        paths: folders of runs (all models of each), folders of searches (the best model), or .safetensors files in
            them.
        model: the function without arguments that `Trainer` was given, for runs from Python, whose folders do not say
            how their model is made. It makes the model of all paths then.
        targets: dotted paths of functions that runs with a model or data of one's own may name, to be imported and
            called. A run's folder says what to call, so what is not named here is refused.

    Raises:
        UserError: there is no path, a path is no finished run or search and no model of one, a model is given twice,
            the models were not trained on the same data, a run names a target that is not among `targets`, or a run
            from Python is given without `model`.
    """
    if not paths:
        raise UserError("models must name at least one trained model, got none; give the folder of a run.")
    if model is not None:
        return _made_by(model, [str(path) for path in paths])
    models = find_models([str(path) for path in paths], targets)
    data = common_data(models, targets)
    known = data.declared()
    if known is None or known.note is not None:  # which tells of what was assumed
        known = data.load(progress=False)
    return [model.load(known.input_shape, known.num_classes or 0) for model in models]


def find_models(paths: Sequence[str], targets: Sequence[str] = ()) -> list[TrainedModel]:
    """Return the models of run folders, and single ones.

    Raises UserError for what is no finished run, and no model of one, for a model that is given twice, and for one that
    is made by code that is not among `targets`.
    """
    models = [model for path in paths for model in _models_at(path)]
    for model in models:
        _check_target(model, "model", targets)
    _check_repeats([(model.file, model.name) for model in models])
    return models


def _made_by(make_model: MakeModel, paths: Sequence[str]) -> list[nn.Module]:
    """Return the models of all paths as modules that a function makes. Raises UserError as `load_models`."""
    found: list[tuple[Path, str]] = []
    for path in paths:
        run, files = _run_at(path)
        if not files and not holds_run(run):
            raise UserError(f"models: {run} has no model and is no run; {_remedy(run)}.")
        _check_finished(run, files)
        found += _named(path, files)
    _check_repeats(found)
    modules = []
    for file, _ in found:
        module = seeded_model(make_model, 0, None)
        load_weights(module, file, key="models", remedy="give the function that the run was given as model")
        modules.append(module.eval())
    return modules


def _check_repeats(models: Sequence[tuple[Path, str]]) -> None:
    """Raise UserError if two models, each a file and a name, are one."""
    known: dict[Path, str] = {}
    for file, name in models:
        if (path := file.resolve()) in known:
            as_well = "" if known[path] == name else f", also as {known[path]}"
            raise UserError(f"models: {name} is given twice{as_well}; give each model once, as each counts once.")
        known[path] = name


def _check_target(model: TrainedModel, group: str, targets: Sequence[str]) -> None:
    """A run's folder may be somebody else's, and what it names would be called."""
    for key, target in named_targets(group, getattr(model.config, group)).items():
        if target not in targets:
            named = f"models: {model.file.parent} names {key}={target}, code that would be run"
            raise UserError(f"{named}; if it is yours, allow it by targets=[{target}].")


def _run_at(path: str) -> tuple[Path, list[Path]]:
    """Return the folder of a run, and the files of the models in it that a path means. Raises UserError."""
    asked = given_path("models", path)
    wrong = "does not exist" if not asked.exists() else "is no folder and no .safetensors file"
    if not asked.is_dir() and not (asked.is_file() and asked.suffix == ".safetensors"):
        raise UserError(f"models: {path} {wrong}; give the folder of a run, or a .safetensors file in one.")
    run = asked if asked.is_dir() else asked.parent
    if asked == run:
        _check_own(run)
    if asked == run and (run / BEST_FOLDER / CONFIG_FILE).is_file():  # a search
        asked = run = run / BEST_FOLDER
    if asked == run and not _files_in(run) and (run / MEMBERS_FOLDER).is_dir():
        raise UserError(
            f"models: {run} is a folder of train_many, which has no single model; call train_many again with "
            "output_dir, which trains nothing anew, and take results.models."
        )
    return run, _files_in(run) if asked == run else [asked]


def _named(path: str, files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return files with the names by which the user knows them."""
    return [(file, path if len(files) == 1 else str(Path(path) / file.name)) for file in files]


def _models_at(path: str) -> list[TrainedModel]:
    run, files = _run_at(path)
    if not (run / CONFIG_FILE).is_file():
        if _files_in(run):
            remedy = f"load it in Python, by load_models({path!r}, model=...) with the function that makes the model"
            raise UserError(f"models: {run} was trained from Python and has no {CONFIG_FILE}; {remedy}.")
        raise UserError(f"models: {run} has no {CONFIG_FILE} and is no run; {_remedy(run)}.")
    plain = renamed(read_yaml(run / CONFIG_FILE))
    if "space" in plain:
        report = read_json(run / SEARCH_FILE)
        raise UserError(f"models: {run} is a search without a best model ({_state(report)}); {_to_go_on(run, report)}.")
    if lost_rule(plain):  # it is no part of the model
        plain["averaging"] = {"name": "grouped_sma"}
    config = config_from_mapping(plain, run / CONFIG_FILE)
    _check_finished(run, files)
    return [TrainedModel(name, file, config) for file, name in _named(path, files)]


def _check_finished(run: Path, files: Sequence[Path]) -> None:
    if not files:
        state = _state(read_summary(run))
        raise UserError(f"models: {run} has no {MODEL_FILE} yet ({state}); finish the run with resume=auto.")


def _check_own(run: Path) -> None:
    """Refuse a folder with links or pipes in place of what is read there. Raises UserError."""
    models = [path.name for path in run.glob("model*.safetensors")]
    try:
        check_own(run, (CONFIG_FILE, SUMMARY_FILE, SEARCH_FILE, *models), (BEST_FOLDER,))
    except OSError as error:
        raise UserError(f"models: {run} cannot be read ({error.strerror}); put a copy of the file there.") from error


def _state(summary: Mapping[str, Any]) -> str:
    status = summary.get("status")  # a word; the file may be anybody's
    is_word = isinstance(status, str) and re.fullmatch(r"[a-z_]{1,40}", status)
    return f"status {status}" if is_word else "not finished"


def _to_go_on(search: Path, report: Mapping[str, Any]) -> str:
    """Return how to get the best model of a search that has none here; another worker may have its files.

    Not the command in search.json, which may be anybody's: the search itself tells it by what its storage has.
    """
    best, resumed = report.get("best"), shlex.quote(f"resume={search}")
    if isinstance(best, dict) and best.get("command"):
        return (
            "the files of its best trial are not there: give the folder of the worker that trained it, or start the "
            f"command of the search with {resumed}, which says how it is trained"
        )
    return f"go on with the command that began it, python -m crossbow_py.search, and {resumed}"


def _remedy(folder: Path) -> str:
    """Return what to give instead of a folder that is no run: the newest run beneath it that has a model."""
    configs = [*folder.glob(f"*/{CONFIG_FILE}"), *folder.glob(f"*/*/{CONFIG_FILE}")]
    runs = [each.parent for each in configs if not (each.parent.parent / CONFIG_FILE).is_file()]
    usable = [run for run in runs if _files_in(run) or _files_in(run / BEST_FOLDER)]
    if not usable:
        return "give the folder that a run has written"
    newest = max(usable, key=lambda run: (run / CONFIG_FILE).stat().st_mtime_ns)
    return f"give the folder of one, as models=[{shlex.quote(str(newest))}], the newest beneath it"


def _files_in(run: Path) -> list[Path]:
    """Return the average model, or those of independent learners in their order."""
    if (run / MODEL_FILE).is_file():
        return [run / MODEL_FILE]
    numbered = [(int(found[1]), file) for file in run.glob("model_*") if (found := _OF_A_LEARNER.fullmatch(file.name))]
    return [file for _, file in sorted(numbered)]


def common_data(models: Sequence[TrainedModel], targets: Sequence[str] = ()) -> Any:
    """Return the settings of the data that all were trained on.

    Raises UserError when they were not trained on the same, or that is made by code that is not among `targets`.
    """
    first = models[0]
    _check_target(first, "data", targets)
    for model in models[1:]:
        if _test_data(model) != _test_data(first):
            got = " and ".join(f"data={each.config.data.NAME} of {each.name}" for each in (first, model))
            remedy = "leave one out, or set data=NAME for all"
            raise UserError(f"models must have been trained on the same data, got {got}; {remedy}.")
    return first.config.data


def _test_data(model: TrainedModel) -> dict[str, Any]:
    data = model.config.data
    kept = {key: value for key, value in to_mapping(data).items() if key not in _NOT_OF_TEST_DATA}
    return {"name": data.NAME, **kept}
