"""Blocks of a forward under `torch.no_grad()` or `torch.autocast()`.

torch.export makes one operator of each block, which holds the block's graph. This module puts the nodes of that graph
in the block's place, and records with every node the modes it runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from crossbow_py.engine.fusion.rules.registry import base_name
from crossbow_py.engine.fusion.writes import FusionError

_CASTS_OF_ITS_OWN = ("to", "_to_copy", "type_as")
_NO_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_MODES = "crossbow_modes"  # key of a node's meta
_BLOCK = "crossbow_block"  # key of a node's meta, for the outermost autocast block around it
_GRAD = "crossbow_grad"  # key of what `annotate` adds to a node's meta


@dataclass(frozen=True)
class Modes:
    """The modes that the blocks around an operator set.

    Attributes:
        grad: whether autograd follows it; None if no block sets this.
        autocast: the dtype that autocast casts to, by type of device; None if the innermost block disables it.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None], ...] = ()

    @property
    def casts(self) -> bool:
        """True if operators choose their dtypes."""
        return any(dtype is not None for _, dtype in self.autocast)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have operators in the block run as in the model's own forward."""
        with ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad and torch.is_grad_enabled()))
            for device_type, dtype in self.autocast:
                if dtype is not None:
                    stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
            yield


class GradModes(TorchFunctionMode):
    """Has torch.export record with every operator whether the model wants its gradient.

    torch 2.13 splits an autocast block where that changes inside it, and then loses the change. The modes are those
    that the model sets: inside torch.autograd.Function grad mode is off, and gradients flow.

    Raises FusionError if the model computes under torch.inference_mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grad, self._infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.is_inference_mode_enabled() and not self._infers:
            raise FusionError("it computes under torch.inference_mode, which torch.export loses; use torch.no_grad")
        if func is torch._C._set_grad_enabled:
            self._grad = args[0]
        with annotate({_GRAD: self._grad}):
            return func(*args, **(kwargs or {}))


def modes_of(node: Node) -> Modes | None:
    """Return the modes of the blocks around a node; None outside of blocks."""
    modes: Modes | None = node.meta.get(_MODES)
    return modes


def is_followed(node: Node) -> bool:
    """Return whether autograd follows what a node computes."""
    modes = modes_of(node)
    return modes is None or modes.grad is not False


def inline_blocks(module: GraphModule) -> None:
    """Replace the blocks of a graph by their nodes, in place."""
    graph = module.graph
    for node in [node for node in graph.nodes if _kind(node) is not None]:
        _inline(node, module)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def cast_once(graph: Graph) -> None:
    """Cast a parameter once that several operators of an autocast block cast, in place.

    The cache of torch.autocast does this too, but torch.export leaves it out. Gradients are then summed in the lower
    precision, as in eager mode.
    """
    for parameter in [node for node in graph.nodes if node.op == "placeholder"]:
        blocks: dict[str, list[Node]] = {}
        for user in parameter.users:
            if _casts(user, parameter):
                blocks.setdefault(user.meta[_BLOCK], []).append(user)
        for users in blocks.values():
            if len(users) > 1:
                _share_cast(parameter, users)


def _casts(user: Node, parameter: Node) -> bool:
    """Return whether autocast gives an operator a lower precision of a parameter, and caches it."""
    modes, own, value = modes_of(user), parameter.meta.get("val"), user.meta.get("val")
    if modes is None or modes.grad is False or not isinstance(own, Tensor) or not isinstance(value, Tensor):
        return False
    if own.dtype is not torch.float32 or not own.requires_grad or base_name(user.target) in _CASTS_OF_ITS_OWN:  # type: ignore[arg-type]
        return False
    return value.dtype is dict(modes.autocast).get(own.device.type)


def _share_cast(parameter: Node, users: list[Node]) -> None:
    first = next(node for node in parameter.graph.nodes if node in users)
    dtype = first.meta["val"].dtype
    with parameter.graph.inserting_before(first):
        shared = parameter.graph.call_function(torch.ops.aten.to.dtype, (parameter, dtype))
    shared.meta = {**first.meta, "val": parameter.meta["val"].to(dtype), _MODES: Modes(True)}
    for user in users:
        user.replace_input_with(parameter, shared)


def _kind(node: Node) -> str | None:
    name = getattr(node.target, "__name__", None)
    known = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    return name if known and name in (_NO_GRAD, _AUTOCAST) else None


def _inline(block: Node, module: GraphModule) -> None:
    at = next(i for i, argument in enumerate(block.args) if isinstance(argument, Node) and argument.op == "get_attr")
    inner = module.get_submodule(str(block.args[at].target))  # type: ignore[union-attr]
    assert isinstance(inner, GraphModule), "a block holds a graph"
    inline_blocks(inner)
    returned = _copy(inner.graph, block, block.args[at + 1 :])
    for item in list(block.users):
        item.replace_all_uses_with(returned[item.args[1]])  # type: ignore[index]
        block.graph.erase_node(item)
    block.graph.erase_node(block)


def _copy(inner: Graph, block: Node, operands: tuple[object, ...]) -> list[Node]:
    """Copy a block's nodes before it, and return those whose values the block returns."""
    own = list(inner.nodes)
    values = dict(zip((node for node in own if node.op == "placeholder"), operands, strict=True))
    with block.graph.inserting_before(block):
        for node in own:
            if node.op == "call_function":
                values[node] = copied = block.graph.node_copy(node, lambda each: values[each])
                if _kind(block) == _AUTOCAST:
                    copied.meta[_BLOCK] = block.name
                recorded: bool | None = node.meta.get("custom", {}).get(_GRAD)
                copied.meta[_MODES] = _inside(block, modes_of(node) or Modes(recorded))
    return [values[node] for node in inner.output_node().args[0]]  # type: ignore[union-attr]


def _inside(block: Node, own: Modes) -> Modes:
    """Return the modes of a node in a block: those of the innermost blocks around it."""
    if _kind(block) == _NO_GRAD:
        return replace(own, grad=bool(block.args[0])) if own.grad is None else own
    device_type, dtype, enabled = block.args[:3]
    if device_type in dict(own.autocast):
        return own
    return replace(own, autocast=(*own.autocast, (str(device_type), dtype if enabled else None)))  # type: ignore[arg-type]
