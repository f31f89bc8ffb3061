"""Fused passes that were compared with eager autograd before they are trusted.

Two learners with weights of their own take two batches, alone by their modules and together by the fused pass; losses,
gradients and buffers have to agree. What a graph cannot have, hooks, custom backward passes and whatever forward keeps
between passes but in buffers, is refused by name even where it made no difference on these batches.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.averaging import Independent
from crossbow_py.core.errors import CrossbowError, one_line
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.export import exported
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.fusion.rules import draws
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.agreement import (
    Difference,
    backward_hook,
    changed_state,
    custom_backwards,
    digits_of,
    furthest,
    gradients_of,
    kept_buffers,
    move,
    moved_weights,
    projection,
    python_state,
    values_of,
)
from crossbow_py.engine.modules.call_watch import CallWatch
from crossbow_py.engine.modules.dropout import OwnDraws
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.rounds import Loss, RoundTasks
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import TorchUpdate

_LEARNERS = range(2)
_MOST_SAMPLES = 64  # that are loaded for it; batches beyond that repeat them
_APART = 0.02  # how far the second learner's weights lie from the first one's, relatively

_FOUND: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Comparison:
    """A model and the data that it is to be trained on: what a comparison depends on.

    Attributes:
        template: the model.
        feed: of training batches.
        loss: of a batch.
        precision, channels_last: of the banks that learners are to train in.
        shared: whether learners take the same batches.
    """

    template: nn.Module
    feed: Feed
    loss: Loss
    precision: Precision
    channels_last: bool
    shared: bool


def trusted_pass(tasks: RoundTasks, kernels: bool = False, learners: range | None = None) -> FusedPass:
    """Return the learning tasks of `learners` in one pass, by operators where kernels give other numbers.

    Raises FusionError for models that cannot be fused, or whose graph gives other numbers than they do.
    """
    bank, shared = tasks.bank, not tasks.update.rule.has_central_model or tasks.bank.num_learners == 1
    compared = Comparison(
        bank.template, tasks.feed, tasks.loss, bank.precision, bank.layout.channels_last, shared
    )  # fmt: skip
    require_agreement(compared)
    notes = []
    if kernels:
        try:
            require_agreement(compared, kernels=True)
        except FusionError as error:
            notes, kernels = [f"Layers run by operators, not by kernels, as with these {error}."], False
    found = FusedPass(tasks, kernels, learners)
    found.notes += notes
    return found


def outdated(tasks: RoundTasks, fused: FusedPass) -> str | None:
    """Return a sentence where a graph no longer gives the numbers of its model, on a learner's weights as they are now.

    A graph repeats what forward found outside the model when it was exported, such as a temperature that a callback
    changes. Nothing is in flight, and nothing is changed. None: they agree, or nobody can tell.
    """
    bank, learner = tasks.bank, fused.learners.start
    shared = not tasks.update.rule.has_central_model or bank.num_learners == 1
    module, names = bank.module(learner), bank.layout.names[: bank.num_trained]
    batch = tasks.feed.for_measuring().batch(0)
    weights = list(bank.weights.shaped(learner).values())

    def seed() -> None:
        torch.manual_seed(0)
        for own in fused.learners:
            bank.generators[own].manual_seed(0)

    def values() -> dict[str, Tensor]:
        seed()
        with kept_buffers(module):
            with OwnDraws(bank.generators[learner]):
                output = module(batch.inputs).to(bank.precision.master)
            return gradients_of(tasks.loss_of(learner, output, batch.targets), module, names)

    def control() -> dict[str, Tensor]:
        with moved_weights(weights, bank.precision.compute):
            bank.refresh_shadow(learner)
            moved = values()
        bank.refresh_shadow(learner)
        return moved

    try:
        with kept_generators(), kept_buffers(*(bank.module(own) for own in fused.learners)):
            seed()
            each = [part if shared else torch.stack([part] * len(fused.learners)) for part in batch]
            learned = fused.learn(Batch(*each), shared)
            gradients = [None if own is None else own[0] for own in learned.gradients]
            found = values_of(learned.losses[0], dict(zip(names, gradients, strict=True)), module)
        with kept_generators():
            difference = furthest(found, values(), control, bank.precision.compute)
    except Exception:  # memory that has run out, or a forward that fails now and says so where it trains
        return None
    if difference is None or not learned.losses.isfinite().all():
        return None
    return (
        f"The graph of the model that is trained with gives other numbers than the model itself by now ({difference}): "
        "it repeats what forward found outside the model when the run began. If that is changed meanwhile, as by a "
        "callback, keep it in a buffer, or set executor=threads or serial."
    )


@torch.no_grad()
def trusted_outputs(bank: ReplicaBank, inputs: Tensor, learners: range | None = None) -> FusedGraph:
    """Return the graph of some models in evaluation mode, once it gives the outputs of the first and last of them.

    Args:
        bank: that is not for training.
        inputs: a batch `[B, ...]` like those to come, in compute precision.
        learners: which models; by default all.

    Raises:
        FusionError: the models cannot be fused, or their graph gives other outputs than they do.
    """
    first = 0 if learners is None else learners.start
    with kept_buffers(bank.module(first)), kept_generators():
        bank.module(first)(inputs.clone())  # before the export: see `_disagreement`
    graph = FusedGraph(bank.template, inputs, bank, learners=learners, training=False)
    known, key = _FOUND.setdefault(bank.template, {}), (tuple(inputs.shape), inputs.dtype, bank.precision.name)
    if key in known:
        return graph
    rows = range(bank.num_learners) if learners is None else learners
    modules = [bank.module(learner) for learner in rows]
    with kept_buffers(*modules), kept_generators():
        outputs = graph.run(inputs.clone(), shared=True)
    for learner in sorted({rows[0], rows[-1]}):
        module, weights = bank.module(learner), list(bank.weights.shaped(learner).values())

        def values(module: nn.Module = module) -> dict[str, Tensor]:
            with kept_buffers(module), kept_generators():
                return {"the output": module(inputs.clone())}

        def control(learner: int = learner, weights: list[Tensor] = weights) -> dict[str, Tensor]:
            with moved_weights(weights, bank.precision.compute):
                bank.refresh_shadow(learner)
                moved = values()
            bank.refresh_shadow(learner)
            return moved

        found = furthest({"the output": outputs[learner - rows[0]]}, values(), control, bank.precision.compute)
        if found is not None:
            raise FusionError(f"its graph gives other numbers than the model itself ({found})")
    known[key] = None
    return graph


def require_agreement(compared: Comparison, kernels: bool = False) -> None:
    """Raise FusionError unless a fused pass of the model gives the model's own numbers; found out once a template."""
    example = compared.feed.for_measuring().batch(0).inputs
    key = (
        tuple(example.shape), example.dtype, compared.precision.name, compared.channels_last, compared.shared, kernels,
    )  # fmt: skip
    known = _FOUND.setdefault(compared.template, {})
    if key not in known:
        try:
            with kept_generators():
                known[key] = _disagreement(compared, kernels)
        except FusionError as error:
            known[key] = str(error)
    if (reason := known[key]) is not None:
        raise FusionError(reason)


