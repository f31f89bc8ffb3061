"""Fused passes, which are compared with eager autograd before they are trusted.

Two learners with different weights take two batches, alone by their modules and together by the fused pass; losses,
gradients and buffers must agree. What an exported graph cannot represent (hooks, custom backward passes, state that
forward keeps outside buffers) is refused by name, even if it made no difference on these batches.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.averaging import Independent
from crossbow_py.core.errors import CrossbowError, one_line
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import Tree, batch_key, call, leaves, map_tree
from crossbow_py.core.triton_launch import KernelError
from crossbow_py.data.feed import Batch, Feed, stacked
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.export import exported
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.fusion.rules import draws
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.call_watch import CallWatch
from crossbow_py.engine.modules.dropout import OwnDraws
from crossbow_py.engine.modules.losses import Loss, Part, part_for, scores_of
from crossbow_py.engine.modules.precision import Precision
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.trust import compare, not_used, once, refusal
from crossbow_py.engine.trust.side_effects import backward_hook, custom_backwards, kept_between_passes
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import TorchUpdate

_LEARNERS = range(2)
_MOST_SAMPLES = 64  # samples to load; larger batches repeat them
_MANY_SHAPES = (
    "the batches of its data may differ in shape, and learners' batches are put together; pad samples to one length, "
    "and say so by Collated(..., one_shape=True)"
)
_APART = 0.02  # relative distance of the second learner's weights from the first one's


@dataclass(frozen=True)
class Comparison:
    """Everything a comparison depends on: the model, the data and loss that it is to be trained on, and its bank.

    `shared` says whether learners take the same batches, `accumulate` in how many micro-batches each, and `one_row`
    whether they have one row of weights.
    """

    template: nn.Module
    feed: Feed
    loss: Loss
    precision: Precision
    channels_last: bool
    shared: bool
    accumulate: int = 1
    shares_base: bool = True
    one_row: bool = False

    @property
    def example(self) -> Tree:
        """Inputs of one micro-batch."""
        return self.feed.for_measuring().batch(0).parts(self.accumulate)[0].inputs


def trusted_pass(tasks: RoundTasks, kernels: bool = False, learners: range | None = None) -> FusedPass:
    """Return the learning tasks of `learners` in one pass, by operators if kernels fail or give other numbers.

    Blocks the host, which measures ways to run its layers: nothing may be in flight. Raises FusionError if the model
    cannot be fused, or if its graph gives other numbers than the model.
    """
    bank = tasks.bank
    compared = Comparison(
        bank.template, tasks.feed, tasks.loss, bank.precision, bank.layout.channels_last, _shares_batches(tasks),
        tasks.accumulate, bank.base.is_shared, bank.one_row,
    )  # fmt: skip
    require_agreement(compared)
    if bank.one_row and bank.device.type == "cuda":  # as in rounds that compare gradients; asked before these are known
        require_agreement(replace(compared, one_row=False))
    try:
        if kernels:
            require_agreement(compared, kernels=True)
        found = FusedPass(tasks, kernels, learners)
        found.graph.measure()
    except (FusionError, KernelError) as error:
        if not kernels:
            raise
        found = FusedPass(tasks, learners=learners)
        found.notes.append(not_used("Kernels for layers", f"{error}"))
    return found


def _shares_batches(tasks: RoundTasks) -> bool:
    return not tasks.update.rule.has_central_model or tasks.bank.num_learners == 1


def _with_moved_weights(bank: ReplicaBank, learner: int, values: Callable[[], compare.Values]) -> compare.Values:
    """Return the control of a comparison: values with a learner's weights moved by about one rounding."""
    try:
        with compare.moved_weights(list(bank.weights.shaped(learner).values()), bank.precision.compute):
            bank.refresh_shadow(learner)
            return values()
    finally:
        bank.refresh_shadow(learner)


