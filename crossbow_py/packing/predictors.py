"""Ways to run several models on one batch: one after another or in one graph, all of them or groups on threads."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from crossbow_py.engine.executors.subarrays import groups_of
from crossbow_py.engine.fusion.branches import Branches
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.replicas import ReplicaBank
from crossbow_py.packing.recording import Run, recorded
from crossbow_py.packing.timing import fastest

PredictorName = Literal["auto", "serial", "threads", "fused", "fused_threads"]


class Predictor(ABC):
    """Runs the models of some banks, in the banks' order. Not thread-safe.

    Args:
        banks: that are not for training.
        writes_inputs: whether a model may write to its inputs, so that others need a copy.
    """

    NAME: ClassVar[str]
    DEVICE: ClassVar[str | None] = None  # the only kind of device it runs on
    FUSES: ClassVar[bool] = False  # models into one graph, which not all can be

    def __init__(self, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        self.banks, self.writes_inputs = banks, writes_inputs

    @abstractmethod
    def probabilities(self, inputs: Tensor) -> Tensor:
        """`[K, B, classes]` of a batch `[B, ...]` as the models take it; the caller's own.

        On CUDA it is enqueued on the current stream; the host does not wait for it.
        """

    def close(self) -> None:
        """End what it has started."""


class SerialPredictor(Predictor):
    """One model after another."""

    NAME = "serial"

    def __init__(self, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(banks, writes_inputs)
        self._modules = [bank.module(row) for bank in banks for row in range(bank.num_learners)]

    def probabilities(self, inputs: Tensor) -> Tensor:
        """See Predictor."""
        outputs = [self._run(module, inputs) for module in self._modules]
        return _softmax(torch.stack(outputs), self.banks[0])

    @torch.no_grad()  # which holds for one thread
    def _run(self, module: nn.Module, inputs: Tensor) -> Tensor:
        output: Tensor = module(inputs.clone() if self.writes_inputs else inputs)
        return output


class ThreadsPredictor(SerialPredictor):
    """As many threads as there are cores, one intra-op thread each, which take the models in turn."""

    NAME = "threads"
    DEVICE = "cpu"

    def __init__(self, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(banks, writes_inputs)
        self._threads = _CoreThreads(len(self._modules))

    def probabilities(self, inputs: Tensor) -> Tensor:
        """See Predictor."""
        outputs = self._threads.run([partial(self._run, module, inputs) for module in self._modules])
        return _softmax(torch.stack(outputs), self.banks[0])

    def close(self) -> None:
        """Join the threads."""
        self._threads.close()


class FusedPredictor(Predictor):
    """A graph a bank, and banks side by side, recorded for every shape of batches; on CUDA as one CUDA graph.

    Raises FusionError, in `probabilities`, for models that cannot be fused.
    """

    NAME = "fused"
    FUSES = True

    def __init__(self, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(banks, writes_inputs)
        self._branches = Branches(banks[0].device)
        self._run: dict[tuple[torch.Size, torch.dtype], Run] = {}

    @torch.no_grad()  # inputs may want gradients, and what was recorded would give them
    def probabilities(self, inputs: Tensor) -> Tensor:
        """See Predictor. The first call for a shape exports the models, and on CUDA blocks the host."""
        key = inputs.shape, inputs.dtype
        if key not in self._run:
            self._run[key] = self._prepared(inputs)
        return self._run[key](inputs)

    def _prepared(self, inputs: Tensor) -> Run:
        graphs = [FusedGraph(bank.template, inputs, bank, training=False) for bank in self.banks]
        run = partial(self._all, graphs)
        if inputs.device.type == "cuda":
            return _captured(run, inputs, self.banks)
        return _on_fastest_threads(recorded(run, inputs), inputs)

    @torch.no_grad()
    def _all(self, graphs: Sequence[FusedGraph], inputs: Tensor) -> Tensor:
        bodies = [partial(graph.run, inputs, shared=True) for graph in graphs]
        outputs = self._branches.run(bodies) if len(bodies) > 1 else [bodies[0]()]
        return _softmax(outputs[0] if len(outputs) == 1 else torch.cat(outputs), self.banks[0])


class FusedThreadsPredictor(FusedPredictor):
    """Every bank in as many groups as there are cores, or models: a graph a group, which threads take in turn.

    One intra-op thread each, so that none waits for another after every operator.

    Raises FusionError as `FusedPredictor` does.
    """

    NAME = "fused_threads"
    DEVICE = "cpu"

    def __init__(self, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(banks, writes_inputs)
        cores = torch.get_num_threads()
        self._groups = [(bank, group) for bank in banks for group in groups_of(bank.num_learners, cores)]
        self._threads = _CoreThreads(len(self._groups))

    def _prepared(self, inputs: Tensor) -> Run:
        graphs = [
            FusedGraph(bank.template, inputs, bank, learners=group, training=False) for bank, group in self._groups
        ]
        return partial(self._side_by_side, [recorded(partial(self._all, [graph]), inputs) for graph in graphs])

    def _side_by_side(self, runs: Sequence[Run], inputs: Tensor) -> Tensor:
        return torch.cat(self._threads.run([partial(_without_gradients, run, inputs) for run in runs]))

    def close(self) -> None:
        """Join the threads."""
        self._threads.close()


PREDICTORS: dict[str, type[Predictor]] = {
    kind.NAME: kind for kind in (SerialPredictor, ThreadsPredictor, FusedPredictor, FusedThreadsPredictor)
}


def candidates(device: torch.device) -> list[str]:
    """What `executor=auto` chooses from on a device."""
    return [name for name, kind in PREDICTORS.items() if kind.DEVICE in (None, device.type)]


class _CoreThreads:
    """As many threads as there are cores, and no more than bodies, one intra-op thread each."""

    def __init__(self, num_bodies: int) -> None:
        self._pool = ThreadPoolExecutor(
            min(num_bodies, torch.get_num_threads()), "crossbow prediction", partial(torch.set_num_threads, 1)
        )

    def run(self, bodies: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """What the bodies return, in order; threads take them in turn."""
        with _intra_op_threads(1):  # the caller's are also those of MKL in every thread
            return list(self._pool.map(operator.call, bodies))

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown()


@contextlib.contextmanager
def _intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()  # which holds for one thread
def _without_gradients(run: Run, inputs: Tensor) -> Tensor:
    return run(inputs)


def _on_fastest_threads(run: Run, inputs: Tensor) -> Run:
    """`run` on one intra-op thread or on all of them: a few samples are answered before threads have met."""
    every = torch.get_num_threads()
    if every == 1:
        return run
    runs = {number: partial(_with_threads, run, number) for number in (1, every)}
    return runs[fastest({number: partial(own, inputs) for number, own in runs.items()})]


def _with_threads(run: Run, number: int, inputs: Tensor) -> Tensor:
    with _intra_op_threads(number):
        return run(inputs)


def _softmax(outputs: Tensor, bank: ReplicaBank) -> Tensor:
    """In master precision."""
    return outputs.to(bank.precision.master).softmax(-1)


def _captured(run: Run, inputs: Tensor, banks: Sequence[ReplicaBank]) -> Run:
    """`run` as a CUDA graph; as it is when it draws random numbers, which a graph would repeat. Blocks the host."""
    stream = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(inputs.device))
    before = _random_state(inputs.device, banks)
    with torch.cuda.stream(stream):
        for _ in range(2):  # rules are settled, and libraries choose algorithms and allocate workspaces
            run(inputs)
    torch.cuda.synchronize(inputs.device)  # host–device synchronisation
    if _random_state(inputs.device, banks) != before:
        return run
    return CapturedRun(run, inputs, stream)


def _random_state(device: torch.device, banks: Sequence[ReplicaBank]) -> list[bytes]:
    """Of every generator an operator may draw from."""
    states = [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
    states += [generator.get_state() for bank in banks for generator in bank.generators]
    return [state.numpy().tobytes() for state in states]


class CapturedRun:
    """A function of one tensor as a CUDA graph, captured once and replayed. Not one line of it has run on a GPU yet.

    Args:
        run: what to capture; it has run on `stream` before, so that nothing is chosen or allocated for good any more.
        inputs: an example; every call is given a tensor of its shape, format and memory order.
        stream: a side stream, where it is captured.
    """

    def __init__(self, run: Run, inputs: Tensor, stream: torch.cuda.Stream) -> None:
        self._inputs = inputs.clone()
        self._graph, self._done = torch.cuda.CUDAGraph(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(inputs.device))
        # The outer guard: when ending a capture fails, torch leaves the capture's stream as the current one.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = run(self._inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        """A copy of the outputs. All on the current stream, the host does not wait."""
        stream = torch.cuda.current_stream(inputs.device)
        stream.wait_event(self._done)  # of the last call, which may have been made on another stream
        self._inputs.copy_(inputs)
        self._graph.replay()
        outputs = self._outputs.clone()  # which the next call overwrites, maybe on another stream
        self._done.record(stream)
        return outputs
