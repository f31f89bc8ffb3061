"""The export of a model: its graph for one learner, checked for what a run for several cannot do right."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from crossbow_py.core.host_randomness import host_state, kept_host_state
from crossbow_py.core.trees import Tree, batch_key, call, leaves
from crossbow_py.engine.bank.frozen_base import frozen_parameters
from crossbow_py.engine.fusion.regions import GradModes, cast_once, inline_blocks, is_followed
from crossbow_py.engine.fusion.rules.registry import base_name
from crossbow_py.engine.fusion.writes import FusionError, Write, find_writes
from crossbow_py.engine.modules.code_lines import line_of_failure
from crossbow_py.engine.modules.losses import Part, scores_of
from crossbow_py.engine.modules.precision import Precision, cast_module
from crossbow_py.engine.trust.remember import once

_CALLED = "crossbow_model"  # the attribute that holds the model in a graph of a tree of inputs


class _Called(nn.Module):
    """A model as a function of the leaves of its inputs, which returns a part of its output."""

    def __init__(self, model: nn.Module, inputs: Tree, part: Part) -> None:
        super().__init__()
        self.train(model.training)
        setattr(self, _CALLED, model)
        self._tree, self._part = pytree.tree_structure(inputs), part

    def forward(self, *values: Tensor) -> Tree:
        return self._part(call(getattr(self, _CALLED), self._tree.unflatten(values)))


def exported(
    template: nn.Module, example: Tree, precision: Precision, training: bool = True, part: Part = scores_of
) -> torch.export.ExportedProgram:
    """Return the template's graph for batches like the example; kept as long as the template, for banks of all sizes.

    It takes the leaves of inputs that are a tree, and returns a `part` of the output. With `training=False` it is that
    of evaluation mode.

    Raises:
        FusionError: the model cannot be exported, does not return tensors, or writes in a way that cannot be followed.
    """
    key = batch_key(example), precision.name, training, part
    return once("exported graph", key, partial(_export, template, example, precision, training, part), template)


def _export(
    template: nn.Module, example: Tree, precision: Precision, training: bool, part: Part
) -> torch.export.ExportedProgram:
    _import_tracer()
    # The program keeps the module's parameters, of which it writes none.
    frozen = [own for own in frozen_parameters(template).values() if type(own) is nn.Parameter]
    memo: dict[int, Any] = {id(own): nn.Parameter(own.data, requires_grad=False) for own in frozen}
    module = cast_module(copy.deepcopy(template, memo), precision).train(training)
    called = module if isinstance(example, Tensor) else _Called(module, example, part)
    try:
        with _quiet(), kept_host_state(), preserve_node_meta(), GradModes():
            before = host_state()
            program = torch.export.export(called, tuple(leaves(example)), strict=False)
            draws = before != host_state()
            spec = program.call_spec.out_spec
            if called is module and not (spec is None or spec.is_leaf()):
                called = _Called(module, example, part)
                program = torch.export.export(called, tuple(leaves(example)), strict=False)
    except FusionError as error:
        raise FusionError(f"{error}{line_of_failure(error)}") from error
    except Exception as error:
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # noqa: PLC0415  half a second

        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if isinstance(error, GuardOnDataDependentSymNode):
            reason = "Python asks for the value of a tensor"
        raise FusionError(f"torch.export cannot capture it ({reason.strip()[:160]}){line_of_failure(error)}") from error
    if draws:
        raise FusionError("it draws random numbers from Python's or numpy's generator, and a graph would repeat them")
    inline_blocks(program.graph_module)
    cast_once(program.graph)
    for node in list(program.graph.nodes):
        _write_afterwards(node)
    outputs_of(program)
    for node in program.graph.nodes:
        _check_operator(node)
        _make_dense(node)
    writes_of(program)
    return program


def _import_tracer() -> None:
    """Import what torch.export imports when it is first called: a second, of which garbage collection is a third."""
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch.export._trace")
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have nothing printed: torch prints graphs and advice for authors of graphs, and exceptions say what matters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def first_names(template: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter or buffer in a graph, the one that the bank uses.

    Tied tensors have several names, and a graph of a tree of inputs has longer ones.
    """
    first: dict[int, str] = {}
    names = {}
    for tensors in (template.named_parameters(remove_duplicate=False), template.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            names[name] = names[f"{_CALLED}.{name}"] = first.setdefault(id(tensor), name)
    return names


class Outputs(NamedTuple):
    """The values that a graph returns: nodes, or constants that are no tensors, and the form of their tree."""

    values: list[Any]
    tree: pytree.TreeSpec

    @property
    def nodes(self) -> list[Node]:
        return [value for value in self.values if isinstance(value, Node)]


def outputs_of(program: torch.export.ExportedProgram) -> Outputs:
    """Return what the model returns. Raises FusionError unless there is a tensor in it."""
    spec, returned = program.call_spec.out_spec, program.graph.output_node().args[0]
    values = list(returned) if isinstance(returned, list | tuple) else []
    mutated = len(values) - (0 if spec is None else spec.num_leaves)  # buffers, in graphs of inference
    found = Outputs(values[mutated:], spec or pytree.tree_structure(None))
    if not found.nodes:
        raise FusionError("it returns no tensor")
    return found


def writes_of(program: torch.export.ExportedProgram) -> dict[Node, Write]:
    """Return what the graph's in-place operators write. Buffers may be written; parameters and constants may not."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    inputs = {node: kinds[node.name] for node in program.graph.nodes if node.op == "placeholder"}
    buffers = {node for node, kind in inputs.items() if kind is InputKind.BUFFER}
    fixed = {node for node, kind in inputs.items() if kind not in (InputKind.BUFFER, InputKind.USER_INPUT)}
    found = find_writes(list(program.graph.nodes), buffers, fixed)
    for node in found:  # a value may not be changed without its gradient, because rules make a new value instead
        written = node.args[0]
        computed = isinstance(written, Node) and written.op == "call_function" and is_followed(written)
        if computed and not is_followed(node):
            raise FusionError(f"it writes under torch.no_grad what was computed outside of it ({node.target})", node)
    return found


def _write_afterwards(node: Node) -> None:
    """Split an operator that writes to its argument `out` into two: computing and writing."""
    out = node.kwargs.get("out")
    if not isinstance(node.target, OpOverload) or not isinstance(out, Node):
        return
    arguments = [(each.name, str(each.type)) for each in node.target._schema.arguments if each.name != "out"]
    overloads = [getattr(node.target.overloadpacket, name) for name in node.target.overloadpacket.overloads()]
    plain = [o for o in overloads if [(each.name, str(each.type)) for each in o._schema.arguments] == arguments]
    if not plain:
        return
    named = {name: value for name, value in node.kwargs.items() if name != "out"}
    with node.graph.inserting_before(node):
        computed = node.graph.call_function(plain[0], node.args, named)
        written = node.graph.call_function(torch.ops.aten.copy_.default, (out, computed))
    computed.meta, written.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)


def _make_dense(node: Node) -> None:
    """Make the gradients of embeddings dense, as the bank's rows are."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        if "sparse" in names[: len(node.args)]:
            node.update_arg(names.index("sparse"), False)


def _check_operator(node: Node) -> None:
    """Refuse an operator that cannot be right for several learners, whatever runs it."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or target is operator.getitem:
        return
    if not isinstance(target, OpOverload):
        raise FusionError(f"its graph holds {getattr(target, '__name__', target)}, which is no operator", node)
    name = base_name(target)
    if value is not None and not isinstance(value, Tensor | list | tuple):
        raise FusionError(f"it makes a number of a tensor ({name}), and learners may have different ones", node)
    if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
        raise FusionError(f"a shape depends on values ({name}), and learners may have different ones", node)
    if name.startswith("as_strided"):
        raise FusionError(f"it looks into memory ({name}), which learners share", node)
