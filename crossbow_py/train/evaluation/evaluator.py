"""Evaluates copies of models, one or a whole bank, over a data set, and recalibrates BatchNorm's statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import BadDataError, UserError, one_line, raised_at
from crossbow_py.core.trees import Tree, batch_key, call, in_format, leaves, map_tree
from crossbow_py.data.datasets import counted
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.bank.frozen_base import copy_with
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory, raising_if_lost
from crossbow_py.engine.fusion.fused_agreement import trusted_outputs
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.losses import (
    Loss,
    compared,
    confusion_indices,
    correct_predictions,
    count_correct,
    has_classes,
    has_tokens,
    ignored_target,
    is_classification,
    is_mean_nll,
    model_loss,
    non_finite_outputs,
    num_averaged,
    part_for,
    scores_of,
    takes_classes,
)
from crossbow_py.engine.modules.precision import Precision, cast_module
from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.train.evaluation.metrics import Metric, RunningMetrics, has_states

State = Mapping[str, Tensor]  # a module's state dict, tied parameters once

NUM_EXAMPLES = 24
PERPLEXITY = "perplexity"
MOST_CLASSES = 1000  # whose confusion matrix, with a million numbers, is counted

_MOST_SAMPLES, _FEWEST_SAMPLES = 256, 8
_LARGEST_EXPONENT = 709.0
_MOST_VALUES = 2**22  # in a batch: 27 images of 224 x 224


@dataclass(frozen=True)
class Examples:
    """Samples spread over the first rank's share, at most `NUM_EXAMPLES`, and the model's outputs for them.

    All are on the host, and the samples are always the same: `inputs` [N, C, H, W] or [N, C, T, H, W] as the model got
    them, `targets` [N] and `outputs` [N, classes].
    """

    inputs: Tensor
    targets: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Means over `num_samples`; `accuracy` is a fraction, None when the task is not classification.

    If the loss ignores some targets (see `ignored_target`), `loss` and `accuracy` are means over the others, such as
    the pixels of masks that count. `metrics` has the perplexity, exp(loss), where the loss is the plain cross-entropy
    of tokens. `num_non_finite` samples have outputs that are not finite; they count as wrong. `class_counts` are
    there for at most `MOST_CLASSES` classes, if the evaluator was asked for them. Only the first rank has `examples`.
    """

    loss: float
    accuracy: float | None
    num_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    num_non_finite: int = 0
    class_counts: ClassCounts | None = field(default=None, compare=False, repr=False)
    examples: Examples | None = field(default=None, compare=False, repr=False)


# An evaluation of a data set: the one that stops look at, and each learner's when learners are independent.
Measured = tuple[Evaluation, tuple[Evaluation, ...]]


def non_finite_remark(what: str, num_non_finite: int, num_samples: int) -> str:
    """Return a message about samples whose outputs are not finite."""
    return (
        f"{what}: the outputs of {num_non_finite:,} of {num_samples:,} samples are not finite, which counts as wrong; "
        "look for NaN in these data, or for weights that have grown too large."
    )


def mean_evaluation(each: Sequence[Evaluation]) -> Evaluation:
    """Return the plain mean of several evaluations of the same samples, as of independent learners.

    Their confusion matrices are added, so that accuracy is that of the sum, too.
    """

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(each)

    accuracies = [one.accuracy for one in each if one.accuracy is not None]
    loss = mean(one.loss for one in each)
    perplexity = {PERPLEXITY: _perplexity(loss)} if all(PERPLEXITY in one.metrics for one in each) else {}
    return Evaluation(
        loss=loss,
        accuracy=mean(accuracies) if accuracies else None,
        num_samples=each[0].num_samples,
        metrics={
            name: mean(one.metrics[name] for one in each)
            for name in each[0].metrics
            if all(name in one.metrics for one in each)
        }
        | perplexity,
        num_non_finite=max(one.num_non_finite for one in each),
        class_counts=_summed([one.class_counts for one in each]),
        examples=each[0].examples,
    )


def _asked(name: str, function: Callable[[Any, Tensor], Any], output: Tree, targets: Tensor) -> Any:
    try:
        return function(output, targets)
    except Exception as error:
        raise UserError(
            f"metrics[{name!r}] fails on a batch with targets {list(targets.shape)} "
            f"({one_line(error)}{raised_at(error)}); it must return one number for a batch of any size."
        ) from error


