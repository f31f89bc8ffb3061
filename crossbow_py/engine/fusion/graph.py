"""A model's exported graph, run for all learners at once.

The model is exported once (`torch.export`, training IR: in-place operators and BatchNorm's statistics are as in eager
mode). Every operator has a rule that runs it for K learners in one call, or is run in a loop over them. The first run
decides which: if a rule does not cover its arguments, or its result does not have K times the exported shape, the loop
replaces it from then on, and `looped` names the operator. A rule says by NotFusedError what it does not cover; whatever
else it raises is a fault of the rule, and the model is refused.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from crossbow_py.core.errors import one_line
from crossbow_py.core.trees import Tree, leaves
from crossbow_py.engine.bank.layout import OwnRows
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.fusion.export import exported, first_names, outputs_of, writes_of
from crossbow_py.engine.fusion.regions import Modes, modes_of
from crossbow_py.engine.fusion.rules import draws, elementwise, layers, recurrent
from crossbow_py.engine.fusion.rules.registry import RULES, Call, NotFusedError, Rule, base_name, loop
from crossbow_py.engine.fusion.units.chains import Chain, find_chains, run_chain
from crossbow_py.engine.fusion.units.shortcuts import Shortcut, find_shortcuts, run_shortcut
from crossbow_py.engine.fusion.units.units import Unit, find_units
from crossbow_py.engine.fusion.values import Copies, Fused, Layout, PerLearner, map_values, stack, values_in, wrap
from crossbow_py.engine.fusion.writes import NOTHING, FusionError, Write
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.modules.losses import Part, scores_of
from crossbow_py.engine.native import dense

_RULE_MODULES = (draws, elementwise, layers, recurrent)  # imported for the rules they register
_NORMS = ("batch_norm", "instance_norm")
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")


class Origin(Enum):
    """What a value follows from: frozen values alone, inputs too, or also what is trained, drawn or moves."""

    FROZEN = 0
    INPUTS = 1
    TRAINED = 2


@dataclass(frozen=True)
class Cut:
    """A cut through a graph: before it, values follow from frozen values and inputs alone.

    Attributes:
        nodes: the nodes whose values cross it.
        before, after: the steps on either side, in order; those of frozen values alone are where they are needed.
        buffers: the buffers that are read before it.
        module: the module of the last product before it.
        share: the products before it, as a share of those of a forward pass.
    """

    nodes: tuple[Node, ...]
    before: list[Step]
    after: list[Step]
    buffers: tuple[str, ...]
    module: str
    share: float


class Midway(NamedTuple):
    """Values of a cut's nodes in place of inputs: `[B, ...]` if learners share the batch, else `[K, B, ...]`."""

    values: tuple[Tensor, ...]


