"""A model's exported graph, and its run for all learners at once.

The model is exported once (`torch.export`, training IR: in-place operators and BatchNorm's statistics as they are in
eager mode). Every operator has a rule that does it for K learners in one call, or is run in a loop over them. The first
run settles which: a rule that does not cover its arguments, or whose result has another shape than K of the exported
one, is replaced by the loop from then on, and the operator is named in `looped`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import Node

from crossbow_py.engine.fusion import elementwise, layers
from crossbow_py.engine.fusion.registry import RULES, Call, NotFusedError, Rule, base_name, is_in_place, loop
from crossbow_py.engine.fusion.values import Fused, Layout, PerLearner, stack, values_in, wrap
from crossbow_py.engine.precision import Precision, cast_module
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.errors import CrossbowError

_RULE_MODULES = (elementwise, layers)  # imported for the rules they register
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")


_EXPORTED: WeakKeyDictionary[nn.Module, dict[Any, torch.export.ExportedProgram]] = WeakKeyDictionary()


class FusionError(CrossbowError):
    """A model cannot run fused; the message says why, as half a sentence."""


@dataclass(frozen=True)
class Parameters:
    """The leaves of a run: what autograd differentiates, `[K, *shape]` in the order of the layout, and the rest."""

    trained: dict[str, Tensor]
    others: dict[str, Fused | PerLearner]


@dataclass
class _Step:
    """One node: where its arguments come from, what runs it, and what is not needed afterwards."""

    node: Node
    call: Call
    rule: Rule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finished: list[Node]
    writes: bool
    settled: bool


class FusedGraph:
    """A model for K learners. Not thread-safe.

    Args:
        template: the model; copied, never changed.
        example: a batch of inputs of one learner `[B, ...]`, in compute precision.
        bank: whose rows the learners are.

    Raises:
        FusionError: the model cannot be exported, or writes through a view.
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
        self._steps = [self._step(node) for node in nodes if node.op == "call_function" and not _is_assertion(node)]
        self._output = _single_output(nodes[-1])
        _free_after_use(self._steps, self._output)
        _check_writes(self._steps)
        self.parameters = self._bind()

    def _step(self, node: Node) -> _Step:
        shape = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else None
        if not (isinstance(node.target, OpOverload) or node.target is operator.getitem):
            raise FusionError(f"its graph holds {node.target}, which is no operator")
        k, generators = self._bank.num_learners, self._bank.generators
        call = Call(node.target, None if shape is None else tuple(shape), k, generators)  # type: ignore[arg-type]
        chosen = _getitem if node.target is operator.getitem else _rule_for(call)
        known = node.target is operator.getitem
        writes = not known and is_in_place(call.target)
        return _Step(node, call, chosen, node.args, node.kwargs, [], writes, settled=known)

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
        values: dict[Node, Any] = {node: self._leaf(node, inputs, shared) for node in self._inputs}
        for step in self._steps:
            args = [_resolve(argument, values) for argument in step.args]
            kwargs = {name: _resolve(value, values) for name, value in step.kwargs.items()}
            result = step.rule(step.call, args, kwargs) if step.settled else self._first(step, args, kwargs)
            values[step.node] = result
            if step.writes:
                values[step.args[0]] = result
            for node in step.finished:
                values.pop(node, None)
        output: Fused = values[self._output]
        return stack(output, self._bank.num_learners)

    def _leaf(self, node: Node, inputs: Tensor, shared: bool) -> Fused | PerLearner:
        kind, name = self._sources[node.name]
        if kind is InputKind.USER_INPUT:
            return Fused(inputs, Layout.SHARED if shared else Layout.STACK)
        if kind is InputKind.CONSTANT_TENSOR or name in self._constants:
            return Fused(self._constants[name], Layout.SHARED)
        if name in self.parameters.trained:
            return Fused(self.parameters.trained[name], Layout.STACK)
        return self.parameters.others[name]

    def _first(self, step: _Step, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step for the first time, and find out whether its rule serves it."""
        step.settled = True
        values = values_in([*args, *kwargs.values()])
        same = all(isinstance(value, Fused) and value.layout is Layout.SHARED for value in values)
        if args and isinstance(args[0], PerLearner) and base_name(step.call.target) == "add":
            step.rule = elementwise.add_to_integer_buffers
        elif same and not _draws(step.call):
            step.rule = _shared
        try:
            result = step.rule(step.call, args, kwargs)
            if step.rule is not loop and not _fits(result, step.call):
                raise NotFusedError
        except torch.OutOfMemoryError:
            raise
        except (NotFusedError, RuntimeError, AttributeError, TypeError, IndexError):
            step.rule = loop
            result = loop(step.call, args, kwargs)
        if step.rule is loop:
            self.looped.append(base_name(step.call.target))
        return result


def exported(template: nn.Module, example: Tensor, precision: Precision) -> torch.export.ExportedProgram:
    """The template's graph for batches like the example; kept as long as the template, for banks of other sizes."""
    graphs = _EXPORTED.setdefault(template, {})
    key = (tuple(example.shape), example.dtype, precision.name)
    if key not in graphs:
        graphs[key] = _export(template, example, precision)
    return graphs[key]


def _export(template: nn.Module, example: Tensor, precision: Precision) -> torch.export.ExportedProgram:
    module = cast_module(copy.deepcopy(template), precision).train()
    try:
        return torch.export.export(module, (example,), strict=False)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FusionError(f"torch.export cannot capture it ({reason.strip()[:160]})") from error


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


def _single_output(node: Node) -> Node:
    outputs = [entry for entry in node.args[0] if isinstance(entry, Node)]  # type: ignore[union-attr]
    if len(outputs) != 1:
        raise FusionError(f"it returns {len(outputs)} tensors, and one is needed")
    return outputs[0]


def _is_assertion(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node.target) in _ASSERTIONS


def _rule_for(call: Call) -> Rule:
    name = base_name(call.target)
    if name in RULES:
        return elementwise.pointwise if _is_two_tensor_form(call, name) else RULES[name]
    pointwise = torch.Tag.pointwise in call.target.tags or name in elementwise.POINTWISE
    return elementwise.pointwise if pointwise else loop


def _is_two_tensor_form(call: Call, name: str) -> bool:
    """`max(x, y)`, which is element-wise, unlike `max(x, dim)`."""
    return name in ("max", "min") and call.target._overloadname == "other"


def _draws(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.target.tags


def _getitem(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0][args[1]]


def _shared(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is the same for all learners is computed once."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, Fused):
            return argument.tensor
        return [plain(entry) for entry in argument] if isinstance(argument, list | tuple) else argument

    return wrap(call.target(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()}), Layout.SHARED)


def _fits(result: Any, call: Call) -> bool:
    """Whether a result has the shape of K exported ones."""
    if not isinstance(result, Fused) or call.shape is None:
        return True
    shape, k = call.shape, call.num_learners
    expected = {
        Layout.SHARED: shape,
        Layout.STACK: (k, *shape),
        Layout.CHANNELS: (*shape[:1], k * shape[1], *shape[2:]) if len(shape) > 1 else None,
    }
    return tuple(result.tensor.shape) == expected[result.layout]


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


def _check_writes(steps: list[_Step]) -> None:
    """Refuse an operator that writes through a view whose base is used otherwise: layouts here may be copies."""
    for step in steps:
        if not step.writes:
            continue
        written = step.args[0]
        if isinstance(written, Node) and written.op == "call_function" and _is_view(written):
            base = written.args[0]
            if isinstance(base, Node) and len(base.users) > 1:
                raise FusionError(f"it writes through a view ({base_name(step.call.target)}_)")


def _is_view(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    info = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return info is not None and not info.is_write


