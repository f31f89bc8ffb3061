"""`Search`: what the command does, for a model and data of a Python program."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import suggestion, written
from crossbow_py.core.signals import StopSignal
from crossbow_py.core.targets import Given
from crossbow_py.data.datasets import Data, check_data, in_tensors
from crossbow_py.data.sources.custom import Custom
from crossbow_py.engine.modules.losses import Loss, model_loss, takes_classes
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.models.custom import CustomModel
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import SearchListener, SearchSummary, TrialRecord
from crossbow_py.telemetry.records import BEST_FOLDER
from crossbow_py.train.arguments import default_optimizer, rule_of
from crossbow_py.train.checkpoints.weights import MODEL_FILE, load_weights
from crossbow_py.train.checks.losses import loss_on, standardizes
from crossbow_py.train.evaluation.metrics import Metric
from crossbow_py.train.schedules import Constant, Schedule

if TYPE_CHECKING:
    from crossbow_py.search.folder import SearchFolder

_MODEL, _ARGS = "model.", "model.args."
_SET_HERE = ("model", "data", "optimizer", "schedule", "space", "metrics", "output_dir", "metric", "resume")
_SHOWN = 10


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        summary: trials, best and times, as search.json has them.
        params: the parameters of the best trial so far, as the space calls them; None if no trial has a value.
        value: its `metric` on the validation data.
        model: the best trial's model, trained, in evaluation mode; None if there is none, or after Ctrl-C.
    """

    summary: SearchSummary
    params: Mapping[str, Any] | None
    value: float | None
    model: nn.Module | None = field(repr=False)

    @property
    def test_accuracy(self) -> float | None:
        """Accuracy of the best trial on the test data."""
        return None if self.summary.best is None else self.summary.best.test_accuracy

    @property
    def test_loss(self) -> float | None:
        """Loss of the best trial on the test data."""
        return None if self.summary.best is None else self.summary.best.test_loss

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a trial, best first, for `pandas.DataFrame`: number, state, value, epochs, and parameters."""
        sign = -1 if self.summary.info.maximize else 1
        order = sorted(self.summary.trials, key=lambda each: (each.value is None, sign * (each.value or 0)))
        return [_row(each) for each in order]

    def __str__(self) -> str:
        info, rows = self.summary.info, self.rows()
        lines = [f"{len(rows)} trials by {info.metric}, {self.summary.wall_time_s:.1f} s, {self.summary.status}"]
        for row in rows[:_SHOWN]:
            value = row["state"] if row["value"] is None else f"{row['value']:.5g}"
            own = ", ".join(f"{key}={written(row[key])}" for key in row if key not in _COLUMNS)
            reason = f" ({row['reason'].rstrip('.')})" if row["reason"] else ""
            lines.append(f"  trial {row['trial']}: {value}{reason} after {row['epochs'] or 0:g} epochs, {own}")
        return "\n".join([*lines, *([f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else [])])


_COLUMNS = ("trial", "state", "value", "epochs", "seconds", "reason")


def _row(trial: TrialRecord) -> dict[str, Any]:
    values = trial.trial, trial.state.value, trial.value, max(trial.values, default=None), trial.seconds, trial.reason
    own = dict(zip(_COLUMNS, values, strict=True))
    return own | _as_given(trial.params or {})


class Search:
    """Searches a model's settings: many trials side by side, the best trained on (Hyperband).

        found = Search(
            make_model, train_data, test_data, max_epochs=9,
            space={
                "model.hidden": [16, 32, 64],                                           # make_model(hidden=...)
                "optimizer.learning_rate": {"low": 1e-3, "high": 0.5, "log": True},
            },
        ).run()
        found.params, found.value, found.model

    Args:
        model: a function that returns an `nn.Module`, with the space's `model.NAME` as keyword arguments.
        train_data, test_data, validation_data: a pair of tensors or arrays, or a map-style data set. Trials are
            compared on the validation data, by default a tenth of the training data; the test data, by default the
            validation data, is measured once, for the best.
        space: what is searched, as the command's `space`: choices, or ranges {"low", "high", "log", "step", "when"}.
            Keys are `model.NAME`, `optimizer`, `schedule` and their keys, batch_size, label_smoothing and seed.
        loss, standardize_targets: as for `Trainer`; a loss that the model returns itself is not searched.
        metrics: further metrics by name, as for `Trainer`.
        metric: what is compared: accuracy, loss, or one of `metrics`; None is accuracy for cross-entropy, else loss.
        optimizer, schedule: what all trials have unless the space says otherwise; an object or a name. Without an
            optimizer it is that of `Trainer`.
        output_dir: the folder, in which the same call goes on; None keeps nothing.
        listeners: receive what happens.
        settings: further keys of `python -m crossbow_py.search`, such as num_trials, max_epochs, method, sampler,
            batch_size, seed, executor, device, maximize, max_time_s, max_pack_size.

    Raises:
        UserError: settings, data and model do not fit each other; or Optuna is not installed.
    """

    def __init__(
        self,
        model: Callable[..., nn.Module],
        train_data: Data,
        test_data: Data | None = None,
        *,
        space: Mapping[str, Any],
        validation_data: Data | None = None,
        loss: Loss | None = None,
        standardize_targets: bool | Literal["auto"] = "auto",
        metrics: Mapping[str, Metric] | None = None,
        metric: str | None = None,
        optimizer: Optimizer | str | None = None,
        schedule: Schedule | str = Constant(),
        output_dir: str | Path | None = None,
        listeners: tuple[SearchListener, ...] = (),
        **settings: Any,
    ) -> None:
        known = [each.name for each in dataclasses.fields(SearchConfig) if each.name not in _SET_HERE]
        for word in settings:
            if word not in known:
                raise TypeError(f"unexpected keyword argument {word!r}{suggestion(word, known)}")
        if not callable(model) or isinstance(model, nn.Module):
            raise UserError(f"model must be a function that returns an nn.Module, got {type(model).__name__}.")
        if loss is model_loss:
            raise UserError("loss=model_loss is not for searches; give a function of outputs and targets.")
        if output_dir is None and settings.get("storage") is not None:
            raise UserError("storage needs an output_dir, in which trials are kept; set one.")
        _check_space(model, space)
        if metric is not None and metric not in ("accuracy", "loss", *(metrics or {})):
            own = f"metrics={{{metric!r}: a function like loss}}"
            raise UserError(f"metric must be accuracy, loss or one of metrics, got {metric!r}; give {own}.")
        self.loss, self.output_dir, self.listeners = loss or nn.functional.cross_entropy, output_dir, listeners
        every = {"data set": train_data, "test data": test_data, "validation data": validation_data}
        train, test, validation = (None if data is None else in_tensors(data) for data in every.values())
        for data, what in zip((train, test, validation), every, strict=True):
            if data is not None or what == "data set":
                check_data(data, f"the {what}")
        self._kept: list[Given] = []
        begins = optimizer is not None or settings.get("init_from") is not None
        asked = False if standardize_targets == "auto" and begins else standardize_targets
        self._standardizes = asked if train is not None and standardizes(asked, train, loss) else False
        self._make, self._has_test = model, test is not None or validation is not None
        parts = [train, test or validation or train, *([] if validation is None else [validation])]
        target, fraction = self._given("data", lambda: parts, parts), 0.1 if validation is None else 0.0
        self.config = SearchConfig(
            model=CustomModel(target=self._given("model", model, self.loss, self._standardizes)),
            data=Custom(target=target, validation_fraction=fraction),
            optimizer=default_optimizer(loss, falls=False)[0] if optimizer is None else rule_of("optimizer", optimizer),
            schedule=rule_of("schedule", schedule),
            space=dict(_as_keys(key, entry) for key, entry in space.items()),
            metrics={name: {"target": self._given(name, own)} for name, own in (metrics or {}).items()},
            metric=metric or ("accuracy" if takes_classes(self.loss) else "loss"),
            output_dir=None if output_dir is None else str(output_dir),
            resume=None if output_dir is None else "auto",
            **{"experiment": "search", **_with_paths_as_text(settings)},
        )
        smooths = self.config.label_smoothing or "label_smoothing" in self.config.space
        if smooths and loss_on(torch.device("cpu"), self.loss) is not nn.functional.cross_entropy:
            raise UserError("label_smoothing is for cross-entropy, got another loss; leave it out.")

    def _given(self, what: str, function: Any, *holds: object) -> str:
        self._kept.append(Given(what, function, *holds))
        return self._kept[-1].path

    def run(self) -> SearchResult:
        """Search until nothing is left, a stop is met, or Ctrl-C; then the best trial so far is returned.

        Raises:
            SearchError: every trial has failed.
            UserError: see above.
        """
        from crossbow_py.search.__main__ import check_optuna  # noqa: PLC0415  Optuna is an extra, and takes a while

        check_optuna()
        from crossbow_py.search.build import SearchRun  # noqa: PLC0415
        from crossbow_py.search.folder import kept_unless_refused, open_search_folder  # noqa: PLC0415
        from crossbow_py.search.report.listeners import search_listeners  # noqa: PLC0415
        from crossbow_py.search.searcher import check_succeeded  # noqa: PLC0415

        with ExitStack() as stack:
            config, listeners = self.config, [*self.listeners]
            if self.output_dir is None:
                config = dataclasses.replace(config, output_dir=stack.enter_context(tempfile.TemporaryDirectory()))
            folder: SearchFolder = open_search_folder(config)
            stack.enter_context(kept_unless_refused(folder))
            if self.output_dir is not None:
                every = search_listeners(folder.path, config.logger, speaks=False)
                listeners += [stack.enter_context(closing(each)) for each in every]
            run = stack.enter_context(closing(SearchRun(config, folder, listeners, self.loss, self._standardizes)))
            with StopSignal(enabled=True) as signals:
                summary = run.run(lambda: signals.status)
            check_succeeded(summary)
            return self._result(summary, folder.path / BEST_FOLDER / MODEL_FILE)

    def _result(self, summary: SearchSummary, weights: Path) -> SearchResult:
        best = summary.best
        if best is None:  # stopped by a signal
            first = next(iter(SearchResult(summary, None, None, None).rows()), {})
            params = {key: value for key, value in first.items() if key not in _COLUMNS}
            return SearchResult(summary, params if first.get("value") is not None else None, first.get("value"), None)
        if not self._has_test:  # what the best was measured on is what it was trained on
            summary = dataclasses.replace(summary, best=dataclasses.replace(best, test_accuracy=None, test_loss=None))
        params = _as_given(best.params)
        model = None
        if weights.exists():
            arguments = {key.removeprefix(_MODEL): own for key, own in params.items() if key.startswith(_MODEL)}
            model = self._make(**arguments).eval()
            load_weights(model, weights)
        return SearchResult(summary, params, best.value, model)


def _check_space(model: Callable[..., nn.Module], space: Mapping[str, Any]) -> None:
    """Raise UserError for a key of the space that is no argument of the model, where its arguments are known."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for key in space:
        if key in known and key not in (each.name for each in dataclasses.fields(SearchConfig)):
            raise UserError(f"space: {key} is an argument of the model; write it as {_MODEL}{key}.")
        name = key.removeprefix(_MODEL)
        if key.startswith(_MODEL) and name not in known and not takes_all:
            raise UserError(f"space: {key} is no argument of the model{suggestion(name, known)}")


def _with_paths_as_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def _as_keys(key: str, entry: Any) -> tuple[str, Any]:
    """Return an entry of a space as the command has it, in which a model's arguments are `model.args`."""
    if isinstance(entry, np.ndarray):
        entry = entry.tolist()
    if key == "model":
        return key, {"args": entry}
    return (f"{_ARGS}{key.removeprefix(_MODEL)}" if key.startswith(_MODEL) else key), entry


def _as_given(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace(_ARGS, _MODEL, 1): value for key, value in params.items()}
