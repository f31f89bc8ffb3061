"""Measuring many models of one architecture in one pass over a data set: the rows of a bank, fused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from crossbow_py.data.feed import Feed
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.fused_agreement import trusted_outputs
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.losses import correct_predictions, non_finite_outputs
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, count_targets, evaluation_from_sums


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
