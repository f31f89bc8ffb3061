"""The outcome of a search: its trials as records, and the best one as a model, measured once on the test data."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import locked, read_text
from crossbow_py.engine.device.memory import raising_if_lost
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.trial_registry import TrialRegistry
from crossbow_py.search.events import BestTrial, TrialRecord
from crossbow_py.search.hyperband import Segment, best, bracket_of, standing, to_epochs
from crossbow_py.search.loop import SearchRules
from crossbow_py.search.study.claims import SegmentResult
from crossbow_py.search.study.states import TrialStates
from crossbow_py.search.study.study import SharedStudy
from crossbow_py.telemetry.records import CONFIG_FILE, DIGESTS, SUMMARY_FILE, write_atomically, write_json
from crossbow_py.train.checkpoints.weights import ADAPTER_FOLDER, MODEL_FILE, save_adapter, save_weights
from crossbow_py.train.evaluation.evaluator import Evaluation, evaluate_in_memory


def trial_records(rules: SearchRules, study: SharedStudy) -> tuple[TrialRecord, ...]:
    """Return all trials as they stand by the results of all workers; those not yet sampled have no parameters."""
    found = study.segment_results()
    by_trial: dict[int, list[SegmentResult]] = defaultdict(list)
    for segment in sorted(found):
        by_trial[segment.trial].append(found[segment])
    params = study.sampled()
    states = standing(rules.brackets, {s: own.value for s, own in found.items()}, maximize=rules.maximize)
    records = []
    for trial, where in states.items():
        bracket, results = bracket_of(rules.brackets, trial), by_trial[trial]  # by rung
        values = {epochs: own.value for epochs, own in zip(bracket.epochs, results, strict=False)}
        record = TrialRecord(
            trial=trial,
            bracket=bracket.index,
            state=where.state,
            rung=where.rung,
            value=where.value,
            values={epochs: value for epochs, value in values.items() if value is not None},
            params=params.get(trial),
            seconds=sum(own.seconds for own in results),
            worker=results[-1].worker if results else None,
            reason=next((own.reason for own in results if own.reason), None),
        )
        records.append(record)
    return tuple(records)


@dataclass(frozen=True)
class Leader:
    """The best trial of a search so far.

    Attributes:
        last: its last segment that was measured, after `epochs`, with `value`.
        is_at_end: whether it was trained to the end.
    """

    trial: int
    last: Segment
    epochs: float
    value: float
    params: Mapping[str, Any]
    is_at_end: bool


def find_leader(rules: SearchRules, study: SharedStudy) -> Leader | None:
    """Return the best trial by the results of all workers; None while no trial that has not failed has a value."""
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


@dataclass(frozen=True)
class LeaderRun:
    """The training of the best trial: its settings, and the command line and configuration text that reproduce it."""

    settings: TrialSettings
    command: str
    config: str


def kept_best(
    find: Callable[[], Leader | None], run_of: Callable[[Leader], LeaderRun], registry: TrialRegistry,
    states: TrialStates, folder: Path,
) -> tuple[BestTrial | None, float]:  # fmt: skip
    """Return the best trial, its model and configuration written to `folder` and the model measured on the test data.

    Its files are with the worker that trained it; where they are not here, model and test accuracy are left out, and
    what `folder` has of another trial is removed. Of workers that end at once each finds the best trial after the
    one before has written: the last knows the most results.

    Args:
        find: returns the best trial by what is known now.
        run_of: returns how it is trained.
        folder: the folder of the best trial, in that of the search.

    Returns:
        The trial, None where there is none, and the seconds that measuring took.

    Raises:
        UserError: the folder cannot be written.
        DeviceLostError: the device does nothing any more.
    """
    test_data, device = registry.data.test, registry.choices.device
    with raising_if_lost(device):
        with _alone_at(folder):
            leader = find()
            if leader is None:
                return None, 0.0
            own, state = run_of(leader), states.load(leader.last)
            _clear_of_others(folder, own.config)
            test: Callable[[], Evaluation] | None = None
            if state is not None:
                evaluator = registry.evaluator(own.settings.new_model().to(device))
                _put(folder, own.config, evaluator.module(state.state))
                if test_data is not None:
                    test = partial(evaluate_in_memory, evaluator, state.state, test_data, device)
            is_there = (folder / MODEL_FILE).exists()
        begun = time.perf_counter()
        evaluation = None if test is None else test()
        seconds = 0.0 if test is None else time.perf_counter() - begun
    found = BestTrial(
        trial=leader.trial,
        value=leader.value,
        epochs=leader.epochs,
        params=leader.params,
        seed=own.settings.seed,
        test_accuracy=None if evaluation is None else evaluation.accuracy,
        test_loss=None if evaluation is None else evaluation.loss,
        model_path=str(folder / MODEL_FILE) if is_there else None,
        command=own.command,
    )
    return found, seconds


def _clear_of_others(folder: Path, config: str) -> None:
    """Remove what is there of another trial, or not whole. Raises UserError."""
    kept, model = folder / CONFIG_FILE, folder / MODEL_FILE
    with _writing(folder):
        if not (model.exists() and kept.exists() and read_text(kept) == config):
            kept.unlink(missing_ok=True)  # first: the configuration says that there is a model
            model.unlink(missing_ok=True)
            (folder / SUMMARY_FILE).unlink(missing_ok=True)
            if (folder / ADAPTER_FOLDER).exists():
                shutil.rmtree(folder / ADAPTER_FOLDER)


def _put(folder: Path, config: str, model: nn.Module) -> None:
    with _writing(folder):
        folder.mkdir(exist_ok=True)
        digests = {MODEL_FILE: save_weights(model, folder / MODEL_FILE)}
        save_adapter(model, folder / ADAPTER_FOLDER)
        write_json(folder / SUMMARY_FILE, {DIGESTS: digests}, indent=None)
        write_atomically(folder / CONFIG_FILE, config)


@contextmanager
def _alone_at(folder: Path) -> Iterator[None]:
    """Workers that end at the same moment may not agree yet on who is the best: one after another. Raises UserError."""
    with ExitStack() as stack:
        with _writing(folder):
            stack.enter_context(locked(lock_of(folder), lambda: None))
        yield


def lock_of(folder: Path) -> Path:
    """Return the file that is locked while the best trial is found and written: beside its folder."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); make room there, and search again.") from error
