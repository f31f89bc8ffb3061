"""A model's exported graph, and its run for all learners at once.

The model is exported once (`torch.export`, training IR: in-place operators and BatchNorm's statistics as they are in
eager mode). Every operator has a rule that does it for K learners in one call, or is run in a loop over them. The first
run settles which: a rule that does not cover its arguments, or whose result has another shape than K of the exported
one, is replaced by the loop from then on, and the operator is named in `looped`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import Node

from crossbow_py.engine.fusion import elementwise, layers
from crossbow_py.engine.fusion.registry import RULES, Call, NotFusedError, Rule, base_name, loop
from crossbow_py.engine.fusion.values import Fused, Layout, PerLearner, map_values, stack, values_in, wrap
from crossbow_py.engine.fusion.writes import NOTHING, FusionError, Write, find_writes
from crossbow_py.engine.host_randomness import host_state, kept_host_state
from crossbow_py.engine.memory import is_out_of_memory
from crossbow_py.engine.precision import Precision, cast_module
from crossbow_py.engine.replicas import ReplicaBank

__all__ = ["FusedGraph", "FusionError", "Parameters", "exported"]

_RULE_MODULES = (elementwise, layers)  # imported for the rules they register
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
# What rules raise for arguments they were not written for.
_UNSERVED = (NotFusedError, RuntimeError, AttributeError, TypeError, LookupError, ValueError, StopIteration)
_EXPORTED: WeakKeyDictionary[nn.Module, dict[Any, torch.export.ExportedProgram]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Parameters:
    """The leaves of a run: what autograd differentiates, `[K, *shape]` in the order of the layout, and the rest."""

    trained: dict[str, Tensor]
    others: dict[str, Fused | PerLearner]


@dataclass
class _Step:
    """One node: what runs it, which other names get what it wrote, and what is not needed afterwards."""

    node: Node
    call: Call
    others: tuple[Node, ...]
    rule: Rule = loop
    settled: bool = False
    finished: list[Node] = field(default_factory=list)


class FusedGraph:
    """A model for K learners. Not thread-safe.

    Args:
        template: the model; copied, never changed.
        example: a batch of inputs of one learner `[B, ...]`, in compute precision.
        bank: whose rows the learners are.

    Attributes:
        looped: operators without a rule, run learner by learner; known after the first run.

    Raises:
        FusionError: the model cannot be exported, returns something else than one tensor, or writes what cannot be
            followed.
    """

    def __init__(self, template: nn.Module, example: Tensor, bank: ReplicaBank) -> None:
        self.looped: list[str] = []
        program = exported(template, example, bank.precision)
        self._bank, self._constants = bank, _constants(program)
        names = _first_names(template)
        self._sources = {
            spec.arg.name: (spec.kind, names.get(spec.target or "", spec.target or ""))
            for spec in program.graph_signature.input_specs
        }
        nodes = list(program.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._output = _single_output(program)
        writes = _writes(program)
        self._written = {node.args[0] for node, write in writes.items() if write.must_write}
        calls = [node for node in nodes if node.op == "call_function" and not _is_assertion(node)]
        self._steps = [self._step(node, writes.get(node, NOTHING)) for node in calls]
        self._shared: bool | None = None
        _free_after_use(self._steps, self._output)
        self.parameters = self._bind()

    def _step(self, node: Node, write: Write) -> _Step:
        value = node.meta.get("val")
        call = Call(
            node.target,  # type: ignore[arg-type]
            tuple(value.shape) if isinstance(value, Tensor) else None,
            self._bank.num_learners,
            self._bank.generators,
            may_write=write.may_write,
            must_write=write.must_write,
        )
        return _Step(node, call, write.others)

    def _bind(self) -> Parameters:
        """Leaves over the bank's rows: they share the rows' memory, so that updates are seen without a copy."""
        bank, k = self._bank, self._bank.num_learners
        master, shadow, buffers = bank.weights.stacked(k), bank.shadow.stacked(k), bank.buffers.stacked(k)
        own = dict(bank.module(0).named_parameters())
        trained: dict[str, Tensor] = {}
        others: dict[str, Fused | PerLearner] = {}
        for name in bank.layout.names:
            rows = master[name] if own[name].dtype == bank.precision.master else shadow[name]
            if own[name].requires_grad:
                trained[name] = rows.detach().requires_grad_()
            else:
                others[name] = Fused(rows, Layout.STACK)
        ordered = {name: trained[name] for name in bank.layout.names[: bank.num_trained]}
        others |= {name: Fused(rows, Layout.STACK) for name, rows in buffers.items()}
        integers = [dict(bank.module(learner).named_buffers()) for learner in range(k)]
        names = [name for name, buffer in integers[0].items() if not buffer.is_floating_point()]
        others |= {name: PerLearner([each[name] for each in integers]) for name in names}
        return Parameters(ordered, others)

    def run(self, inputs: Tensor, shared: bool) -> Tensor:
        """Outputs `[K, B, ...]` from inputs `[K, B, ...]`, or from `[B, ...]` that all learners share."""
        if shared is not self._shared:
            self._forget(shared)
        values: dict[Node, Any] = {node: self._leaf(node, inputs, shared) for node in self._inputs}
        for step in self._steps:
            args = [_resolve(argument, values) for argument in step.node.args]
            kwargs = {name: _resolve(value, values) for name, value in step.node.kwargs.items()}
            result = step.rule(step.call, args, kwargs) if step.settled else self._first(step, args, kwargs)
            values[step.node] = result
            for node in step.others:
                values[node] = result
            for node in step.finished:
                values.pop(node, None)
        output: Fused = values[self._output]
        return stack(output, self._bank.num_learners)

    def _forget(self, shared: bool) -> None:
        """Which rule serves hangs on what learners share."""
        self._shared = shared
        self.looped.clear()
        for step in self._steps:
            step.settled = False

    def _leaf(self, node: Node, inputs: Tensor, shared: bool) -> Fused | PerLearner:
        kind, name = self._sources[node.name]
        if kind is InputKind.USER_INPUT:
            return Fused(inputs, Layout.SHARED if shared else Layout.STACK)
        if kind is InputKind.CONSTANT_TENSOR:
            return Fused(self._constants[name], Layout.SHARED)
        if name in self.parameters.trained:
            return Fused(self.parameters.trained[name], Layout.STACK)
        value = self.parameters.others[name]
        if isinstance(value, PerLearner) and node not in self._written:
            return Fused(torch.stack(value.tensors), Layout.STACK)  # a few integers: a mask, indices
        return value

    def _first(self, step: _Step, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step for the first time, and find out whether its rule serves it."""
        step.settled, step.rule = True, _choose(step.call, args, kwargs)
        try:
            result = step.rule(step.call, args, kwargs)
            if step.rule is not loop and not _fits(result, step.node.meta.get("val"), step.call.num_learners):
                raise NotFusedError
        except _UNSERVED as error:
            if is_out_of_memory(error):
                raise
            step.rule = loop
            result = loop(step.call, args, kwargs)
        if step.rule is loop:
            self.looped.append(base_name(step.call.target))
        return result


