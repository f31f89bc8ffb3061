"""Programs: functions of a batch, specialised for one shape of it, with nothing left to decide when called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import one_line
from crossbow_py.core.trees import Tree, leaves, map_tree
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import CudaStreams, Event, Graph, Pool, Stream, failed_capture
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS, CaptureError
from crossbow_py.engine.native.library import RECORDING
from crossbow_py.engine.trust import GRAPHS, not_used, why_not
from crossbow_py.engine.trust.compare import are_close

Forward = Callable[[Tree], Tensor]
_NAME = "the models"
_DRAWS = "the models draw random numbers"


@torch.no_grad()
def recorded(run: Forward, inputs: Tree) -> Forward:
    """Record the operators that `run` calls for batches of the shape and format of `inputs`.

    `run` has been called before, so that it decides nothing any more. Where it cannot be recorded, as C code cannot, or
    where what was recorded gives another answer, it is `run` itself.
    """
    expected = run(inputs)
    form = pytree.tree_structure(inputs)
    before = RECORDING.set(True)
    try:
        replay = _compiled(make_fx(lambda *values: run(form.unflatten(values)))(*leaves(inputs)))
        found = replay(inputs)
    except Exception:  # tracing calls what it likes, and raises what that raises
        return run
    finally:
        RECORDING.reset(before)
    return replay if are_close([found], [expected]) else run


def _compiled(program: GraphModule) -> Forward:
    """Return the program with an attribute in place of every value that depends on no input and is still read."""
    known: dict[Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(program, str(node.target))
        elif node.op == "call_function" and _is_constant(node, known):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    rest = FxGraph()
    copies: dict[Node, Node] = {}
    for node in program.graph.nodes:
        if node not in known:
            copies[node] = rest.node_copy(node, copies.__getitem__)
        elif any(user not in known for user in node.users):
            copies[node] = rest.create_node("get_attr", node.name, name=node.name)
    named = {node.name: value for node, value in known.items()}
    forward, own = type(GraphModule(named, rest)).forward, SimpleNamespace(**named)
    return lambda inputs: forward(own, *leaves(inputs))  # attributes of modules are slow to look up


def _is_constant(node: Node, known: dict[Node, Any]) -> bool:
    target = node.target
    changes = isinstance(target, OpOverload) and (
        target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
    )
    return not changes and bool(node.all_input_nodes) and all(each in known for each in node.all_input_nodes)


class Captures:
    """Captures functions, and has their calls follow on each other, whichever streams these are made on.

    So all graphs have one pool of memory: what one computes on its way, the next may overwrite. Branches of them may
    share streams, and with those the workspaces of libraries, for the same reason.

    Args:
        executor: named in errors.
        banks: whose models are called.
        device: for tests; by default CUDA, on the banks' device.

    Attributes:
        notes: sentences for the user about what is not captured, each once.
    """

    def __init__(self, executor: str, banks: Sequence[ReplicaBank], device: CudaStreams | None = None) -> None:
        self._executor, self._banks = executor, banks
        self._device = device or CudaStreams(banks[0].device)
        self._stream: Stream | None = None
        self._begun, self._done = self._device.new_event(), self._device.new_event()
        self._pool: Pool = None
        self._graphs: list[Graph] = []
        self.notes: list[str] = []

    def captured(self, run: Forward, inputs: Tree) -> Forward:
        """`run` as a CUDA graph; as it is where nothing is captured, or if it draws, which a graph would repeat.

        `notes` says so where it stays as it is.
        Blocks the host. Raises CaptureError for what a graph cannot hold.
        """
        device = self._device
        self._stream = self._stream or device.new_stream()
        device.record(self._begun, device.callers_stream())
        for event in (self._begun, self._done):
            device.wait(self._stream, event)
        before = self._random_state()

        def warm_up() -> None:
            run(inputs)

        for _ in range(WARM_UP_ROUNDS):  # rules are settled, and libraries choose algorithms and allocate workspaces
            device.run(_NAME, warm_up, self._stream)
        device.synchronize()  # host–device synchronisation
        eager = why_not(GRAPHS, leaves(inputs)[0].device) or failed_capture()
        if self._random_state() != before:
            eager = eager or _DRAWS
        if eager:
            note = not_used("CUDA graphs", eager)
            self.notes += [note] if note not in self.notes else []
            return partial(self._in_order, run)
        if not self._graphs:  # a pool that has lost its last graph takes no other
            self._pool = device.new_pool()
        own = CapturedRun(run, map_tree(torch.clone, inputs), device, self._done)
        try:
            own.graph = device.capture(_NAME, own.body, self._stream, self._pool)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(self._executor, _NAME, one_line(error)) from error
        self._graphs.append(own.graph)
        return own

    def release(self, run: Forward) -> None:
        """Forget what `captured` gave; blocks the host until it has run. The pool's memory goes with its last graph."""
        if isinstance(run, CapturedRun):
            self._device.synchronize_event(self._done)  # host–device synchronisation
            self._graphs.remove(run.graph)
            self._device.release(run.graph)

    def close(self) -> None:
        """Give the stream back, once all that `captured` gave was released. Blocks the host until it is over."""
        if self._stream is not None:
            self._device.synchronize_event(self._done)  # host–device synchronisation
            self._device.give_back(self._stream)
            self._stream = None

    def _in_order(self, run: Forward, inputs: Tree) -> Tensor:
        """Run a function as it is, after the last call and before the next; the host does not wait."""
        stream = self._device.callers_stream()
        self._device.wait(stream, self._done)
        outputs = run(inputs)
        self._device.record(self._done, stream)
        return outputs

    def _random_state(self) -> Hashable:
        """Return the state of every generator that an operator may draw from."""
        own = [generator.get_state() for bank in self._banks for generator in bank.generators]
        return self._device.random_state(), *(state.numpy().tobytes() for state in own)


class CapturedRun:
    """A function of a batch whose `body` was captured once as `graph`, and is replayed.

    Args:
        run: what is captured; kept, as the graph reads tensors that are its own.
        inputs: what the graph reads; every call is given a batch of their shape, format and memory order.
        device: what replays it.
        done: the end of the last call of any graph of the pool.
    """

    graph: Graph

    def __init__(self, run: Forward, inputs: Tree, device: CudaStreams, done: Event) -> None:
        self._run, self._inputs, self._outputs = run, inputs, torch.empty(0)
        self._device, self._done = device, done

    def body(self) -> None:
        """Run the function; this is what is captured."""
        self._outputs = self._run(self._inputs)

    def __call__(self, inputs: Tree) -> Tensor:
        """Return a copy of the outputs. All on the current stream, the host does not wait."""
        device, stream = self._device, self._device.callers_stream()
        device.wait(stream, self._done)  # of the last call, which may have been made on another stream
        map_tree(Tensor.copy_, self._inputs, inputs)
        device.replay(self.graph, stream)
        outputs = self._outputs.clone()  # which the next call overwrites, maybe on another stream
        device.record(self._done, stream)
        return outputs