def _disagreement(compared: Comparison, kernels: bool) -> str | None:
    if (hooked := backward_hook(compared.template)) is not None:
        return f"{hooked} has a hook on its backward pass, and a graph calls none"
    pair = _Pair(compared, kernels)
    example = compared.feed.for_measuring().batch(0).inputs
    try:
        # Before the export, which would leave tensors without values in what a first pass keeps.
        with _failing("the model itself fails on its first samples"):
            refusal = pair.examine()
    except FusionError:
        exported(compared.template, example, compared.precision)  # which says more
        raise
    if refusal is not None:
        return refusal
    program = exported(compared.template, example, compared.precision)
    if example.device.type == "cuda" and any(
        draws.draws(node) and not draws.is_of_dropout_module(node) for node in program.graph.nodes
    ):
        return "it draws random numbers outside nn.Dropout modules, which on CUDA cannot be compared"
    with _failing("its graph fails on the model's first samples"):
        fused = pair.together()
    with _failing("it cannot be compared with its graph"):
        found = next((each for j in _LEARNERS if (each := pair.difference(j, fused[j])) is not None), None)
        if found is None and pair.is_coarse and not kernels and pair.difference(0, fused[0], alike=True):
            # In a coarse format rounding hides a lot; what the graph's operators give one by one leaves it little.
            found = pair.difference(0, pair.one_by_one(), alike=True)
    return None if found is None else f"its graph gives other numbers than the model itself ({found})"


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Have exceptions of the block refuse the graph, but for memory that has run out."""
    try:
        yield
    except CrossbowError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise FusionError(f"{what} ({one_line(error)[:160]})") from error


class _Pair:
    """Two learners, each with a batch, in a bank of their own."""

    def __init__(self, compared: Comparison, kernels: bool) -> None:
        self._precision, template = compared.precision, compared.template
        device = next(template.parameters()).device
        self._bank = ReplicaBank(
            template, len(_LEARNERS), device=device, precision=compared.precision, state_names=(),
            channels_last=compared.channels_last, order="blocks", training=kernels,  # which write gradients to rows
        )  # fmt: skip
        for learner in _LEARNERS:
            self._bank.module(learner).train()
        self._weights = [list(self._bank.weights.shaped(learner).values()) for learner in _LEARNERS]
        move(self._weights[1], _APART)
        self._bank.refresh_shadow(1)
        self._names = self._bank.layout.names[: self._bank.num_trained]
        self._tasks = RoundTasks(
            self._bank, update=TorchUpdate(SGD(), Independent()), feed=compared.feed, loss=compared.loss, seed=0,
            collective=Collective(),
        )  # fmt: skip
        self._batches, self._shared, self._kernels = _two_batches(compared.feed), compared.shared, kernels
        self._expected: dict[int, dict[str, Tensor]] = {}
        self._moved: dict[int, dict[str, Tensor]] = {}

    @property
    def is_coarse(self) -> bool:
        """Whether rounding explains a lot."""
        return digits_of(self._precision.compute, self._bank.device).itemsize < 4

    def examine(self) -> str | None:
        """Return what a graph cannot have and two passes of the first learner's module show; None: there is nothing."""
        module = self._bank.module(0)
        with kept_buffers(module):
            self._seed()
            with CallWatch() as watch:
                loss = self._own_loss(0, self._batches[0])
            if watch.hooks:
                return f"it hooks its gradients at {watch.hooks[0]}, and a graph calls no hooks"
            if customs := custom_backwards(loss):
                return f"it has a backward pass of its own, {customs[0]}, and a graph has none"
            self._expected[0] = gradients_of(loss, module, self._names)
            before = python_state(module)
        again = self._alone(0)
        if (changed := changed_state(before, python_state(module))) is not None:
            return f"its forward changes {changed}, and a graph would repeat one value"
        # The same operators on the same values: any difference is one that the first pass made.
        found = furthest(again, self._expected[0], lambda: self._expected[0], torch.float32)
        return None if found is None else f"a second pass on the same batch differs ({found}), and a graph's would not"

    def _alone(self, learner: int) -> dict[str, Tensor]:
        """Return what a learner's module gives on its batch."""
        self._seed()
        module = self._bank.module(learner)
        with kept_buffers(module):
            return gradients_of(self._own_loss(learner, self._batches[learner]), module, self._names)

    def _own_loss(self, learner: int, batch: Batch) -> Tensor:
        """Return the loss of a learner's module; in place of one that draws numbers, which have an order, another."""
        with OwnDraws(self._bank.generators[learner]):
            output = self._bank.module(learner)(batch.inputs).to(self._precision.master)
        before = torch.random.get_rng_state()
        loss = self._tasks.loss(output, batch.targets)
        if torch.equal(before, torch.random.get_rng_state()):
            return loss
        self._tasks.loss = lambda output, _: projection(output)
        return projection(output)

    def together(self) -> list[dict[str, Tensor]]:
        """Return what fused passes give for both; learners that share batches have a pass on the batch of each."""
        fused = FusedPass(self._tasks, self._kernels)
        if not self._shared:
            both = Batch(*(torch.stack(each) for each in zip(*self._batches, strict=True)))
            return self._learned(fused, both, shared=False)
        return [self._learned(fused, self._batches[learner], shared=True)[learner] for learner in _LEARNERS]

    def _learned(self, fused: FusedPass, batch: Batch, shared: bool) -> list[dict[str, Tensor]]:
        self._seed()
        with kept_buffers(*(self._bank.module(learner) for learner in fused.learners)):
            learned = fused.learn(batch, shared)
            found = []
            for row, learner in enumerate(fused.learners):
                own = [None if each is None else each[row] for each in learned.gradients]
                own = [each if each is None else each.clone() for each in own] if self._kernels else own
                gradients = dict(zip(self._names, own, strict=True))
                found.append(values_of(learned.losses[row], gradients, self._bank.module(learner)))
        return found

    def _seed(self) -> None:
        for learner in _LEARNERS:
            self._bank.generators[learner].manual_seed(learner)
        torch.manual_seed(0)
        random.seed(0)  # of a model that draws there the export tells
        np.random.seed(0)

    def difference(self, learner: int, found: dict[str, Tensor], alike: bool = False) -> Difference | None:
        """Where values differ from the learner's own by more than rounding explains; see `furthest`."""
        if learner not in self._expected:
            self._expected[learner] = self._alone(learner)

        def control() -> dict[str, Tensor]:
            if learner not in self._moved:
                with moved_weights(self._weights[learner], self._precision.compute):
                    self._bank.refresh_shadow(learner)
                    self._moved[learner] = self._alone(learner)
                self._bank.refresh_shadow(learner)
            return self._moved[learner]

        return furthest(found, self._expected[learner], control, self._precision.compute, alike)

    def one_by_one(self) -> dict[str, Tensor]:
        """Return what the first learner gives by the graph's operators as they were exported."""
        single = FusedPass(self._tasks, learners=range(1), fuses=False)
        (found,) = self._learned(single, Batch(*(each[None] for each in self._batches[0])), shared=False)
        return found


def _two_batches(feed: Feed) -> tuple[Batch, Batch]:
    """Real samples, each batch its own, as far as there are as many; small data and large batches repeat some."""
    size = feed.batch_size
    few = feed.first_samples(min(2 * size, _MOST_SAMPLES, feed.num_samples))
    count = len(few.targets)
    first, second = (torch.arange(start, start + size) % count for start in (0, size if size < count else 1))
    return Batch(*(each[first] for each in few)), Batch(*(each[second] for each in few))