def _together(means: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Return the values of all metrics. Raises UserError if two have one name."""
    if both := means.keys() & others.keys():
        raise UserError(f"metrics has two values of the name {min(both)!r}; give one of them another name.")
    return {**means, **others}


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf


def _summed(each: Sequence[ClassCounts | None]) -> ClassCounts | None:
    known = [own for own in each if own is not None]
    return replace(known[0], counts=np.sum([own.counts for own in known], axis=0)) if len(known) == len(each) else None


def evaluation_batch_size(values_per_sample: int) -> int:
    """Return the samples to evaluate at once: 256, or fewer large ones, to need no more memory than training."""
    return max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, _MOST_VALUES // values_per_sample))


class Evaluator:
    """Evaluates states of one architecture over a feed, in evaluation mode, with all of torch's threads.

    Args:
        template: the architecture; copied, never changed.
        precision: models run in its compute dtype, losses in its master dtype.
        loss, metrics: `f(outputs [B, ...], targets [B, ...])`, a batch mean. It is weighted by the batch size, or by
            the number of targets that count if the loss ignores some. Metrics may have states instead, see `metrics`.
        batch_size: samples per batch.
        max_batches: stop after this many batches; None is the whole data set.
        channels_last: whether 4-D weights are in channels-last format.
        class_names: names of the classes, for metrics with a value for each, and for the confusion matrix.
        counts_classes: whether to count a confusion matrix, if samples have classes, or tokens have some with names.
    """

    def __init__(
        self,
        template: nn.Module,
        *,
        precision: Precision,
        loss: Loss,
        metrics: Mapping[str, Metric],
        batch_size: int = 256,
        max_batches: int | None = None,
        channels_last: bool = True,
        class_names: Sequence[str] = (),
        counts_classes: bool = False,
    ) -> None:
        self.template, self.precision = template, precision
        self.loss, self.metrics, self.ignored = loss, dict(metrics), ignored_target(loss)
        self.batch_size, self.max_batches, self.channels_last = batch_size, max_batches, channels_last
        self.class_names, self.counts_classes = class_names, counts_classes

    def module(self, state: State, reads: bool = False) -> nn.Module:
        """Return a module with this state, in master precision and evaluation mode.

        Frozen parameters that the state lacks are the template's. One that only `reads` them has those of the state or
        the template, which are not copied.
        """
        return copy_with(self.template, state, self.precision.master, reads).eval()

    def evaluate(self, state: State, feed: Feed, ranks: Ranks = ALONE, examples: bool = False) -> Evaluation:
        """Evaluate one state over every sample of the feed. Each rank takes a share, and all return the same.

        With `examples` the first rank's evaluation has some, if samples are images or clips of one class each.

        Raises DataError, also if the loss ignores every target, UserError if a metric fails, and RankError if another
        rank failed.
        """
        with ranks.together():
            tally, found = self._tally(state, feed, ranks, examples and ranks.is_first)
        (evaluation,) = tally.evaluations(ranks, found)
        return evaluation

    @torch.no_grad()
    def predict(self, state: State, feed: Feed) -> Tensor:
        """Return the scores [N, ...] of all samples in master precision, probabilities to a loss of classes."""
        found = []
        for scores, targets in self.scores(state, feed):
            dim = -1 if has_tokens(self.loss, scores, targets) else 1  # tokens have their classes last
            found.append(scores.softmax(dim) if takes_classes(self.loss) and scores.ndim > 1 else scores)
        return torch.cat(found)

    @torch.no_grad()
    def scores(self, state: State, feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scores [B, ...], in master precision, and targets of each batch. Raises UserError for several."""
        module = self._runnable(state)
        for batch in feed.evaluation_batches(self.batch_size):
            scores = scores_of(in_format(call(module, batch.inputs), self.precision.master))
            if not isinstance(scores, Tensor):
                raise UserError("predictions need a model with one output, or an entry logits or out; got several.")
            yield scores, batch.targets

    @torch.no_grad()
    def dim_of_classes(self, feed: Feed) -> int | None:
        """Return the dimension of scores [B, ...] that is of classes in these data; None if they have no classes."""
        output, targets = self._tried(feed)
        scores = scores_of(part_for(self.loss)(output))
        if self._are_of_tokens(output, scores, targets):
            return -1
        is_of_classes = takes_classes(self.loss) or is_classification(scores, targets)
        return 1 if is_of_classes and isinstance(scores, Tensor) and scores.ndim > 1 else None

    def _are_of_tokens(self, output: Tree, scores: Tree, targets: Tensor) -> bool:
        """Return whether scores are [B, T, V] and targets [B, T]; a model that has its own loss may shift them."""
        shaped = isinstance(scores, Tensor) and scores.ndim == 3 and scores.shape[:2] == targets.shape
        return shaped and (has_tokens(self.loss, output, targets) or self.loss is model_loss)

    @torch.no_grad()
    def counts_correct(self, feed: Feed) -> bool:
        """Return whether these data have an accuracy: outputs are scores of classes, and targets are classes."""
        return count_correct(*compared(self.loss, *self._tried(feed))) is not None

    @torch.no_grad()
    def num_classes(self, feed: Feed) -> int | None:
        """Return the number of classes that the model tells apart, [B, classes, ...]; None if it has no such output."""
        output, targets = compared(self.loss, *self._tried(feed))
        known = isinstance(output, Tensor) and output.ndim > 1 and not targets.is_floating_point()
        return output.shape[1] if known else None

    @torch.no_grad()
    def metric_names(self, feed: Feed) -> tuple[str, ...]:
        """Return the names of what evaluations of these data have in `metrics`; a name may stand for several values."""
        may_have_tokens = is_mean_nll(self.loss) and feed.first_samples(2).targets.ndim == 2
        own = [PERPLEXITY] if may_have_tokens and has_tokens(self.loss, *self._tried(feed)) else []
        return (*own, *self.metrics)

    @torch.no_grad()
    def tokens_per_sample(self, feed: Feed) -> int | None:
        """Return T of scores [B, T, V] and targets [B, T], whose batches have all the same; else None."""
        if not feed.one_shape or feed.first_samples(2).targets.ndim != 2:
            return None
        output, targets = self._tried(feed)
        scores = scores_of(part_for(self.loss)(output))
        return targets.shape[1] if self._are_of_tokens(output, scores, targets) else None

    def _tried(self, feed: Feed) -> tuple[Tree, Tensor]:
        """Return the template's outputs of two samples, and their targets."""
        batch, own = feed.first_samples(2), self.template
        model = self._runnable({**dict(own.named_parameters()), **dict(own.named_buffers())})
        return call(model, batch.inputs), batch.targets

    @torch.no_grad()
    def _tally(self, state: State, feed: Feed, ranks: Ranks, collects: bool) -> tuple[Tally, Examples | None]:
        """Return what the rank's share of the samples adds up to, and examples if asked for."""
        module = self._runnable(state)
        tally = Tally(self, 1, next((own.device for own in state.values()), torch.device("cpu")))
        share = feed.evaluation_batches(self.batch_size, ranks.rank, ranks.num_ranks)
        num_batches = -(-feed.num_samples // self.batch_size)
        most = num_batches if self.max_batches is None else min(num_batches, self.max_batches)
        numbers = range(ranks.rank, most, ranks.num_ranks)
        collector = _Collector(sum(min(self.batch_size, feed.num_samples - n * self.batch_size) for n in numbers))
        for batch in itertools.islice(share, len(numbers)):
            output = in_format(call(module, batch.inputs), self.precision.master)
            if collects:
                collector.take(batch.inputs, batch.targets, scores_of(output))
            tally.add(map_tree(lambda each: each[None], output), batch.targets)
        return tally, collector.examples(self.ignored)

    def _runnable(self, state: State) -> nn.Module:
        module = cast_module(self.module(state, reads=True), self.precision)
        # One by one: `Module.to` would apply the format to 5-D filters, [O, C, T, H, W], too, and fail.
        for parameter in module.parameters():
            if self.channels_last and parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return module

    @torch.no_grad()
    def recalibrate(self, state: State, inputs: Iterable[Tree], ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Return the state with BatchNorm recalibrated: plain means over all ranks' training batches `inputs`.

        Batches with a non-finite value do not count. If none is left, statistics stay as they are in the state, as do
        those of layers that the model's `train()` keeps in evaluation mode. Raises DataError, and RankError if another
        rank failed.
        """
        module = self._runnable(state).train()
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.training]
        norms = [norm for norm in norms if norm.track_running_stats]
        module.eval()
        for norm in norms:
            norm.reset_running_stats()
            _average_calls(norm)
            norm.train()
        count = 0
        with ranks.together():
            for batch in inputs if norms else ():
                if all(own.isfinite().all() for own in leaves(batch)):  # host–device synchronisation on CUDA
                    call(module, batch)
                    count += 1
        measured = {n: b for n, b in module.named_buffers() if n.endswith(("running_mean", "running_var"))}
        (total,) = ranks.sum([count])
        if total == 0:
            return dict(state)
        if ranks.num_ranks > 1:
            measured = _weighted_means(measured, count, ranks)
        return {**state, **{name: value.to(self.precision.master) for name, value in measured.items()}}


class Tally:
    """Adds up what an evaluation measures of K models, batch by batch, on their device.

    The columns of `sums` [K, 6 + functions], float64, are: targets that count, non-finite outputs, correct predictions
    (NaN without classes), samples or tokens, what means of the loss divide by, loss, each metric that is a function.
    """

    def __init__(self, evaluator: Evaluator, num_models: int, device: torch.device) -> None:
        self._evaluator, self._num_models = evaluator, num_models
        self._functions = {name: own for name, own in evaluator.metrics.items() if not has_states(own)}
        self._running = [RunningMetrics(evaluator.metrics, device) for _ in range(num_models)]
        self._num_samples, self._has_tokens = 0, False
        self._matrices: Tensor | None = None  # [K, C·(C + 1) + 1], see `confusion_indices`
        self._num_classes, self._of_positions = 0, False
        self._sums = torch.zeros(num_models, 6 + len(self._functions), dtype=torch.float64, device=device)

    def add(self, outputs: Tree, targets: Tensor) -> None:
        """Add a batch: outputs [K, B, ...] of K models, and targets [B, ...]."""
        evaluator, device = self._evaluator, self._sums.device
        self._num_samples += len(targets)
        non_finite = non_finite_outputs(outputs, lead=1)
        every = targets.expand(self._num_models, *targets.shape)
        self._has_tokens |= has_tokens(evaluator.loss, outputs, every, lead=1)
        outputs, each_targets = compared(evaluator.loss, outputs, every, lead=1)
        targets = each_targets[0]
        ignored = None if targets.is_floating_point() else evaluator.ignored
        count = _scalar(len(targets) if ignored is None else counted(targets, ignored).sum(), device)
        weight = _scalar(num_averaged(evaluator.loss, targets), device)
        correct = correct_predictions(outputs, each_targets, 1, evaluator.ignored)
        if correct is None:
            correct = torch.full((self._num_models,), torch.nan, device=device)
        size = len(targets)  # of what the loss compares
        columns = [each.to(weight) for each in (count.expand(self._num_models), non_finite, correct)]
        columns += [weight.new_full((self._num_models,), size), weight.expand(self._num_models)]
        each = [map_tree(itemgetter(row), outputs) for row in range(self._num_models)]
        for running, output in zip(self._running, each, strict=True):
            running.update(output, targets, ignored)
        # The next token of a text is a class, but a matrix of what has no names tells nothing.
        if evaluator.counts_classes and (evaluator.class_names or not self._has_tokens):
            self._count_classes(scores_of(outputs), each_targets)
        # Last, as they may write the outputs.
        means = [
            [_scalar(evaluator.loss(output, targets), device)]
            + [_scalar(_asked(name, function, output, targets), device) for name, function in self._functions.items()]
            for output in each
        ]
        found = torch.stack([torch.stack(own) for own in means])
        loss = torch.where(weight > 0, found[:, 0] * weight, 0.0)  # the mean of no targets is NaN
        self._sums += torch.column_stack([*columns, loss, found[:, 1:] * size])

    def _count_classes(self, scores: Tree, targets: Tensor) -> None:
        if not has_classes(self._evaluator.loss, scores, targets, lead=1) or scores.shape[2] > MOST_CLASSES:
            return
        if self._matrices is None:
            self._num_classes, self._of_positions = scores.shape[2], targets.ndim > 2
            size = self._num_classes * (self._num_classes + 1) + 1
            self._matrices = torch.zeros(self._num_models, size, dtype=torch.int64, device=scores.device)
        indices = confusion_indices(scores, targets[0], self._evaluator.ignored)
        self._matrices.scatter_add_(1, indices, torch.ones_like(indices))

    def _class_counts(self, row: int, ranks: Ranks) -> ClassCounts | None:
        """Return the confusion matrix of a model over all ranks. All ranks together."""
        every = ranks.gather([self._num_classes, self._of_positions]) if self._evaluator.counts_classes else []
        num_classes = int(max((own for own, _ in every), default=0))
        if num_classes == 0:
            return None
        shape = num_classes, num_classes + 1
        total = torch.zeros(shape, dtype=torch.int64)  # also where a rank has no batch
        if self._matrices is not None:
            total += self._matrices[row, :-1].view(shape).cpu()
        ranks.add(total)
        of_positions = any(own for _, own in every)
        return ClassCounts(total.numpy(), tuple(self._evaluator.class_names), of_positions)

    def evaluations(self, ranks: Ranks = ALONE, examples: Examples | None = None) -> list[Evaluation]:
        """Return the evaluation of each model over all ranks' batches. All ranks together.

        Raises BadDataError if the loss ignores every target, UserError if a metric fails.
        """
        found = []
        for row, own in enumerate(self._sums.tolist()):  # host–device synchronisation on CUDA
            count, with_tokens, *sums = ranks.sum([self._num_samples, self._has_tokens, *own])
            self._running[row].merge(ranks)
            class_counts = self._class_counts(row, ranks)
            with ranks.together():
                evaluation = self._evaluation(round(count), sums, with_tokens > 0, self._running[row])
            found.append(replace(evaluation, class_counts=class_counts, examples=examples))
        return found

    def _evaluation(
        self, num_samples: int, sums: Sequence[float], has_tokens: bool, running: RunningMetrics
    ) -> Evaluation:
        num_counted, num_non_finite, correct, num_compared, weight, loss, *others = sums
        if not weight:
            raise BadDataError(
                f"the loss leaves out every target of {num_samples:,} samples that are to be evaluated, so there is "
                "nothing to measure; give targets that are classes, or leave these data out."
            )
        mean_loss = loss / weight
        means = {name: total / num_compared for name, total in zip(self._functions, others, strict=True)}
        if has_tokens and is_mean_nll(self._evaluator.loss):
            means = {PERPLEXITY: _perplexity(mean_loss), **means}
        return Evaluation(
            loss=mean_loss,
            accuracy=None if math.isnan(correct) else correct / num_counted,
            num_samples=num_samples,
            metrics=_together(means, running.values(self._evaluator.class_names)),
            num_non_finite=round(num_non_finite),
        )


class _Collector:
    """Collects evenly spaced samples out of `total` that come in batches."""

    def __init__(self, total: int) -> None:
        count = min(NUM_EXAMPLES, total)
        self._wanted = [number * total // count for number in range(count)]
        self._seen = 0
        self._taken: list[tuple[Tensor, ...]] = []

    def take(self, inputs: Tree, targets: Tensor, outputs: Tree) -> None:
        """Take samples of a batch, if it is images [B, C, H, W] or clips [B, C, T, H, W] of one class each."""
        if not isinstance(inputs, Tensor) or not isinstance(outputs, Tensor):
            return
        is_classification = outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
        size = len(targets)
        if inputs.ndim not in (4, 5) or not is_classification or not len(inputs) == size == len(outputs):
            return
        rows = [number - self._seen for number in self._wanted if self._seen <= number < self._seen + size]
        self._seen += size
        if rows:
            self._taken.append(tuple(values[rows].detach().cpu() for values in (inputs, targets, outputs)))

    def examples(self, ignored: int | None) -> Examples | None:
        """Return the samples taken, without those of no class."""
        if not self._taken:
            return None
        inputs, targets, outputs = map(torch.cat, zip(*self._taken, strict=True))
        kept = torch.ones_like(targets, dtype=torch.bool) if ignored is None else counted(targets, ignored)
        return Examples(inputs[kept], targets[kept], outputs[kept]) if kept.any() else None


def evaluate_in_memory(evaluator: Evaluator, state: State, feed: Feed, device: torch.device) -> Evaluation:
    """Evaluate a state; if `device` runs out of memory, halve `evaluator.batch_size` and try again.

    The evaluator keeps the batch size that fits.

    Raises:
        DataError: the data cannot be loaded.
        DeviceLostError: the device no longer responds.
        Exception: what the model raises; out of memory if not even a single sample fits.
    """
    with raising_if_lost(device):
        while True:
            try:
                return evaluator.evaluate(state, feed)
            except Exception as error:
                if evaluator.batch_size == 1 or not is_out_of_memory(error):
                    raise
            evaluator.batch_size //= 2
            free_memory(device)


def _average_calls(norm: nn.modules.batchnorm._NormBase) -> None:
    """Make running statistics plain means over all calls. Without momentum BatchNorm does so; InstanceNorm does not."""
    norm.momentum = None
    calls = itertools.count(1)

    def weigh(*_: object) -> None:
        norm.momentum = 1 / next(calls)

    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        norm.register_forward_pre_hook(weigh)


def _weighted_means(own: Mapping[str, Tensor], count: int, ranks: Ranks) -> dict[str, Tensor]:
    """Return means over all ranks' batches; `own` are this rank's means over its `count` batches."""
    flats = [torch.ones(1, dtype=torch.float64), *(value.double().flatten().cpu() for value in own.values())]
    total = torch.cat(flats) * count
    ranks.add(total)
    num_batches, *sums = torch.split(total, [len(flat) for flat in flats])
    return {
        name: (values / num_batches.clamp(min=1)).view_as(value).to(value)
        for (name, value), values in zip(own.items(), sums, strict=True)
    }


def evaluate_bank(
    bank: ReplicaBank, evaluator: Evaluator, feed: Feed, learners: Sequence[int], *, fused: bool | None = None
) -> list[Evaluation]:
    """Return each learner's evaluation, as `Evaluator.evaluate` gives it.

    Fused, all are evaluated in one pass over the feed. Models that cannot be fused, or do not fit in memory together,
    are evaluated one after another. Not fused, each core evaluates one model after another. That is faster on a CPU:
    batches are large, and nothing has to be exported. Copies of the weights are evaluated; the bank is not changed.

    Args:
        bank: the models, on one device.
        evaluator: evaluates a model.
        feed: the data.
        learners: the rows to evaluate, in any order.
        fused: whether to fuse; by default everywhere but on a CPU.
    """
    if fused is None:
        fused = bank.device.type != "cpu"
    if len(learners) > 1 and not fused:
        states = [bank.learner_state(learner) for learner in learners]
        num_threads = min(torch.get_num_threads(), len(states))
        with ThreadPoolExecutor(num_threads, "crossbow evaluation", lambda: torch.set_num_threads(1)) as pool:
            return list(pool.map(lambda state: evaluator.evaluate(state, feed), states))
    if len(learners) > 1 and feed.one_shape:  # a graph is of one shape
        try:
            return _evaluate_together(prediction_bank(bank, learners), evaluator, feed)
        except FusionError:
            pass
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    return [evaluator.evaluate(bank.learner_state(learner), feed) for learner in learners]


def prediction_bank(bank: ReplicaBank, learners: Sequence[int]) -> ReplicaBank:
    """Return a bank of copies of some learners, for `FusedGraph(..., training=False)`."""
    copies = ReplicaBank(
        bank.template, len(learners), device=bank.device, precision=bank.precision, state_names=(),
        channels_last=bank.layout.channels_last, order="blocks", training=False,
        shares_base=bank.base.is_shared, base=bank.base if bank.base.is_shared else None,
    )  # fmt: skip
    for row, learner in enumerate(learners):
        load_state(copies, row, bank.learner_state(learner))
    return copies


@torch.no_grad()
def load_state(bank: ReplicaBank, row: int, state: Mapping[str, Tensor]) -> None:
    """Copy a module's state dict (tied parameters once) to a row's weights and buffers, also integer buffers."""
    bank.load_values(row, state)
    for name, value in bank.integer_buffers(row).items():
        value.copy_(state[name])


@torch.no_grad()
def _evaluate_together(bank: ReplicaBank, evaluator: Evaluator, feed: Feed) -> list[Evaluation]:
    """Evaluate in one pass. If the last batch is smaller than the others, it gets a graph of its own."""
    graphs: dict[object, FusedGraph] = {}
    tally = Tally(evaluator, bank.num_learners, bank.device)
    for batch in itertools.islice(feed.evaluation_batches(evaluator.batch_size), evaluator.max_batches):
        form = batch_key(batch.inputs)
        if form not in graphs:
            graphs[form] = trusted_outputs(bank, batch.inputs, part=part_for(evaluator.loss))
        outputs = graphs[form].run(batch.inputs, shared=True)
        tally.add(in_format(outputs, bank.precision.master), batch.targets)
    return tally.evaluations()


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).reshape(())
