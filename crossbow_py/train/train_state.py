"""The state that training changes, beside the bank: counters, and the models of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from crossbow_py.core.settings import known_fields
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.bank.layout import clone_all
from crossbow_py.engine.goodput import Comparison, NoiseScale
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.train.evaluation.evaluator import State

_APART = ("best", "returned_best")  # no counters, and not saved with these


@dataclass(frozen=True)
class BestModels:
    """The models of the best evaluation so far, on the host: state dicts as `final_states` gives them.

    The best one has the highest accuracy, or the lowest loss where there is no accuracy; of equal ones the first.
    """

    samples_seen: int
    accuracy: float | None
    loss: float
    states: list[State]

    @classmethod
    def of(cls, accuracy: float | None, loss: float, samples_seen: int, states: Sequence[State]) -> BestModels:
        """Copy the evaluated models."""
        return cls(samples_seen, accuracy, loss, [clone_all(state) for state in states])

    def to_plain(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint, which share memory with these."""
        return {"samples_seen": self.samples_seen, "accuracy": self.accuracy, "loss": self.loss, "states": self.states}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], like: State, samples_seen: int) -> BestModels:
        """Build it from a checkpoint of a run that has seen `samples_seen` samples, whose models are `like` a state.

        Raises TypeError or ValueError for what no run of this model writes.
        """
        measured = {name: value for name, value in values.items() if name != "states"}
        best = cls(**known_fields(cls, measured, least=0), states=list(values["states"]))
        shapes = {name: (value.shape, value.dtype) for name, value in like.items()}
        found = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in best.states]
        if best.samples_seen > samples_seen or not found or any(each != shapes for each in found):
            raise ValueError(f"the best models after {best.samples_seen} of {samples_seen} samples")
        return best


def is_better(accuracy: float | None, loss: float, than_accuracy: float | None, than_loss: float | None) -> bool:
    """Return whether an evaluation is better than the best before it, of which there may be none. NaN never is."""
    if accuracy is not None:
        return than_accuracy is None or accuracy > than_accuracy
    return loss < (math.inf if than_loss is None or math.isnan(than_loss) else than_loss)