class Passes:
    """Passes of a bank's learners, by their modules and by a fused graph, that leave buffers as they were.

    All begin with the same random numbers.
    """

    def __init__(self, tasks: RoundTasks) -> None:
        self.tasks, self.bank = tasks, tasks.bank
        self.names = self.bank.layout.names

    def seed(self) -> None:
        """Have all generators begin anew."""
        for learner in range(self.bank.num_learners):
            self.bank.generators[learner].manual_seed(learner)
        torch.manual_seed(0)
        random.seed(0)  # the export reports models that draw from it
        np.random.seed(0)

    def loss(self, learner: int, batch: Batch) -> Tensor:
        """Return the loss of a learner's module on a batch."""
        with OwnDraws(self.bank.generators[learner]):
            output, targets = self.tasks.read(call(self.bank.module(learner), batch.inputs), batch.targets)
        return self.loss_of(learner, output, targets)

    def loss_of(self, learner: int, output: Tree, targets: Tensor) -> Tensor:
        """Return the loss of a learner's output."""
        return self.tasks.loss_of(learner, output, targets)

    def alone(self, learner: int, batch: Batch) -> dict[str, Tensor]:
        """Return what a learner's module gives on a batch, see `gradients_of`."""
        self.seed()
        module = self.bank.module(learner)
        with compare.kept_buffers(module):
            return compare.gradients_of(self.loss(learner, batch), module, self.names)

    def control(self, learner: int, batch: Batch) -> Callable[[], compare.Values]:
        """Return what computes the same with weights that are moved by about one rounding."""
        return partial(_with_moved_weights, self.bank, learner, partial(self.alone, learner, batch))

    def together(
        self, fused: FusedPass, batch: Batch, shared: bool, rows: int | None = None, copies: bool = False
    ) -> list[dict[str, Tensor]]:
        """Return what a fused pass gives for its first `rows` learners, by default all.

        `copies` has gradients copied, which may be the bank's own.
        """
        self.seed()
        with compare.kept_buffers(*(self.bank.module(learner) for learner in fused.learners)):
            found = []
            losses, gradients = self._learned(fused, batch, shared, range(len(fused.learners))[:rows])
            for learner, loss, own in zip(fused.learners, losses, gradients, strict=False):
                kept = [each if each is None else each.clone() for each in own] if copies else own
                named = dict(zip(self.names, kept, strict=True))
                found.append(compare.values_of(loss, named, self.bank.module(learner)))
        return found

    def _learned(
        self, fused: FusedPass, batch: Batch, shared: bool, rows: range
    ) -> tuple[Tensor, Iterable[list[Tensor | None]]]:
        """Return losses, and gradients learner by learner."""
        if self.bank.one_row:
            return fused.learn_apart(batch, shared, rows)
        learned = fused.learn(batch, shared)
        return learned.losses, [[None if each is None else each[row] for each in learned.gradients] for row in rows]


def outdated(tasks: RoundTasks, fused: FusedPass) -> str | None:
    """Return a message if a graph no longer gives its model's numbers on a learner's current weights, else None.

    A graph repeats what forward read outside the model when it was exported, such as a temperature that a callback
    changes. Nothing may be in flight, and nothing is changed. Also None if they cannot be compared.
    """
    passes, learner = Passes(tasks), fused.learners.start
    shared = _shares_batches(tasks)
    batch = tasks.feed.for_measuring().batch(0).parts(tasks.accumulate)[0]
    try:
        with kept_generators(tasks.bank.device):
            given = batch if shared else batch.map(lambda values: torch.stack([values] * len(fused.learners)))
            found = passes.together(fused, given, shared, rows=1)[0]
            expected, control = passes.alone(learner, batch), passes.control(learner, batch)
            difference = compare.furthest(found, expected, control, tasks.bank.precision.compute)
    except Exception:  # memory has run out, or forward fails now, which training will report
        return None
    if difference is None or not found["the loss"].isfinite():
        return None
    return (
        f"The graph of the model that is trained with gives other numbers than the model itself by now ({difference}): "
        "it repeats what forward found outside the model when the run began. If that is changed meanwhile, as by a "
        "callback, keep it in a buffer, or set executor=threads or serial."
    )


