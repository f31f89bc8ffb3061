"""What came of a search: its trials as records, and the best of them as a model, measured once on the test data."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.engine.rounds import Loss
from crossbow_py.errors import UserError
from crossbow_py.evaluation import Evaluation, Evaluator, evaluation_batch_size
from crossbow_py.file_locks import locked
from crossbow_py.packing.hyperband import Segment, TrialStanding, best, bracket_of, standing, to_epochs
from crossbow_py.packing.roster import SearchData
from crossbow_py.packing.rules import SearchRules
from crossbow_py.packing.search_events import BestTrial, TrialRecord
from crossbow_py.packing.segment_claims import SegmentResult
from crossbow_py.packing.states import TrialStates
from crossbow_py.packing.study import SharedStudy
from crossbow_py.packing.trial import TrialSettings
from crossbow_py.run_settings import Choices
from crossbow_py.telemetry.records import CONFIG_FILE, write_atomically
from crossbow_py.weights_file import MODEL_FILE, save_weights

_LOCK_FILE = ".lock"


def trial_records(rules: SearchRules, study: SharedStudy) -> tuple[TrialRecord, ...]:
    """All trials as they stand by the results of all workers; those not yet sampled have no parameters."""
    found = study.segment_results()
    by_trial: dict[int, list[SegmentResult]] = defaultdict(list)
    for segment in sorted(found):
        by_trial[segment.trial].append(found[segment])
    params = study.sampled()
    states = standing(rules.brackets, {s: own.value for s, own in found.items()}, maximize=rules.maximize)
    return tuple(_record(rules, trial, states[trial], by_trial[trial], params.get(trial)) for trial in states)


def _record(
    rules: SearchRules,
    trial: int,
    where: TrialStanding,
    results: Sequence[SegmentResult],
    params: Mapping[str, Any] | None,
) -> TrialRecord:
    """A trial from its own results, by rung."""
    bracket = bracket_of(rules.brackets, trial)
    values = {epochs: own.value for epochs, own in zip(bracket.epochs, results, strict=False)}
    return TrialRecord(
        trial=trial,
        bracket=bracket.index,
        state=where.state,
        rung=where.rung,
        value=where.value,
        values={epochs: value for epochs, value in values.items() if value is not None},
        params=params,
        seconds=sum(own.seconds for own in results),
        worker=results[-1].worker if results else None,
        reason=next((own.reason for own in results if own.reason), None),
    )


@dataclass(frozen=True)
class Leader:
    """The best trial of a search so far.

    Attributes:
        last: its segment that was measured last, after `epochs`; `value` came of it.
        is_at_end: whether it was trained to the end.
    """

    trial: int
    last: Segment
    epochs: float
    value: float
    params: Mapping[str, Any]
    is_at_end: bool


def find_leader(rules: SearchRules, study: SharedStudy) -> Leader | None:
    """By the results of all workers; None while no trial that has not failed has a value."""
    results = study.results()
    trial = best(rules.brackets, results, maximize=rules.maximize)
    if trial is None:
        return None
    last = max(segment for segment in results if segment.trial == trial)
    value = results[last]
    assert value is not None, "the best trial has not failed"
    epochs = to_epochs(rules.brackets, last)
    is_at_end = epochs == bracket_of(rules.brackets, trial).epochs[-1]
    return Leader(trial, last, epochs, value, study.params(trial), is_at_end)


def kept_best(
    leader: Leader,
    settings: TrialSettings,
    command: str,
    config: str,
    data: SearchData,
    states: TrialStates,
    choices: Choices,
    loss: Loss,
    folder: Path,
) -> tuple[BestTrial, float]:
    """The best trial, its model and configuration written to `folder` and the model measured on the test data.

    Its files are with the worker that trained it; where they are not here, model and test accuracy are left out, and
    what `folder` has of another trial is removed. `settings` are the trial's; `command` is the command line, and
    `config` the text of the configuration, that train it.

    Returns:
        The trial, and the seconds that measuring took.

    Raises:
        UserError: the folder cannot be written.
    """
    state = states.load(leader.last)
    evaluation: Evaluation | None = None
    seconds = 0.0
    if state is None:
        model_path = _without_others(folder, config)
    else:
        evaluator = _evaluator(settings.new_model(), data, choices, loss)
        model_path = _put(folder, config, evaluator.module(state.state))
        if data.test is not None:
            begun = time.perf_counter()
            evaluation = evaluator.evaluate(state.state, data.test)
            seconds = time.perf_counter() - begun
    found = BestTrial(
        trial=leader.trial,
        value=leader.value,
        epochs=leader.epochs,
        params=leader.params,
        seed=settings.seed,
        test_accuracy=None if evaluation is None else evaluation.accuracy,
        test_loss=None if evaluation is None else evaluation.loss,
        model_path=None if model_path is None else str(model_path),
        command=command,
    )
    return found, seconds


def _evaluator(model: nn.Module, data: SearchData, choices: Choices, loss: Loss) -> Evaluator:
    few = data.validation.first_samples(1)
    return Evaluator(
        model.to(choices.device), precision=choices.precision, loss=loss, metrics={},
        batch_size=evaluation_batch_size(few.inputs.numel()),
    )  # fmt: skip


def _put(folder: Path, config: str, model: nn.Module) -> Path:
    """Write the best trial's configuration and model. Returns the model's file."""
    with _alone_in(folder):
        _clear_of_others(folder, config)  # first, so that a crash leaves no model, and not that of another trial
        write_atomically(folder / CONFIG_FILE, config)
        save_weights(model, folder / MODEL_FILE)
    return folder / MODEL_FILE


def _without_others(folder: Path, config: str) -> Path | None:
    """Where the best trial's model is, when it was written before; what is there of another trial is removed."""
    if not folder.exists():
        return None
    with _alone_in(folder):
        _clear_of_others(folder, config)
        return folder / MODEL_FILE if (folder / MODEL_FILE).exists() else None


def _clear_of_others(folder: Path, config: str) -> None:
    kept = folder / CONFIG_FILE
    if not kept.exists() or kept.read_text(encoding="utf-8") != config:
        (folder / MODEL_FILE).unlink(missing_ok=True)
        kept.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Workers that end at the same moment may not agree yet on who is the best: one after another. Raises UserError."""
    try:
        folder.mkdir(exist_ok=True)
        with locked(folder / _LOCK_FILE, lambda: None):
            yield
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); make room there, and search again.") from error
