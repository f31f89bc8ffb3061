"""Ways to run several models on one batch: one after another or in one graph, all of them or groups on threads.

Each has the name of the executor that trains models in that way, which says how models are grouped, whether they are
fused, and on which devices this runs.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from crossbow_py.core.measured import fastest
from crossbow_py.core.trees import Tree, batch_key, call, map_tree
from crossbow_py.engine import executors
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import CudaStreams, Stream
from crossbow_py.engine.device.host import intra_op_threads
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.fused_agreement import trusted_outputs
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.losses import scores_of
from crossbow_py.predict.programs import Captures, Forward, recorded

PredictorName = Literal["auto", "serial", "threads", "fused", "fused_threads", "streams"]

# Shapes of batches an executor keeps a program for, with memory of its own: a server may see any number of them.
MOST_PROGRAMS = 8
_MOST_STREAMS = 32  # as many as torch deals out


class Predictor(ABC):
    """Runs the models of some banks, in the banks' order. Not thread-safe.

    Args:
        name: the name of the executor that trains in this way.
        banks: banks that are not for training.
        writes_inputs: whether a model may write to its inputs, so that every model needs a copy.

    Attributes:
        notes: sentences for the user about slower operation.
    """

    def __init__(self, name: str, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        self.name, self.banks, self.writes_inputs = name, banks, writes_inputs
        self.notes: list[str] = []

    @abstractmethod
    def probabilities(self, inputs: Tree) -> Tensor:
        """Return probabilities `[K, B, classes]` of a batch `[B, ...]` as the models take it, in a new tensor.

        On CUDA the work is enqueued on the current stream, and the host does not wait for it.
        """

    def close(self) -> None:
        """Stop threads and forget programs."""

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """The modules of all rows, in the banks' order."""
        return [bank.module(row) for bank in self.banks for row in range(bank.num_learners)]

    def _bodies(self, inputs: Tree) -> list[Callable[[], Tensor]]:
        """Return for each model the function that returns its outputs."""
        return [partial(self._run, module, inputs) for module in self._modules]

    @torch.no_grad()  # which holds for one thread
    def _run(self, module: nn.Module, inputs: Tree) -> Tensor:
        return scores_of(call(module, map_tree(torch.clone, inputs) if self.writes_inputs else inputs))  # type: ignore[no-any-return]

    def _softmax(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the probabilities of all models from the outputs of each, in master precision."""
        return torch.stack(list(outputs)).to(self.banks[0].precision.master).softmax(-1)


class SerialPredictor(Predictor):
    """Runs one model after another."""

    def probabilities(self, inputs: Tree) -> Tensor:
        return self._softmax([body() for body in self._bodies(inputs)])


class ThreadsPredictor(Predictor):
    """Runs models on as many threads as there are cores, with one intra-op thread each."""

    def __init__(self, name: str, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(name, banks, writes_inputs)
        self._threads = _CoreThreads(len(self._modules))

    def probabilities(self, inputs: Tree) -> Tensor:
        return self._softmax(self._threads.run(self._bodies(inputs)))

    def close(self) -> None:
        self._threads.close()


class ProgramsPredictor(Predictor):
    """Keeps a program for each of the last shapes of batches, on CUDA a CUDA graph."""

    def __init__(self, name: str, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(name, banks, writes_inputs)
        self._captures = Captures(name, banks) if banks[0].device.type == "cuda" else None
        self.notes = [] if self._captures is None else self._captures.notes
        self._branches = _Branches(banks[0].device)
        self._programs: OrderedDict[object, Forward] = OrderedDict()  # the last used ones last

    @torch.no_grad()  # inputs may want gradients, and what was recorded would give them
    def probabilities(self, inputs: Tree) -> Tensor:
        """See Predictor. A call makes the program of a shape that is not kept, and then blocks the host on CUDA."""
        shape = batch_key(inputs)
        if shape not in self._programs:
            run = self._prepared(inputs)
            self._programs[shape] = run if self._captures is None else self._captures.captured(run, inputs)
        self._programs.move_to_end(shape)
        self._keep(MOST_PROGRAMS)
        return self._programs[shape](inputs)

    @abstractmethod
    def _prepared(self, inputs: Tree) -> Forward:
        """Return the program for batches like these, on CUDA before it is captured."""

    def close(self) -> None:
        self._keep(0)
        if self._captures is not None:
            self._captures.close()
        self._branches.close()

    def _keep(self, most: int) -> None:
        """Forget the least recently used programs beyond `most`."""
        while len(self._programs) > most:
            _, run = self._programs.popitem(last=False)
            if self._captures is not None:
                self._captures.release(run)


class FusedPredictor(ProgramsPredictor):
    """Runs a graph for each group of a bank's models, and all groups side by side.

    `probabilities` raises FusionError for models that cannot be fused, and CaptureError for those that a CUDA graph
    cannot hold.
    """

    def __init__(self, name: str, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(name, banks, writes_inputs)
        groups_of = EXECUTORS[name].groups_of
        self._groups = [(bank, group) for bank in banks for group in groups_of(bank.num_learners)]

    def _graphs(self, inputs: Tree) -> list[FusedGraph]:
        return [trusted_outputs(bank, inputs, group) for bank, group in self._groups]

    def _prepared(self, inputs: Tree) -> Forward:
        run = partial(self._all, self._graphs(inputs))
        return run if self.banks[0].device.type == "cuda" else _on_fastest_threads(recorded(run, inputs), inputs)

    @torch.no_grad()
    def _all(self, graphs: Sequence[FusedGraph], inputs: Tree) -> Tensor:
        bodies = [partial(graph.run, inputs, shared=True) for graph in graphs]
        outputs = self._branches.run(bodies) if len(bodies) > 1 else [bodies[0]()]
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.to(self.banks[0].precision.master).softmax(-1)


class FusedThreadsPredictor(FusedPredictor):
    """Runs a graph for each group of a bank's models on as many threads as there are cores.

    Each has one intra-op thread, so that none waits for another after every operator. Raises FusionError as
    `FusedPredictor` does.
    """

    def __init__(self, name: str, banks: Sequence[ReplicaBank], writes_inputs: bool = False) -> None:
        super().__init__(name, banks, writes_inputs)
        self._threads = _CoreThreads(len(self._groups))

    def _prepared(self, inputs: Tree) -> Forward:
        runs = [recorded(partial(self._all, [graph]), inputs) for graph in self._graphs(inputs)]
        without_gradients = [torch.no_grad()(run) for run in runs]  # which holds for one thread
        return lambda batch: torch.cat(self._threads.run([partial(run, batch) for run in without_gradients]))

    def close(self) -> None:
        super().close()
        self._threads.close()


class StreamsPredictor(ProgramsPredictor):
    """Runs each model on a stream of its own, a branch in the CUDA graph of a batch's shape.

    `probabilities` raises CaptureError for models that a CUDA graph cannot hold.
    """

    def _prepared(self, inputs: Tree) -> Forward:
        return torch.no_grad()(lambda batch: self._softmax(self._branches.run(self._bodies(batch))))


PREDICTORS: dict[str, type[Predictor]] = {
    "serial": SerialPredictor,
    "threads": ThreadsPredictor,
    "fused": FusedPredictor,
    "fused_threads": FusedThreadsPredictor,
    "streams": StreamsPredictor,
}


def candidates(device: torch.device) -> list[str]:
    """Return the names that `executor=auto` chooses from on a device."""
    return [name for name in executors.candidates(device) if name in PREDICTORS]


class _Branches:
    """Work side by side on streams that fork from the current one and join it again. On a CPU it runs in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, list[Stream]()

    def run(self, bodies: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Run bodies and return their results in order. The current stream waits for all; the host does not."""
        if self._device.type != "cuda":
            return [body() for body in bodies]
        while len(self._streams) < min(_MOST_STREAMS, len(bodies)):
            self._streams.append(CudaStreams(self._device).new_stream())
        home, results = torch.cuda.current_stream(self._device), []
        streams = self._streams[: len(bodies)]
        for stream in streams:
            stream.wait_stream(home)
        for index, body in enumerate(bodies):
            with torch.cuda.stream(streams[index % len(streams)]):
                results.append(body())
        # Results are freed after this, so that their branches' memory is not reused too early.
        for stream in streams:
            home.wait_stream(stream)
        return results

    def close(self) -> None:
        """Give the streams back, whose work must be over."""
        while self._streams:
            CudaStreams(self._device).give_back(self._streams.pop())


class _CoreThreads:
    """As many threads as there are cores, but no more than bodies, with one intra-op thread each."""

    def __init__(self, num_bodies: int) -> None:
        self._pool = ThreadPoolExecutor(
            min(num_bodies, torch.get_num_threads()), "crossbow prediction", partial(torch.set_num_threads, 1)
        )

    def run(self, bodies: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Run bodies on the threads, and return their results in order."""
        with intra_op_threads(1):  # the caller's are also those of MKL in every thread
            return list(self._pool.map(operator.call, bodies))

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown()


def _on_fastest_threads(run: Forward, inputs: Tree) -> Forward:
    """Return `run` on one intra-op thread or on all, whichever is faster: small batches are faster on one."""
    every = torch.get_num_threads()
    if every == 1:
        return run

    def on_threads(number: int, batch: Tree) -> Tensor:
        with intra_op_threads(number):
            return run(batch)

    return partial(on_threads, fastest({number: partial(on_threads, number, inputs) for number in (1, every)}))