@torch.no_grad()
def trusted_outputs(
    bank: ReplicaBank, inputs: Tree, learners: range | None = None, part: Part = scores_of
) -> FusedGraph:
    """Return the graph of some models in evaluation mode, once it gives the outputs of the first and last of them.

    Args:
        bank: a bank that is not for training.
        inputs: a batch `[B, ...]` like those to come, in compute precision.
        learners: the models; by default all.
        part: gives what is needed of an output.

    Raises:
        FusionError: the models cannot be fused, or their graph gives other outputs than the models.
    """
    rows = range(bank.num_learners) if learners is None else learners
    modules = [bank.module(learner) for learner in rows]
    with compare.kept_buffers(modules[0]), kept_generators(bank.device):
        call(modules[0], map_tree(torch.clone, inputs))  # before the export: see `_disagreement`
    graph = FusedGraph(bank.template, inputs, bank, learners=learners, training=False, part=part)

    def check() -> None:
        with compare.kept_buffers(*modules), kept_generators(bank.device):
            outputs = graph.run(map_tree(torch.clone, inputs), shared=True)
        for learner in sorted({rows[0], rows[-1]}):
            own = compare.outputs_by_name(map_tree(itemgetter(learner - rows[0]), outputs))
            values = partial(alone, learner)
            control = partial(_with_moved_weights, bank, learner, values)
            _require(compare.furthest(own, values(), control, bank.precision.compute))

    def alone(learner: int) -> dict[str, Tensor]:
        module = bank.module(learner)
        with compare.kept_buffers(module), kept_generators(bank.device):
            return compare.outputs_by_name(part(call(module, map_tree(torch.clone, inputs))))

    key = batch_key(inputs), bank.precision.name, part, bank.base.is_shared
    once("fused outputs", key, check, bank.template)  # passes alone: weights, of which there are others, decide too
    return graph


def _require(difference: compare.Difference | None) -> None:
    if difference is not None:
        raise FusionError(f"its graph gives other numbers than the model itself ({difference})")


def require_agreement(compared: Comparison, kernels: bool = False) -> None:
    """Raise FusionError unless a fused pass of the model gives the model's own numbers; checked once per template.

    With `kernels`, a pass by operators is checked first, and with it what the model does besides computing values.
    """
    if not compared.feed.one_shape:
        raise FusionError(_MANY_SHAPES)
    if kernels:
        require_agreement(compared)
    example = compared.example
    part = part_for(compared.loss)
    key = (
        batch_key(example), compared.precision.name, compared.channels_last, compared.shared, kernels, part,
        compared.shares_base, compared.one_row,
    )  # fmt: skip

    def check() -> None:
        with kept_generators(leaves(example)[0].device):
            _compare(compared, kernels)

    if (reason := refusal("fused graph", key, check, FusionError, compared.template)) is not None:
        raise FusionError(reason)


def _compare(compared: Comparison, kernels: bool) -> None:
    """Raise FusionError if the graph cannot stand for the model, or gives other numbers."""
    pair = _Pair(compared, kernels)
    if not kernels:
        _check_graph(pair, compared)
    with _failing("its graph fails on the model's first samples"):
        fused = pair.by_graph()
    with _failing("it cannot be compared with its graph"):
        for learner in _LEARNERS:
            _require(pair.difference(learner, fused[learner]))
        if pair.part_buffers():
            _require(pair.difference(1, pair.by_graph()[1]))
        if pair.is_coarse and not kernels and pair.difference(0, fused[0], same=True):
            # In a coarse format rounding hides a lot; running the graph's operators one by one leaves little to it.
            _require(pair.difference(0, pair.one_by_one(), same=True))
        if kernels and compared.one_row:
            _require(pair.difference_of_sums())
        if kernels and compared.precision.compute.itemsize < 4:
            _require(pair.less_precise(fused[0]))


