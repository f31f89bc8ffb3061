"""Measuring a model that is not being trained: loss, accuracy and metrics over a data set, and BatchNorm statistics."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import BadDataError
from crossbow_py.data.datasets import counted
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory, raising_if_lost
from crossbow_py.engine.fusion.fused_agreement import trusted_outputs
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.losses import (
    Loss,
    correct_predictions,
    count_correct,
    ignored_target,
    non_finite_outputs,
)
from crossbow_py.engine.modules.precision import Precision, cast_module

Metric = Callable[[Tensor, Tensor], Tensor | float]
State = Mapping[str, Tensor]  # a module's state dict, tied parameters once

NUM_EXAMPLES = 24

_MOST_SAMPLES, _FEWEST_SAMPLES = 256, 8
_MOST_VALUES = 2**22  # in a batch: 27 images of 224 x 224


@dataclass(frozen=True)
class Examples:
    """Samples from all over the first rank's share, `NUM_EXAMPLES` if it has as many, and what the model said of them.

    On the host, and always the same samples: `inputs` [N, C, H, W] or [N, C, T, H, W] as the model had them, `targets`
    [N] and `outputs` [N, classes].
    """

    inputs: Tensor
    targets: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Means over `num_samples`; `accuracy` is a fraction, None when the task is not classification.

    Where the loss leaves some targets out (see `ignored_target`), `loss` and `accuracy` are means over the others: over
    the pixels of masks that count, say. `num_non_finite` samples have outputs that are not finite, which count as
    wrong. `examples` are on the first rank alone.
    """

    loss: float
    accuracy: float | None
    num_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    num_non_finite: int = 0
    examples: Examples | None = field(default=None, compare=False, repr=False)


def non_finite_remark(what: str, num_non_finite: int, num_samples: int) -> str:
    """Tell the user what became of samples whose outputs are not finite."""
    return (
        f"{what}: the outputs of {num_non_finite:,} of {num_samples:,} samples are not finite, which counts as wrong; "
        "look for NaN in these data, or for weights that have grown too large."
    )


