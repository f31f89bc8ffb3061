"""Models that runs have left behind: which there are, what they were trained on, and the modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.config import TrainConfig, config_from_mapping, read_yaml
from crossbow_py.errors import CheckpointError, UserError
from crossbow_py.settings import to_mapping
from crossbow_py.telemetry.records import BEST_FOLDER, CONFIG_FILE, read_summary
from crossbow_py.weights_file import load_weights

MODEL_FILE = "model.safetensors"
_OF_A_LEARNER = re.compile(r"model_(\d+)\.safetensors")
# What may differ between runs on the same test data.
_NOT_OF_TEST_DATA = ("validation_fraction", "crop_padding", "flip", "root", "download", "cache_dir")


@dataclass(frozen=True)
class TrainedModel:
    """One model of a run: its name as the user wrote it, its file, and the run's configuration."""

    name: str
    file: Path
    config: TrainConfig

    def load(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The module, in evaluation mode. Raises UserError when the file does not fit such inputs and classes."""
        module: nn.Module = self.config.model.build(input_shape, num_classes)
        try:
            load_weights(module, self.file, key="models")
        except CheckpointError as error:
            given = f"samples of shape {list(input_shape)} and {num_classes} classes"
            raise UserError(f"{self.name} is no model for {given}: {error}") from error
        return module.eval()


def find_models(paths: Sequence[str]) -> list[TrainedModel]:
    """The models of run folders, and single ones. Raises UserError for what is no finished run, and no model of one."""
    return [model for path in paths for model in _models_at(path)]


def _models_at(path: str) -> list[TrainedModel]:
    asked = Path(path).expanduser()
    run = asked.parent if asked.suffix == ".safetensors" else asked
    if asked == run and (run / BEST_FOLDER / CONFIG_FILE).is_file():  # a search
        asked = run = run / BEST_FOLDER
    if not run.is_dir():
        raise UserError(f"models: {path} does not exist; give the folder of a run, or a .safetensors file in one.")
    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"models: {run} has no {CONFIG_FILE} and is no run; give the folder that a run has written.")
    config = config_from_mapping(read_yaml(run / CONFIG_FILE))
    files = _files_in(run) if asked == run else [asked]
    if not files:
        status = read_summary(run).get("status")
        state = f"status {status}" if status else "not finished"
        raise UserError(f"models: {run} has no {MODEL_FILE} yet ({state}); finish the run with resume=auto.")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(f"models: {missing} does not exist; give a file that is in that folder, or the folder alone.")
    return [TrainedModel(path if len(files) == 1 else str(Path(path) / file.name), file, config) for file in files]


def _files_in(run: Path) -> list[Path]:
    """The average model, or those of independent learners in their order."""
    if (run / MODEL_FILE).is_file():
        return [run / MODEL_FILE]
    numbered = [(int(found[1]), file) for file in run.iterdir() if (found := _OF_A_LEARNER.fullmatch(file.name))]
    return [file for _, file in sorted(numbered)]


def common_data(models: Sequence[TrainedModel]) -> Any:
    """The settings of the data that all were trained on. Raises UserError when they were not trained on the same."""
    first = models[0]
    for model in models[1:]:
        if _test_data(model) != _test_data(first):
            raise UserError(
                f"models must have been trained on the same data, got data={first.config.data.NAME} of {first.name} "
                f"and data={model.config.data.NAME} of {model.name}; leave one out, or set data=NAME for all."
            )
    return first.config.data


def _test_data(model: TrainedModel) -> dict[str, Any]:
    data = model.config.data
    kept = {key: value for key, value in to_mapping(data).items() if key not in _NOT_OF_TEST_DATA}
    return {"name": data.NAME, **kept}