def _check_graph(pair: _Pair, compared: Comparison) -> None:
    """Raise FusionError if no graph can stand for the model, whatever numbers it gives."""
    if (hooked := backward_hook(compared.template)) is not None:
        raise FusionError(f"{hooked} has a hook on its backward pass, and a graph calls none")
    example, export = compared.example, partial(exported, part=part_for(compared.loss))
    try:
        # Before the export, or what a first pass keeps would be tensors without values.
        with _failing("the model itself fails on its first samples"):
            refused = pair.examine()
    except FusionError:
        export(compared.template, example, compared.precision)  # whose error says more
        raise
    if refused is not None:
        raise FusionError(refused)
    program = export(compared.template, example, compared.precision)
    if leaves(example)[0].device.type == "cuda" and any(
        draws.draws(node) and not draws.is_of_dropout_module(node) for node in program.graph.nodes
    ):
        raise FusionError("it draws random numbers outside nn.Dropout modules, which on CUDA cannot be compared")


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn exceptions of the block into FusionError, except when memory has run out."""
    try:
        yield
    except CrossbowError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise FusionError(f"{what} ({one_line(error)[:160]})") from error


class _Pair(Passes):
    """Two learners, each with a batch, in a bank made for the comparison."""

    def __init__(self, compared: Comparison, kernels: bool) -> None:
        template = compared.template
        bank = ReplicaBank(
            template, len(_LEARNERS), device=next(template.parameters()).device, precision=compared.precision,
            state_names=(), channels_last=compared.channels_last, order="blocks",
            training=kernels,  # which write gradients to rows
            one_row=compared.one_row, shares_base=compared.shares_base,
        )  # fmt: skip
        for learner in _LEARNERS:
            bank.module(learner).train()
        if not bank.one_row:
            compare.move(list(bank.weights.shaped(1).values()), _APART)
            bank.refresh_shadow(1)
        update = TorchUpdate(SGD(), Independent())
        tasks = RoundTasks(
            bank, update=update, feed=compared.feed, loss=compared.loss, seed=0, collective=Collective(),
            accumulate=compared.accumulate,
        )  # fmt: skip
        super().__init__(tasks)
        self._batches, self._shared, self._kernels = _two_batches(compared), compared.shared, kernels
        self._expected: dict[int, dict[str, Tensor]] = {}
        self._controls = [cache(self.control(*pair)) for pair in enumerate(self._batches)]

    @property
    def is_coarse(self) -> bool:
        """Return whether the format is so coarse that rounding explains a lot."""
        return compare.digits_of(self.bank.precision.compute, self.bank.device).itemsize < 4

    def examine(self) -> str | None:
        """Return what two passes of the first learner's module show that a graph cannot have, or None."""
        module = self.bank.module(0)
        with compare.kept_buffers(module):
            self.seed()
            with CallWatch() as watch:
                loss = self.loss(0, self._batches[0])
            if watch.hooks:
                return f"it hooks its gradients at {watch.hooks[0]}, and a graph calls no hooks"
            if customs := custom_backwards(loss):
                return f"it has a backward pass of its own, {customs[0]}, and a graph has none"
            self._expected[0] = compare.gradients_of(loss, module, self.names)
        kept = kept_between_passes(module, self._expected[0], partial(self.alone, 0, self._batches[0]))
        if isinstance(kept, str):
            return f"its forward changes {kept}, and a graph would repeat one value"
        return None if kept is None else f"a second pass on the same batch differs ({kept}), and a graph's would not"

    def loss_of(self, learner: int, output: Tree, targets: Tensor) -> Tensor:
        """Return the loss; if it draws random numbers, whose order a fused pass changes, use another from then on."""
        before = torch.random.get_rng_state()
        loss = super().loss_of(learner, output, targets)
        if torch.equal(before, torch.random.get_rng_state()):
            return loss
        self.tasks.loss = lambda output, _: compare.projection(output)
        return compare.projection(output)

    def by_graph(self) -> list[dict[str, Tensor]]:
        """Return what fused passes give for both learners; if they share batches, a pass on the batch of each."""
        self.expected(0)  # after which the loss is one that draws nothing
        self._fused = fused = FusedPass(self.tasks, self._kernels)
        if not self._shared:
            both = stacked(self._batches)
            return self.together(fused, both, shared=False, copies=self._kernels)
        return [
            self.together(fused, batch, shared=True, copies=self._kernels)[learner]
            for learner, batch in enumerate(self._batches)
        ]

    def part_buffers(self) -> bool:
        """Move the second learner's buffers that its graph took for the first one's.

        Return whether there are any with which the model still computes: borders of a domain cannot be moved.
        """
        own = dict(self.bank.module(1).named_buffers())
        found = [own[name] for name in sorted(self._fused.graph.shared_buffers) if own[name].is_floating_point()]
        if not found:
            return False
        compare.move(found, _APART)
        self._expected.pop(1, None)
        self._controls[1].cache_clear()
        try:
            return bool(self.expected(1)["the loss"].isfinite())
        except (ArithmeticError, IndexError, RuntimeError, ValueError):
            return False

    def difference(self, learner: int, found: compare.Values, same: bool = False) -> compare.Difference | None:
        """Return where values differ from the learner's own by more than rounding explains; see `furthest`."""
        compute = self.bank.precision.compute
        return compare.furthest(found, self.expected(learner), self._controls[learner], compute, same)

    def difference_of_sums(self) -> compare.Difference | None:
        """Return where a pass as in training, of learners in one row, differs from the sum of both learners' own."""
        own = self._batches[:1] * 2 if self._shared else self._batches
        batch = own[0] if self._shared else stacked(own)
        self.seed()
        with compare.kept_buffers(*(self.bank.module(learner) for learner in _LEARNERS)):
            learned = self._fused.learn(batch, self._shared)
        named = dict(zip(self.names, learned.gradients, strict=True))
        found = compare.values_of(learned.losses.sum(), named, self.bank.module(0))

        def control() -> compare.Values:
            return _added([self.control(learner, own[learner])() for learner in _LEARNERS])

        expected = _added([self.alone(learner, own[learner]) for learner in _LEARNERS])
        return compare.furthest(found, expected, control, self.bank.precision.compute)

    def expected(self, learner: int) -> dict[str, Tensor]:
        """Return what a learner's module gives on its batch, computed once."""
        if learner not in self._expected:
            self._expected[learner] = self.alone(learner, self._batches[learner])
        return self._expected[learner]

    def less_precise(self, found: dict[str, Tensor]) -> compare.Difference | None:
        """Return the first learner's gradient that is much further from float32's than its module's; None if none is.

        Dropout may draw other masks in another format, so models with it are not compared like that.
        """
        if self.bank.has_dropout:
            return None
        module = copy.deepcopy(self.bank.module(0)).float()
        inputs = map_tree(lambda each: each.float() if each.is_floating_point() else each, self._batches[0].inputs)
        output, targets = self.tasks.read(call(module, inputs), self._batches[0].targets)
        precise = compare.gradients_of(self.loss_of(0, output, targets), module, self.names)
        return compare.least_precise(found, self.expected(0), precise, self.bank.precision.compute)

    def one_by_one(self) -> dict[str, Tensor]:
        """Return what the first learner gives with the graph's operators run as they were exported."""
        single = FusedPass(self.tasks, learners=range(1), fuses=False)
        batch = self._batches[0].map(lambda each: each[None])
        return self.together(single, batch, shared=False, copies=self._kernels)[0]


def _added(both: Sequence[compare.Values]) -> dict[str, Tensor]:
    """Return sums of losses and of gradients."""
    names = [name for name in both[0] if not name.startswith("buffer ")]
    return {name: both[0][name] + both[1][name] for name in names}


def _two_batches(compared: Comparison) -> tuple[Batch, Batch]:
    """Return two micro-batches of real samples, different if there are enough; else some are repeated."""
    feed, size = compared.feed, compared.feed.batch_size // compared.accumulate
    few = feed.first_samples(min(2 * size, _MOST_SAMPLES, feed.num_samples))
    count = len(few.targets)
    first, second = (torch.arange(start, start + size) % count for start in (0, size if size < count else 1))
    return few.map(itemgetter(first)), few.map(itemgetter(second))