@dataclass
class TrainState:
    """The counters of a run, and the models of its best evaluation.

    `samples_seen` counts samples of submitted rounds: over all learners, or per learner when they are independent.
    The sums cover the rounds absorbed since the last evaluation at the end of an epoch or a part of it; `num_correct`
    is None when the task is not classification. `best_*` and `last_*` are of the data that stops look at: validation,
    where there is some. The last `num_stale` such evaluations were not the best yet.
    `apart_since` is the first round after learners last averaged, and `apart_factor` the schedule's factor in that
    round, without warm-up.
    `non_finite_learners` maps learners that were gated, and wait to be reseeded, to the round in which they were.
    `wall_s` is the time of earlier processes, plus the time that building the trainer took in this one.
    `effective_samples` are samples seen, each times its efficiency then; before the noise is known a round counts as
    that of a single learner.
    `noise` is what is known of the gradient noise, if gradients are compared; `compared` are rounds with comparisons
    that do not count yet.
    `best` are the models of the best evaluation, if the run is to return them; `returned_best` is whether `fit`
    returned them, and no round has been trained since. Checkpoints hold `best` apart.
    """

    round_index: int = 0
    apart_since: int = 0
    apart_factor: float = 1.0
    samples_seen: int = 0
    last_round_start: float = 0
    last_recorded: int = -1
    last_accuracy: float | None = None
    last_loss: float | None = None
    closed_epochs: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    num_correct: float | None = 0.0
    elapsed_s: float = 0.0
    wall_s: float = 0.0
    best_accuracy: float | None = None
    best_loss: float | None = None
    num_stale: int = 0
    time_to_accuracy_s: float | None = None
    num_reseeded: int = 0
    non_finite_learners: dict[int, int] = field(default_factory=dict)
    effective_samples: float = 0.0
    noise: NoiseScale | None = None
    compared: list[tuple[int, Comparison]] = field(default_factory=list)
    best: BestModels | None = None
    returned_best: bool = False

    def absorb(self, outcome: RoundOutcome) -> None:
        """Add a round's losses to the epoch; gated learners are noted and do not count."""
        if outcome.comparison is not None:
            self.compared.append((outcome.plan.index, outcome.comparison))
        for learner in outcome.non_finite_learners:
            self.non_finite_learners.setdefault(learner, outcome.plan.index)
        for loss, correct, finite in zip(outcome.losses, outcome.num_correct, outcome.finite, strict=True):
            if finite:
                self.loss_sum += loss
                self.num_losses += 1
                self.num_correct = None if correct is None or self.num_correct is None else self.num_correct + correct

    def take_compared(self) -> list[Comparison]:
        """Remove and return the comparisons that the next round goes by: those of rounds before the last one.

        The last one's may be there or not, as something may have waited for it.
        """
        taken = [found for index, found in self.compared if index < self.round_index - 1]
        self.compared = [(index, found) for index, found in self.compared if index >= self.round_index - 1]
        return taken

    def apart(self, factor: float) -> tuple[int, float]:
        """Return the rounds since learners averaged, the next one included, and the factor in the first of them.

        Both factors are without warm-up; `factor` is that of the next round.
        """
        num_rounds = self.round_index + 1 - self.apart_since
        return num_rounds, factor if num_rounds == 1 else self.apart_factor

    def note_round(self, num_samples: int, start: float, factor: float, averages: bool, num_learners: int) -> None:
        """Count a submitted round of K learners on all devices, with its factor as for `apart`.

        It began at a `start` that the schedule knows; `averages` is whether learners average in it.
        """
        efficiency = 1.0 if self.noise is None else self.noise.gain(num_learners) / num_learners
        self.effective_samples += num_samples * efficiency
        if self.apart_since == self.round_index:
            self.apart_factor = factor
        self.round_index, self.last_round_start = self.round_index + 1, start
        if averages:
            self.apart_since = self.round_index
        self.samples_seen += num_samples

    @property
    def train_loss(self) -> float:
        """The mean loss of the epoch so far; NaN before its first round."""
        return self.loss_sum / self.num_losses if self.num_losses else math.nan

    def train_accuracy(self, batch_size: int) -> float | None:
        """Return the accuracy on the epoch's training samples, each when it was trained on; None without classes."""
        if self.num_correct is None or not self.num_losses:
            return None
        return self.num_correct / (self.num_losses * batch_size)

    def note_evaluation(self, accuracy: float | None, loss: float, target: float | None, is_stop: bool = False) -> None:
        """Note the last and the best evaluation, and the training time when the target was first reached.

        One at a stop inside an epoch, `is_stop`, is never stale: a run without that stop has no such evaluation.
        """
        if is_better(accuracy, loss, self.best_accuracy, self.best_loss):
            self.num_stale = 0
        elif not is_stop:
            self.num_stale += 1
        self.last_accuracy, self.last_loss = accuracy, loss
        if not math.isnan(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss = loss
        if accuracy is None:
            return
        self.best_accuracy = accuracy if self.best_accuracy is None else max(self.best_accuracy, accuracy)
        if target is not None and accuracy >= target and self.time_to_accuracy_s is None:
            self.time_to_accuracy_s = self.elapsed_s

    def start_sums(self, samples_per_epoch: int) -> None:
        """Start the sums until the next evaluation, and the next epoch once the last one is over."""
        self.closed_epochs = self.samples_seen // samples_per_epoch
        self.loss_sum, self.num_losses, self.num_correct = 0.0, 0, 0.0

    def keep_if_best(self, accuracy: float | None, loss: float, states: Sequence[State]) -> None:
        """Keep the models that were just evaluated, if they are the best that this run has kept."""
        if self.best is None or is_better(accuracy, loss, self.best.accuracy, self.best.loss):
            self.best = BestModels.of(accuracy, loss, self.samples_seen, states)

    def epoch_sums(self, ranks: Ranks) -> tuple[float, int, float | None]:
        """Return the epoch's sums over all ranks: losses, their number, correct predictions. All ranks together."""
        loss_sum, num_losses, num_correct = ranks.sum(
            [self.loss_sum, self.num_losses, math.nan if self.num_correct is None else self.num_correct]
        )
        return loss_sum, int(num_losses), None if math.isnan(num_correct) else num_correct

    def take(self, other: TrainState) -> None:
        """Take another state's values."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint, where `non_finite_learners` has its older name, `sick_learners`."""
        plain = asdict(replace(self, best=None))
        for apart in _APART:
            del plain[apart]
        plain["sick_learners"] = plain.pop("non_finite_learners")
        plain["compared"] = [[index, *found] for index, found in self.compared]
        return plain

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> TrainState:
        """Build the state from a checkpoint; counters that a newer version added start at their defaults.

        Raises TypeError or ValueError for values that no run writes.
        """
        renamed = {"non_finite_learners" if key == "sick_learners" else key: value for key, value in values.items()}
        noise, compared = renamed.pop("noise", None), renamed.pop("compared", [])
        counters = {name: value for name, value in renamed.items() if name not in _APART}
        found = cls(**known_fields(cls, counters, least=-1))
        found.noise = None if noise is None else NoiseScale.from_plain(noise)
        found.compared = [(int(index), Comparison(float(s), float(q), int(n))) for index, s, q, n in compared]
        return found