def mean_evaluation(each: Sequence[Evaluation]) -> Evaluation:
    """The plain mean of several evaluations of the same samples (independent learners)."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(each)

    accuracies = [one.accuracy for one in each if one.accuracy is not None]
    return Evaluation(
        loss=mean(one.loss for one in each),
        accuracy=mean(accuracies) if accuracies else None,
        num_samples=each[0].num_samples,
        metrics={name: mean(one.metrics[name] for one in each) for name in each[0].metrics},
        num_non_finite=max(one.num_non_finite for one in each),
        examples=each[0].examples,
    )


def evaluation_batch_size(values_a_sample: int) -> int:
    """Samples to evaluate at once: 256, and fewer of large ones, whose activations would outgrow those of training."""
    return max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, _MOST_VALUES // values_a_sample))


def evaluation_from_sums(
    num_samples: float, sums: Sequence[float], metrics: Iterable[str], examples: Examples | None = None
) -> Evaluation:
    """The evaluation of so many samples. Raises BadDataError where the loss leaves out every target.

    `sums` are of targets that count, outputs that are not finite, right predictions (NaN: no classes), loss, metrics.
    """
    num_counted, num_non_finite, correct, loss, *others = sums
    if not num_counted:
        raise BadDataError(
            f"the loss leaves out every target of {round(num_samples):,} samples that are to be evaluated, so there is "
            "nothing to measure; give targets that are classes, or leave these data out."
        )
    return Evaluation(
        loss=loss / num_counted,
        accuracy=None if math.isnan(correct) else correct / num_counted,
        num_samples=round(num_samples),
        metrics={name: total / num_samples for name, total in zip(metrics, others, strict=True)},
        num_non_finite=round(num_non_finite),
        examples=examples,
    )


def count_targets(targets: Tensor, ignored: int | None) -> Tensor:
    """How much the mean loss of a batch weighs: its targets that count, or its samples where a loss leaves none out."""
    if ignored is None or targets.is_floating_point():
        return torch.tensor(float(len(targets)))
    return counted(targets, ignored).sum()


class Evaluator:
    """Runs states of one architecture over a feed, in evaluation mode, with all of torch's threads.

    Args:
        template: the architecture; copied, never changed.
        precision: models run in its compute dtype, losses in its master dtype.
        loss, metrics: `f(outputs [B, ...], targets [B, ...])`; a batch mean, weighted by batch size, or, of a loss that
            leaves targets out, by the number of the others.
        batch_size: samples at once.
        max_batches: stop after that many (None: the whole data set).
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
    ) -> None:
        self.template, self.precision = template, precision
        self.loss, self.metrics, self.ignored = loss, dict(metrics), ignored_target(loss)
        self.batch_size, self.max_batches, self.channels_last = batch_size, max_batches, channels_last

    def module(self, state: State) -> nn.Module:
        """A module with this state in master precision, evaluation mode."""
        full = replace(self.precision, compute=self.precision.master)
        module = cast_module(copy.deepcopy(self.template), full)  # which leaves complex buffers alone
        with torch.no_grad():
            for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
                value.copy_(state[name])
        return module.eval()

    def evaluate(self, state: State, feed: Feed, ranks: Ranks = ALONE, examples: bool = False) -> Evaluation:
        """Evaluate one state over every sample of the feed, of which each rank takes a share; alike on all.

        With `examples` the first rank's has some, where samples are images or clips of one class each.

        Raises DataError, also where the loss leaves out every target, and RankError where another rank failed.
        """
        with ranks.together():
            count, own, found = self._sums(state, feed, ranks, examples and ranks.is_first)
        count, *sums = ranks.sum([count, *own])
        return evaluation_from_sums(count, sums, self.metrics, found)

    @torch.no_grad()
    def counts_correct(self, feed: Feed) -> bool:
        """Whether there is an accuracy on that data: the model gives scores of classes, and the targets are such."""
        batch, own = feed.first_samples(2), self.template
        model = self._runnable({**dict(own.named_parameters()), **dict(own.named_buffers())})
        return count_correct(model(batch.inputs), batch.targets) is not None

    @torch.no_grad()
    def _sums(
        self, state: State, feed: Feed, ranks: Ranks, collects: bool
    ) -> tuple[float, list[float], Examples | None]:
        """How many samples the rank measured, their sums, and what there is to show, if it collects that.

        Sums are those of `evaluation_from_sums`.
        """
        module = self._runnable(state)
        count, sums = 0, [0.0] * (4 + len(self.metrics))
        share = feed.evaluation_batches(self.batch_size, ranks.rank, ranks.num_ranks)
        numbers = self._batch_numbers(feed, ranks)
        collector = _Collector(sum(min(self.batch_size, feed.num_samples - n * self.batch_size) for n in numbers))
        for batch in itertools.islice(share, len(numbers)):
            output = module(batch.inputs).to(self.precision.master)
            if collects and _are_classified_images(*batch, output):
                collector.take(*batch, output)
            size, weight = len(batch.targets), float(count_targets(batch.targets, self.ignored))
            correct = count_correct(output, batch.targets, self.ignored)
            own = [weight, float(non_finite_outputs(output)), math.nan if correct is None else correct]
            own += [float(self.loss(output, batch.targets)) * weight if weight else 0.0]
            own += [float(metric(output, batch.targets)) * size for metric in self.metrics.values()]
            sums = [total + value for total, value in zip(sums, own, strict=True)]
            count += size
        return count, sums, collector.examples(self.ignored)

    def _batch_numbers(self, feed: Feed, ranks: Ranks) -> range:
        """Those that the rank takes."""
        num_batches = -(-feed.num_samples // self.batch_size)
        most = num_batches if self.max_batches is None else min(num_batches, self.max_batches)
        return range(ranks.rank, most, ranks.num_ranks)

    def _runnable(self, state: State) -> nn.Module:
        module = cast_module(self.module(state), self.precision)
        # One by one: `Module.to` tries the format on filters of clips, [O, C, T, H, W], too, and fails.
        for parameter in module.parameters():
            if self.channels_last and parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return module

    @torch.no_grad()
    def recalibrate(self, state: State, inputs: Iterable[Tensor], ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """The state with BatchNorm statistics measured anew: plain means over all ranks' training batches `inputs`.

        Batches with a value that is not finite do not count; where none is left, statistics are those of the state, as
        are those of layers that the model's `train()` keeps in evaluation mode. Raises DataError, and RankError where
        another rank failed.
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
                if batch.isfinite().all():  # host–device synchronisation on CUDA
                    module(batch)
                    count += 1
        measured = {n: b for n, b in module.named_buffers() if n.endswith(("running_mean", "running_var"))}
        (total,) = ranks.sum([count])
        if total == 0:
            return dict(state)
        if ranks.num_ranks > 1:
            measured = _weighted_means(measured, count, ranks)
        return {**state, **{name: value.to(self.precision.master) for name, value in measured.items()}}


def _are_classified_images(inputs: Tensor, targets: Tensor, outputs: Tensor) -> bool:
    """Images [B, C, H, W] or clips [B, C, T, H, W] of one class each."""
    is_classification = outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
    return inputs.ndim in (4, 5) and is_classification and len(inputs) == len(targets) == len(outputs)


class _Collector:
    """Takes samples at even distances out of `total` that come by in batches."""

    def __init__(self, total: int) -> None:
        count = min(NUM_EXAMPLES, total)
        self._wanted = [place * total // count for place in range(count)]
        self._seen = 0
        self._parts: list[tuple[Tensor, ...]] = []

    def take(self, *parts: Tensor) -> None:
        """What there is of a batch: inputs, targets and outputs."""
        size = len(parts[1])
        places = [place - self._seen for place in self._wanted if self._seen <= place < self._seen + size]
        self._seen += size
        if places:
            self._parts.append(tuple(part[places].detach().cpu() for part in parts))

    def examples(self, ignored: int | None) -> Examples | None:
        """What was taken, but for samples that are of no class."""
        if not self._parts:
            return None
        inputs, targets, outputs = map(torch.cat, zip(*self._parts, strict=True))
        kept = torch.ones_like(targets, dtype=torch.bool) if ignored is None else counted(targets, ignored)
        return Examples(inputs[kept], targets[kept], outputs[kept]) if kept.any() else None


def evaluate_in_memory(evaluator: Evaluator, state: State, feed: Feed, device: torch.device) -> Evaluation:
    """As `Evaluator.evaluate`, with as many samples at once as the memory of `device` holds: `batch_size`, or halves.

    `batch_size` stays at what was held.

    Raises:
        DataError: the data cannot be loaded.
        DeviceLostError: the device does nothing any more.
        Exception: what the model raises; that memory is short where it does not hold a single sample.
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
    """Have running statistics be plain means over all calls, which is what no momentum means to BatchNorm alone."""
    norm.momentum = None
    calls = itertools.count(1)

    def weigh(*_: object) -> None:
        norm.momentum = 1 / next(calls)

    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        norm.register_forward_pre_hook(weigh)


def _weighted_means(own: Mapping[str, Tensor], count: int, ranks: Ranks) -> dict[str, Tensor]:
    """Means over all ranks' batches, of which each has the mean over its `count`."""
    parts = [torch.ones(1, dtype=torch.float64), *(value.double().flatten().cpu() for value in own.values())]
    flat = torch.cat(parts) * count
    ranks.add(flat)
    total, *sums = torch.split(flat, [len(part) for part in parts])
    return {
        name: (values / total.clamp(min=1)).view_as(value).to(value)
        for (name, value), values in zip(own.items(), sums, strict=True)
    }


def evaluate_bank(
    bank: ReplicaBank, evaluator: Evaluator, feed: Feed, learners: Sequence[int], *, fused: bool | None = None
) -> list[Evaluation]:
    """Each learner's evaluation as `Evaluator.evaluate` has it.

    Fused, all come from one pass over the feed; models that cannot be fused, or not in the memory that is left, are
    evaluated one after another. Without, on a CPU, each core evaluates one model after another, which is faster there:
    batches are large, and nothing has to be exported. The bank is left as it is: what runs is a copy of its weights.

    Args:
        bank: of models on one device.
        evaluator: how they are measured.
        feed: on what.
        learners: which rows, in any order.
        fused: by default everywhere but on a CPU.
    """
    if fused is None:
        fused = bank.device.type != "cpu"
    if len(learners) > 1 and not fused:
        return _evaluate_side_by_side(bank, evaluator, feed, learners)
    if len(learners) > 1:
        try:
            return _evaluate_together(prediction_bank(bank, learners), evaluator, feed)
        except FusionError:
            pass
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    return [evaluator.evaluate(bank.learner_state(learner), feed) for learner in learners]


def _evaluate_side_by_side(
    bank: ReplicaBank, evaluator: Evaluator, feed: Feed, learners: Sequence[int]
) -> list[Evaluation]:
    """On a thread a core, with one intra-op thread each."""
    states = [bank.learner_state(learner) for learner in learners]
    num_threads = min(torch.get_num_threads(), len(states))
    with ThreadPoolExecutor(num_threads, "crossbow evaluation", lambda: torch.set_num_threads(1)) as pool:
        return list(pool.map(lambda state: evaluator.evaluate(state, feed), states))


def prediction_bank(bank: ReplicaBank, learners: Sequence[int]) -> ReplicaBank:
    """A bank of copies of some learners, for `FusedGraph(..., training=False)`."""
    copies = ReplicaBank(
        bank.template, len(learners), device=bank.device, precision=bank.precision, state_names=(),
        channels_last=bank.layout.channels_last, order="blocks", training=False,
    )  # fmt: skip
    for row, learner in enumerate(learners):
        load_state(copies, row, bank.learner_state(learner))
    return copies


@torch.no_grad()
def load_state(bank: ReplicaBank, row: int, state: Mapping[str, Tensor]) -> None:
    """A row's weights and buffers ← a module's state dict (tied parameters once), integer buffers included."""
    for name, value in bank.learner_state(row).items():
        value.copy_(state[name])
    bank.refresh_shadow(row)


@torch.no_grad()
def _evaluate_together(bank: ReplicaBank, evaluator: Evaluator, feed: Feed) -> list[Evaluation]:
    """The last batch may be smaller than the others: then there is a graph for it, too."""
    graphs: dict[torch.Size, FusedGraph] = {}
    count, sums = 0, torch.zeros(bank.num_learners, 4 + len(evaluator.metrics), dtype=torch.float64, device=bank.device)
    for batch in itertools.islice(feed.evaluation_batches(evaluator.batch_size), evaluator.max_batches):
        shape = batch.inputs.shape
        if shape not in graphs:
            graphs[shape] = trusted_outputs(bank, batch.inputs)
        outputs = graphs[shape].run(batch.inputs, shared=True).to(bank.precision.master)
        sums += _measured(evaluator, outputs, batch.targets)
        count += len(batch.targets)
    # The only host–device synchronisation, unless a metric has one.
    return [evaluation_from_sums(count, own, evaluator.metrics) for own in sums.tolist()]


def _measured(evaluator: Evaluator, outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums `[K, 4 + metrics]` of each learner's outputs `[K, B, ...]`, in the order of `evaluation_from_sums`."""
    ignored, size = evaluator.ignored, len(targets)
    weight = _scalar(count_targets(targets, ignored), outputs.device)
    functions = [evaluator.loss, *evaluator.metrics.values()]
    means = [[_scalar(function(output, targets), outputs.device) for function in functions] for output in outputs]
    sums = torch.stack([torch.stack(each) for each in means])
    loss = torch.where(weight > 0, sums[:, 0] * weight, 0.0)  # the mean of none is NaN
    correct = correct_predictions(outputs, targets.expand(len(outputs), *targets.shape), 1, ignored)
    if correct is None:
        correct = torch.full((len(outputs),), torch.nan)
    columns = [weight.expand(len(outputs)), non_finite_outputs(outputs, lead=1).to(sums), correct.to(sums), loss]
    return torch.column_stack([*columns, sums[:, 1:] * size])


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).reshape(())