def exported(template: nn.Module, example: Tensor, precision: Precision) -> torch.export.ExportedProgram:
    """The template's graph for batches like the example; kept as long as the template, for banks of other sizes.

    Raises:
        FusionError: see `FusedGraph`.
    """
    graphs = _EXPORTED.setdefault(template, {})
    key = (tuple(example.shape), example.dtype, precision.name)
    if key not in graphs:
        graphs[key] = _export(template, example, precision)
    return graphs[key]


def _export(template: nn.Module, example: Tensor, precision: Precision) -> torch.export.ExportedProgram:
    module = cast_module(copy.deepcopy(template), precision).train()
    try:
        with _quiet(), kept_host_state():
            before = host_state()
            program = torch.export.export(module, (example,), strict=False)
            draws = before != host_state()
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FusionError(f"torch.export cannot capture it ({reason.strip()[:160]})") from error
    if draws:
        raise FusionError("it draws random numbers from Python's or numpy's generator, and a graph would repeat them")
    _single_output(program)
    _writes(program)
    for node in program.graph.nodes:
        _check_operator(node)
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stderr: torch prints graphs and advice to authors of graphs, and what matters is in the exception."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _constants(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    return {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}


def _first_names(template: nn.Module) -> dict[str, str]:
    """The name under which the bank keeps each parameter and buffer; tied ones have several."""
    first: dict[int, str] = {}
    names = {}
    for tensors in (template.named_parameters(remove_duplicate=False), template.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _single_output(program: torch.export.ExportedProgram) -> Node:
    spec, returned = program.call_spec.out_spec, program.graph.output_node().args[0]
    outputs = [entry for entry in returned if isinstance(entry, Node)] if isinstance(returned, list | tuple) else []
    if spec is None or not spec.is_leaf() or not outputs:
        kind = "no tensor" if spec is None or spec.is_leaf() else f"a {getattr(spec.type, '__name__', spec.type)}"
        raise FusionError(f"it returns {kind}, and one tensor is needed")
    return outputs[0]


def _writes(program: torch.export.ExportedProgram) -> dict[Node, Write]:
    """What the graph's in-place operators write. Buffers keep it; parameters and constants may not be written."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    inputs = {node: kinds[node.name] for node in program.graph.nodes if node.op == "placeholder"}
    buffers = {node for node, kind in inputs.items() if kind is InputKind.BUFFER}
    fixed = {node for node, kind in inputs.items() if kind not in (InputKind.BUFFER, InputKind.USER_INPUT)}
    return find_writes(list(program.graph.nodes), buffers, fixed)


def _check_operator(node: Node) -> None:
    """Refuse what cannot be right for several learners, whatever runs it."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or target is operator.getitem:
        return
    if not isinstance(target, OpOverload):
        raise FusionError(f"its graph holds {getattr(target, '__name__', target)}, which is no operator")
    name = base_name(target)
    if value is not None and not isinstance(value, Tensor | list | tuple):
        raise FusionError(f"it makes a number of a tensor ({name}), and learners may have different ones")
    if name.startswith("as_strided"):
        raise FusionError(f"it looks into memory ({name}), which learners share")


def _is_assertion(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node.target) in _ASSERTIONS


def _choose(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Rule:
    """The rule for an operator, by its name, its tags and what it is given."""
    if call.target is operator.getitem:
        return _getitem
    values = values_in([*args, *kwargs.values()])
    if any(isinstance(value, PerLearner) for value in values):
        counts = call.must_write and isinstance(args[0], PerLearner) and base_name(call.target) == "add"
        return elementwise.add_to_integer_buffers if counts else loop
    if not _draws(call) and all(value.layout is Layout.SHARED for value in values if isinstance(value, Fused)):
        return _shared
    name = base_name(call.target)
    two = name in ("max", "min") and call.target._overloadname == "other"  # element-wise, unlike `max(x, dim)`
    pointwise = torch.Tag.pointwise in call.target.tags or name in elementwise.POINTWISE or two
    if name in RULES and not two and not call.must_write:
        return RULES[name]
    return elementwise.pointwise if pointwise else loop


def _draws(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.target.tags


def _getitem(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0][args[1]]


def _shared(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is the same for all learners is computed once."""
    plain = [map_values(argument, lambda value: value.tensor) for argument in args]
    named = {name: map_values(value, lambda own: own.tensor) for name, value in kwargs.items()}
    return wrap(call.perform(plain, named), Layout.SHARED)


def _fits(result: Any, exported: Any, num_learners: int) -> bool:
    """Whether a result has the shapes and formats of K exported ones."""
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


def _resolve(argument: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, list | tuple):
        return [_resolve(entry, values) for entry in argument]
    return argument


def _free_after_use(steps: list[_Step], output: Node) -> None:
    """Note at every step which values nobody needs any more: activations are freed as early as in eager mode."""
    last: dict[Node, _Step] = {}
    for step in steps:
        for node in [step.node, *step.node.all_input_nodes]:
            last[node] = step
    for node, step in last.items():
        if node is not output:
            step.finished.append(node)
