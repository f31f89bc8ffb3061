"""What came of a search: its trials as records, and the best of them as a model, measured once on the test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from crossbow_py.engine.rounds import Loss
from crossbow_py.errors import UserError
from crossbow_py.evaluation import Evaluation, Evaluator, evaluation_batch_size
from crossbow_py.packing.hyperband import Bracket, Segment, best, bracket_of, standing, to_epochs
from crossbow_py.packing.roster import Described, Roster
from crossbow_py.packing.search import SearchRules
from crossbow_py.packing.search_events import BestTrial, TrialRecord
from crossbow_py.packing.segment_claims import SegmentResult
from crossbow_py.packing.states import TrialStates
from crossbow_py.packing.study import SharedStudy
from crossbow_py.packing.trial import Checkpoint
from crossbow_py.run_settings import Choices
from crossbow_py.weights_file import save_weights

MODEL_FILE = "model.safetensors"


def trial_records(rules: SearchRules, study: SharedStudy) -> tuple[TrialRecord, ...]:
    """All trials as they stand by the results of all workers; those not yet sampled have no parameters."""
    found = study.segment_results()
    results = {segment: result.value for segment, result in found.items()}
    params = study.sampled()
    return tuple(
        TrialRecord(
            trial=trial,
            bracket=bracket_of(rules.brackets, trial).index,
            state=where.state,
            rung=where.rung,
            value=where.value,
            values=_values(rules.brackets, found, trial),
            params=params.get(trial),
            seconds=sum(result.seconds for segment, result in found.items() if segment.trial == trial),
            worker=max(((s.rung, r.worker) for s, r in found.items() if s.trial == trial), default=(0, None))[1],
            reason=next((r.reason for segment, r in found.items() if segment.trial == trial and r.reason), None),
        )
        for trial, where in standing(rules.brackets, results, maximize=rules.maximize).items()
    )


def _values(
    brackets: Sequence[Bracket], found: Mapping[Segment, SegmentResult], trial: int
) -> dict[float, float]:
    own = {segment: result.value for segment, result in found.items() if segment.trial == trial}
    return {to_epochs(brackets, segment): value for segment, value in own.items() if value is not None}


def best_trial(
    rules: SearchRules,
    study: SharedStudy,
    roster: Roster,
    states: TrialStates,
    choices: Choices,
    loss: Loss,
    folder: Path,
    command: Callable[[Mapping[str, object], int], str],
) -> BestTrial | None:
    """The best trial, its model written to `folder` and measured on the test data; None while there is none.

    Its files are with the worker that trained it; where they are not here, model and test accuracy are left out.
    `command` gives the command line that trains it, from its parameters and its number.

    Raises UserError when the model cannot be written.
    """
    found = study.segment_results()
    trial = best(rules.brackets, {s: result.value for s, result in found.items()}, maximize=rules.maximize)
    if trial is None:
        return None
    params = study.params(trial)
    last = max(segment for segment, own in found.items() if segment.trial == trial and own.value is not None)
    known, state = roster.of(trial, params), states.load(last)
    evaluation: Evaluation | None = None
    if isinstance(known, Described) and state is not None:
        evaluator = _evaluator(known.settings.new_model(), roster, choices, loss)
        model = evaluator.module(_state_dict(state))
        _save(model, folder / MODEL_FILE)
        if roster.data.test is not None:
            evaluation = evaluator.evaluate(_state_dict(state), roster.data.test)
    value = found[last].value
    assert isinstance(known, Described), "the best trial has trained"
    assert value is not None, "the best trial has a value"
    return BestTrial(
        trial=trial,
        value=value,
        epochs=to_epochs(rules.brackets, last),
        params=params,
        seed=known.settings.seed,
        test_accuracy=None if evaluation is None else evaluation.accuracy,
        test_loss=None if evaluation is None else evaluation.loss,
        model_path=None if state is None else str(folder / MODEL_FILE),
        command=command(params, trial),
    )


def _state_dict(state: Checkpoint) -> dict[str, Tensor]:
    row = state.row
    stacked = {**row["weights"], **row["buffers"]}
    return {**{name: value[0] for name, value in stacked.items()}, **row["integer_buffers"][0]}


def _evaluator(model: nn.Module, roster: Roster, choices: Choices, loss: Loss) -> Evaluator:
    few = roster.data.validation.first_samples(1)
    return Evaluator(
        model.to(choices.device), precision=choices.precision, loss=loss, metrics={},
        batch_size=evaluation_batch_size(few.inputs.numel()),
    )  # fmt: skip


def _save(model: nn.Module, path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        save_weights(model, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); make room there, and search again.") from error