class FusedGraph:
    """A model for K learners. Not thread-safe.

    Args:
        template: the model; copied, never changed.
        example: a batch of inputs of one learner `[B, ...]`, in compute precision, or a tree of such.
        bank: the bank whose rows the learners are.
        kernels: whether units of the graph run as Triton kernels where these can be used.
        learners: K neighbouring learners; by default all.
        training: whether the model runs in training mode; else in evaluation mode, without autograd or kernels.
        fuses: whether operators are fused; else each runs as it was exported, learner by learner.
        part: gives what is needed of an output.

    Attributes:
        trained: the trained parameters `[K, *shape]`, or `[*shape]` if learners have one row, in the order of the
            layout: leaves of autograd.
        looped: operators without a rule, which run learner by learner; known after the first run.
        notes: messages for the user about slower operation.
        written: parameters whose gradients the backward pass writes to rows, without autograd.
        draws: whether a run draws from the learners' generators.
        takes_channels: whether inputs are best given in the memory order of CHANNELS.
        anchor: a leaf that must be among what autograd differentiates, so that it runs the backward of every unit.
        shared_buffers: the buffers that are read as one for all learners; another mapping after they were written.
        steps: what a run does, in order.
        cut: where a run from `Midway` begins; None until it is set.

    Raises:
        FusionError: the model cannot be exported, does not return tensors, or writes in a way that cannot be followed.
    """

    def __init__(
        self,
        template: nn.Module,
        example: Tree,
        bank: ReplicaBank,
        kernels: bool = False,
        learners: range | None = None,
        training: bool = True,
        fuses: bool = True,
        part: Part = scores_of,
    ) -> None:
        assert training or not kernels, "kernels serve training"
        assert fuses or not kernels, "kernels fuse"
        self._training, self._fuses = training, fuses
        self._learners = range(bank.num_learners) if learners is None else learners
        self._num_learners = len(self._learners)
        self.looped: list[str] = []
        self.written: frozenset[str] = frozenset()
        self.anchor = torch.zeros((), device=bank.device, requires_grad=True)
        program = exported(template, example, bank.precision, training, part)
        self._bank, self._constants = bank, program.constants
        names = first_names(template)
        self._sources = {
            spec.arg.name: (spec.kind, names.get(spec.target or "", spec.target or ""))
            for spec in program.graph_signature.input_specs
        }
        nodes = list(program.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        given = [node for node in self._inputs if self._sources[node.name][0] is InputKind.USER_INPUT]
        self._places = {node: place for place, node in enumerate(given)}
        self._rates_of_its_own: list[float | None] = [None] * bank.capacity
        self.draws = any(draws.draws(node) for node in nodes)
        self._outputs = outputs_of(program)
        writes = writes_of(program)
        self._written = {node.args[0] for node, write in writes.items() if write.must_write}
        self.trained, self._others = self._bind()
        self._trained_layout = Layout.SHARED if bank.one_row else Layout.STACK
        self._counting = self._find_counters(writes)
        self._watch_buffers()
        refusal = serves("layers", bank.device, bank.precision.compute) if kernels else None
        self.notes = [refusal] if refusal else []
        units, shortcuts, chains = self._find_parts(nodes, writes, kernels and not refusal)
        parts: list[Unit | Shortcut | Chain] = [*units, *shortcuts, *chains]
        skipped = {node for part in parts for node in part.nodes if node is not part.last} | self._counting
        calls = [node for node in nodes if node.op == "call_function" and node not in skipped]
        self.steps = [self._step(node, writes.get(node, NOTHING)) for node in calls if not _is_assertion(node)]
        self._take(shortcuts, chains)
        self._own_rows: OwnRows | None = None
        self._measure_units: Callable[[], list[str]] = list
        self.by_kernel: Callable[[], int] = int
        self._add_units(units)
        free_after_use(self.steps, self._outputs.nodes)
        self.cut: Cut | None = None
        self._state: tuple[bool | None, bool] = None, False  # what learners share, and whether runs begin midway

    def _find_parts(
        self, nodes: list[Node], writes: Mapping[Node, Write], kernels: bool
    ) -> tuple[list[Unit], list[Shortcut], list[Chain]]:
        """Return the operators that run as one: units of kernels, shortcuts and chains in C."""
        once = [node for node in self._inputs if self._sources[node.name][1] in self.trained and len(node.users) == 1]
        serve = kernels and self._bank.layout.channels_last  # kernels take filters in that order
        units = find_units(nodes, writes, once) if serve else []
        kinds = [self._sources[unit.input.name][0] for unit in units if unit.input in self._inputs]
        self.takes_channels = InputKind.USER_INPUT in kinds
        in_c = self._fuses and self._training and not self._bank.one_row and dense.serves(*self.trained.values())
        shortcuts = find_shortcuts(nodes, writes) if self._fuses else []
        return units, shortcuts, find_chains(nodes, writes, once) if in_c else []

    def _take(self, shortcuts: Sequence[Shortcut], chains: Sequence[Chain]) -> None:
        """Have the step of each one's last node run it whole."""
        steps = {step.node: step for step in self.steps}
        for own in shortcuts:
            steps[own.last].become(own.nodes, (own.input,), partial(run_shortcut, own))
        for chain in chains:
            steps[chain.last].become(chain.nodes, (chain.input, *chain.parameters), partial(run_chain, chain))

    def _find_counters(self, writes: Mapping[Node, Write]) -> set[Node]:
        """Return the operators that count batches, if nothing else uses the bank's counters."""
        names = {node: self._sources[node.name][1] for node in self._inputs}
        found = {node: names[own] for node in writes if (own := _counted(node)) in names}
        return set(found) if sorted(found.values()) == sorted(self._bank.counter_names) else set()

    def _watch_buffers(self) -> None:
        """Find the buffers that may be read as one for all learners, see `_share_buffers`."""
        self._read_only, self.shared_buffers = self._find_read_only(), dict[str, Fused]()
        modules = [dict(self._bank.module(learner).named_buffers()) for learner in self._learners]
        self._watched = [own[name] for own in modules for name in self._read_only]
        self._seen: object = None

    def _find_read_only(self) -> list[str]:
        """Return the buffers that the graph reads and never writes, if there are weights to compute once with them."""
        base, one_row = self._bank.base, self._bank.one_row
        if not one_row and not (base and base.is_shared):
            return []
        written = self._written | {node.args[0] for node in self._counting} | self._moved_statistics()
        read = {self._sources[node.name][1] for node in self._inputs if node.users}
        kept = {self._sources[node.name][1] for node in self._inputs if node in written}
        return [name for name, own in self._others.items() if name in read - kept and self._is_of_rows(own)]

    def _moved_statistics(self) -> set[Any]:
        """Return the running statistics that normalisation moves, which its operators do not declare as written."""
        norms = [user for node in self._inputs for user in node.users if user.op == "call_function"]
        moving = [node for node in norms if moves_statistics(node)]
        return {own for node in moving for own in node.all_input_nodes}

    @staticmethod
    def _is_of_rows(value: Fused | PerLearner) -> bool:
        return isinstance(value, PerLearner) or value.layout is Layout.STACK

    def _add_units(self, units: list[Unit]) -> None:
        """Have the step of each unit's last node run the unit."""
        if not units:
            return
        # Triton is there, as `serves` has said.
        from crossbow_py.engine.fusion.units.convolution import Leaf  # noqa: PLC0415
        from crossbow_py.engine.fusion.units.unit_step import UnitRules  # noqa: PLC0415

        of_last, learners = {unit.last: unit for unit in units}, self._learners
        steps = [(step, of_last[step.node]) for step in self.steps if step.node in of_last]
        for step, unit in steps:
            step.become(unit.nodes, (unit.input, unit.residual), step.rule)  # made below, from what all steps read
        reads = Counter([*self._outputs.nodes, *(node for step in self.steps for node in step.reads)])
        name_of = {node.name: name for node in self._inputs if (name := self._sources[node.name][1])}
        self.written = frozenset(name_of[node.name] for unit in units for node in unit.parameters)
        weights, gradients = self.trained, dict(zip(self.trained, self._bank.stacked_gradients(learners), strict=True))
        if self._bank.one_row:
            row = {name: own for name, own in weights.items() if name in self.written}
            self._own_rows = OwnRows(row, self._num_learners, self._bank.precision.master)
            weights, gradients = self._own_rows.weights, self._own_rows.gradients
        buffers = self._bank.buffers.stacked(self._num_learners, learners.start)
        rules = UnitRules(
            {node: Leaf(weights[name], gradients[name]) for node, name in name_of.items() if name in weights},
            {node: buffers[name] for node, name in name_of.items() if name in buffers},
            self.anchor,
        )
        for step, unit in steps:
            step.rule = rules.rule(unit, reads[unit.last])
        self._measure_units, self.by_kernel = rules.measure, rules.by_kernel

    def written_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of `written`: rows `[K, *shape]`, or sums `[*shape]` of learners in one row."""
        if self._own_rows is None:
            rows = zip(self.trained, self._bank.stacked_gradients(self._learners), strict=True)
            return {name: own for name, own in rows if name in self.written}
        return self._own_rows.summed() if self._trained_layout is Layout.SHARED else self._own_rows.gradients

    def measure(self) -> None:
        """Measure ways to run the graph's units, and take the fastest; see `UnitRules.measure`."""
        self.notes += self._measure_units()

    def _step(self, node: Node, write: Write) -> Step:
        value = node.meta.get("val")
        call = Call(
            node.target,  # type: ignore[arg-type]
            tuple(value.shape) if isinstance(value, Tensor) else None,
            self._bank.generators[self._learners.start : self._learners.stop],
            self._bank.dropout_rates if draws.is_of_dropout_module(node) else self._rates_of_its_own,
            self._learners,
            may_write=write.may_write,
            must_write=write.must_write,
        )
        return Step(node, call, node.args, node.kwargs, write.others, modes=modes_of(node))

    def _bind(self) -> tuple[dict[str, Tensor], dict[str, Fused | PerLearner]]:
        """Return trained and other leaves that share the memory of the bank's rows, and see updates without a copy.

        They do not share autograd's version counter, which views of the bank have in common: otherwise, while another
        graph of the bank is between its forward and its backward pass, updates of these rows would look like writes to
        its own.
        """
        bank, own_rows = self._bank, (self._num_learners, self._learners.start)
        master, shadow, buffers = (
            {name: own.data for name, own in rows.stacked(*own_rows).items()}
            for rows in (bank.weights, bank.shadow, bank.buffers)
        )
        if bank.one_row:
            rows_of_all = bank.weights.shaped(), bank.shadow.shaped()
            master, shadow = ({name: own.data for name, own in rows.items()} for rows in rows_of_all)
        own = dict(bank.module(0).named_parameters())
        trained = {
            name: (master[name] if own[name].dtype == bank.precision.master else shadow[name]).requires_grad_(
                self._training
            )
            for name in bank.layout.names
        }
        layout = Layout.SHARED if bank.base.is_shared else Layout.STACK
        frozen = bank.base.stacked(*own_rows)
        others: dict[str, Fused | PerLearner] = {name: Fused(rows.data, layout) for name, rows in frozen.items()}
        others |= {name: Fused(rows, Layout.STACK) for name, rows in buffers.items()}
        integers = [dict(bank.module(learner).named_buffers()) for learner in self._learners]
        names = [name for name, buffer in integers[0].items() if not buffer.is_floating_point()]
        others |= {name: PerLearner([each[name] for each in integers]) for name in names}
        return trained, others

    @contextmanager
    def rows_apart(self) -> Iterator[None]:
        """In the block, have `trained` be `[K, *shape]` where learners have one row, and so each its own gradient."""
        given, layout, count = self.trained, self._trained_layout, self._num_learners
        rows = {name: own.detach().expand(count, *own.shape) for name, own in given.items()}
        self.trained = {name: own.requires_grad_() for name, own in rows.items()}
        self._trained_layout = Layout.STACK
        self._choose_anew()
        try:
            yield
        finally:
            self.trained, self._trained_layout = given, layout
            self._choose_anew()

    def run(self, inputs: Tree, shared: bool) -> Tree:
        """Return outputs `[K, B, ...]` of inputs `[K, B, ...]`, or of inputs `[B, ...]` that all learners share.

        Of `Midway` values only what comes after the cut is run.
        """
        midway = isinstance(inputs, Midway)
        self._settle_for(shared, midway)
        with torch.set_grad_enabled(self._training and torch.is_grad_enabled()):
            if self._own_rows is not None:
                self._own_rows.refresh()
            values = self._leaves(inputs, shared)
            for step in self.cut.after if midway and self.cut else self.steps:
                self._run_step(step, values)
            if self._counting:
                self._bank.counters[self._learners.start : self._learners.stop].add_(1)
            return self._outputs.tree.unflatten([self._returned(value, values) for value in self._outputs.values])

    @torch.no_grad()
    def before_cut(self, inputs: Tree, shared: bool) -> Midway:
        """Return the values of the cut's nodes for inputs as `run` takes them."""
        assert self.cut is not None, "a cut is set"
        self._settle_for(shared, self._state[1])
        values = self._leaves(inputs, shared)
        for step in self.cut.before:
            self._run_step(step, values)
        rows = [stack(values[node], self._num_learners) for node in self.cut.nodes]
        return Midway(tuple(own[0] if shared else own for own in rows))

    def buffers_before_cut(self) -> dict[str, Tensor] | None:
        """Return the buffers that are read before the cut; None while they differ between learners."""
        assert self.cut is not None, "a cut is set"
        self._share_buffers()
        found = self.shared_buffers
        return {n: found[n].tensor for n in self.cut.buffers} if found.keys() >= {*self.cut.buffers} else None

    def buffers_read(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """Return the buffers that steps read and nothing writes."""
        read = {self._sources[node.name][1] for step in steps for node in step.reads if node in self._inputs}
        return tuple(name for name in self._read_only if name in read)

    def origins(self) -> dict[Node, Origin]:
        """Return what the leaves of the graph are."""
        return {node: self._origin(*self._sources[node.name]) for node in self._inputs}

    def _origin(self, kind: InputKind, name: str) -> Origin:
        if kind is InputKind.USER_INPUT:
            return Origin.INPUTS
        base = self._bank.base
        held_once = (name in base and base.is_shared) or name in self._read_only
        return Origin.FROZEN if kind is InputKind.CONSTANT_TENSOR or held_once else Origin.TRAINED

    @property
    def outputs(self) -> list[Node]:
        """The nodes that are returned."""
        return self._outputs.nodes

    def _settle_for(self, shared: bool, midway: bool) -> None:
        """Have rules chosen again where learners share something else than in the run before."""
        if (shared, midway) != self._state:
            self._state = shared, midway
            self._choose_anew()
        self._share_buffers()

    def _leaves(self, inputs: Tree, shared: bool) -> dict[Node, Any]:
        """Return the values that a run begins with."""
        layout = Layout.SHARED if shared else Layout.STACK
        if not isinstance(inputs, Midway):
            given = leaves(inputs)
            return {node: self._leaf(node, given, layout) for node in self._inputs if node.users}
        assert self.cut is not None, "a cut is set"
        others = (node for node in self._inputs if node.users and node not in self._places)
        values = {node: self._leaf(node, (), layout) for node in others}
        return values | {n: Fused(own, layout) for n, own in zip(self.cut.nodes, inputs.values, strict=True)}

    def _choose_anew(self) -> None:
        """Have rules chosen again, which depend on what learners share."""
        self.looped.clear()
        for step in self.steps:
            step.settled = False

    def _share_buffers(self) -> None:
        """Take buffers that the graph only reads as one for all learners, as far as they are equal: they follow a base.

        Looks only if some have been written since the last run: it makes the host wait for the device.
        """
        state = self._bank.buffers.num_loads, sum(own._version for own in self._watched)
        if state == self._seen or not self._read_only:
            return
        self._seen, found = state, dict[str, Fused]()
        for name in self._read_only:
            value = self._others[name]
            rows = value.tensors if isinstance(value, PerLearner) else value.tensor.unbind()
            if all(torch.equal(rows[0].nan_to_num(), own.nan_to_num()) for own in rows[1:]):
                found[name] = Fused(rows[0], Layout.SHARED)
        if found.keys() != self.shared_buffers.keys():
            self._choose_anew()
        self.shared_buffers = found

    def _returned(self, value: Any, values: Mapping[Node, Any]) -> Any:
        return stack(_resolve(value, values), self._num_learners) if isinstance(value, Node) else value

    def _run_step(self, step: Step, values: dict[Node, Any]) -> None:
        args = [_resolve(argument, values) for argument in step.arguments]
        kwargs = {name: _resolve(value, values) for name, value in step.named.items()}
        with nullcontext() if step.modes is None else step.modes.entered():
            known = step.settled or step.together
            result = step.rule(step.call, args, kwargs) if known else self._first(step, args, kwargs)
        for node in (step.node, *step.others):
            values[node] = result
        for node in step.finished:
            values.pop(node, None)

    def _leaf(self, node: Node, inputs: Sequence[Tensor], layout: Layout) -> Fused | PerLearner:
        kind, name = self._sources[node.name]
        if kind is InputKind.USER_INPUT:
            return Fused(inputs[self._places[node]], layout)
        if kind is InputKind.CONSTANT_TENSOR:
            return Fused(self._constants[name], Layout.SHARED)
        if name in self.trained:
            return Fused(self.trained[name], self._trained_layout)
        value = self.shared_buffers.get(name) or self._others[name]
        if isinstance(value, PerLearner) and node not in self._written:
            return Fused(torch.stack(value.tensors), Layout.STACK)  # a few integers, such as a mask or indices
        return value

    def _first(self, step: Step, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step for the first time, and find out whether its rule covers it.

        Raises FusionError if the rule fails on arguments that it does not refuse by NotFusedError.
        """
        # Rules use other operators than the model does, for which autocast may choose other dtypes.
        casts = step.modes is not None and step.modes.casts
        step.settled, step.rule = True, loop if casts else _choose(step, args, kwargs, self._fuses)
        try:
            result = step.rule(step.call, args, kwargs)
            # Taking one of several results computes nothing, and cannot be looped over.
            may_loop = step.rule not in (loop, _getitem)
            if may_loop and not _fits(result, step.node.meta.get("val"), step.call.num_learners):
                raise NotFusedError
        except NotFusedError:
            step.rule = loop
            result = loop(step.call, args, kwargs)
        except Exception as error:
            if step.rule is loop or is_out_of_memory(error):  # the model's own operator fails
                raise
            name = base_name(step.call.target)
            raise FusionError(f"the rule of {name} fails ({one_line(error)[:160]})", step.node) from error
        if step.rule is loop:
            self.looped.append(base_name(step.call.target))
        return result


def _counted(node: Node) -> Node | None:
    """Return what a node adds one to, in place, if nothing else reads it."""
    own = node.args[0]
    adds = base_name(node.target) == "add" and node.args[1:] == (1,) and not node.kwargs  # type: ignore[arg-type]
    alone = isinstance(own, Node) and len(own.users) == 1 and not node.users
    return own if adds and alone and isinstance(own, Node) else None


def moves_statistics(node: Node) -> bool:
    """Return whether a node normalises by the statistics of its own batch."""
    if not isinstance(node.target, OpOverload) or base_name(node.target) not in _NORMS:
        return False
    by_batch = {argument.name: index for index, argument in enumerate(node.target._schema.arguments)}
    place = by_batch.get("training", by_batch.get("use_input_stats"))
    return place is None or bool(node.args[place])


def _is_assertion(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node.target) in _ASSERTIONS


def _choose(step: Step, args: list[Any], kwargs: Mapping[str, Any], fuses: bool) -> Rule:
    """Return the rule of an operator by its name, tags and arguments; without `fuses`, the loop unless it draws."""
    call = step.call
    if call.target is operator.getitem:
        return _getitem
    values = values_in([*args, *kwargs.values()])
    if any(isinstance(value, PerLearner) for value in values):
        counts = call.must_write and isinstance(args[0], PerLearner) and base_name(call.target) == "add"
        return elementwise.add_to_integer_buffers if counts else loop
    draws_numbers = draws.draws(step.node)
    if not draws_numbers and all(value.layout is Layout.SHARED for value in values if isinstance(value, Fused)):
        return _shared
    if not fuses and not draws_numbers:
        return loop
    name = base_name(call.target)
    two = name in ("max", "min") and call.target._overloadname == "other"  # element-wise, unlike `max(x, dim)`
    pointwise = torch.Tag.pointwise in call.target.tags or name in elementwise.POINTWISE or two
    if name in RULES and not two and not call.must_write:
        return RULES[name]
    return elementwise.pointwise if pointwise and not draws_numbers else loop


def _getitem(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0][args[1]]


def _shared(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute once what is the same for all learners."""
    plain = [map_values(argument, lambda value: value.tensor) for argument in args]
    named = {name: map_values(value, lambda own: own.tensor) for name, value in kwargs.items()}
    return wrap(call.perform(plain, named), Layout.SHARED)


def _fits(result: Any, exported: Any, num_learners: int) -> bool:
    """Return whether a result has the shapes and dtypes of K exported ones."""
    if isinstance(exported, list | tuple):
        parts = isinstance(result, list) and len(result) == len(exported)
        return parts and all(_fits(own, one, num_learners) for own, one in zip(result, exported, strict=True))
    if not isinstance(result, Fused) or not isinstance(exported, Tensor):
        return True
    shape = tuple(exported.shape)
    expected = {
        Layout.SHARED: shape,
        Layout.STACK: (num_learners, *shape),
        Layout.CHANNELS: (*shape[:1], num_learners * shape[1], *shape[2:]) if len(shape) > 1 else None,
    }
    return tuple(result.tensor.shape) == expected[result.layout] and result.tensor.dtype == exported.dtype


@dataclass
class Step:
    """A step of a run: one node, or a unit of several nodes by its last.

    Attributes:
        arguments, named: its arguments, with nodes in place of values.
        others: other nodes that are the tensor it writes.
        settled: whether the rule is known to cover it.
        together: the nodes that it runs by one rule, which needs no settling, if they are several.
        modes: the modes of the blocks of the model's forward that the node is in.
        finished: nodes whose values are not needed afterwards.
    """

    node: Node
    call: Call
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    others: tuple[Node, ...] = ()
    rule: Rule = loop
    settled: bool = False
    together: tuple[Node, ...] = ()
    modes: Modes | None = None
    finished: list[Node] = field(default_factory=list)

    def become(self, nodes: tuple[Node, ...], arguments: tuple[Any, ...], rule: Rule) -> None:
        """Run several nodes, with a rule of their own that takes these arguments."""
        self.arguments, self.named, self.rule, self.together = arguments, {}, rule, nodes

    @property
    def reads(self) -> list[Node]:
        """The nodes whose values it reads, each as often as it does."""
        found: list[Node] = []
        map_arg([self.arguments, self.named], found.append)
        return found


def _resolve(argument: Any, values: Mapping[Node, Any]) -> Any:
    """Return an argument with values in place of nodes."""
    if isinstance(argument, Node):
        value = values[argument]
        return value.take() if isinstance(value, Copies) else value
    if isinstance(argument, list | tuple):
        return [_resolve(entry, values) for entry in argument]
    return argument


def free_after_use(steps: Sequence[Step], outputs: Sequence[Node]) -> None:
    """Note at every step which values are no longer needed, so that activations are freed as early as in eager mode."""
    last: dict[Node, Step] = {}
    for step in steps:
        for node in [step.node, *step.reads]:
            last[node] = step
    for node, step in last.items():
        if node not in outputs:
            step.finished.append(node)
