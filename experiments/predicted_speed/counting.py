"""Counts what executors enqueue on CUDA in a round, on a machine without a GPU; a process of its own.

    TRITON_INTERPRET=1 python -m experiments.predicted_speed.counting fused|streams|plain MODEL K PRECISION BATCH_SIZE

prints JSON. Executors run their own code, and get a device that lives in the host's memory and keeps what they
enqueue. Kernels are recorded and not run; operators of torch run on the host, so values are of no use.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from crossbow_py import SGD, SMA
from crossbow_py.averaging.rule import Stage
from crossbow_py.core.triton_launch import recorded
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import Body, CudaStreams, Event, Graph, Pool, Stream
from crossbow_py.engine.executors.fused import FusedRounds
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.modules.precision import PrecisionName, cast_module, choose_precision
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.row_update import TorchUpdate
from experiments.bench.rounds import build_model, input_shape
from experiments.predicted_speed.launches import Node, OperatorNodes, compiled_form, node_of_launch

OPTIMIZER, RULE = SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4), SMA()
CPU = torch.device("cpu")
_AVERAGING = "averaging"


@dataclass
class Part:
    """Work that is enqueued as one: nodes of a graph, or what the host launches one by one."""

    name: str
    in_graph: bool
    nodes: list[Node]


class PaperDevice(CudaStreams):
    """A device on the host that keeps what the round after the first ones enqueues.

    Attributes:
        parts: in order, of that round.
        calls: how often the host called for something else: replays, records and waits.
        cubins: what kernels are compiled for, by key.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.calls: Counter[str] = Counter()
        self.cubins: dict[str, dict[str, Any]] = {}
        self.keeps = self._captures = False
        self._num_streams = 0

    def new_stream(self, high_priority: bool = False) -> Stream:
        self._num_streams += 1
        return f"stream {self._num_streams}"

    def give_back(self, stream: Stream, high_priority: bool = False) -> None:
        """There is no end of them."""

    def callers_stream(self) -> Stream:
        return "the caller's stream"

    def new_event(self, for_graphs: bool = False) -> Event:
        return object()

    def record(self, event: Event, stream: Stream) -> None:
        self.calls["records"] += self.keeps

    def wait(self, stream: Stream, event: Event) -> None:
        self.calls["waits"] += self.keeps and not self._captures  # within a graph it costs the host nothing

    def new_pool(self) -> Pool:
        return None

    def run(self, name: str, body: Body, stream: Stream) -> None:
        with self._kept(name, in_graph=False):
            body()

    def capture(self, name: str, body: Body, stream: Stream, pool: Pool) -> Graph:
        self._captures = True
        with self._kept(name, in_graph=True):
            body()
        self._captures = False
        return name

    def replay(self, graph: Graph, stream: Stream) -> None:
        self.calls["replays"] += self.keeps

    def release(self, graph: Graph) -> None:
        """Nothing is held."""

    def is_over(self, event: Event) -> bool:
        return True

    def synchronize_event(self, event: Event) -> None:
        """Everything was done at once."""

    def synchronize(self) -> None:
        """Likewise."""

    def host_values(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def random_state(self) -> Hashable:
        return None

    @contextmanager
    def _kept(self, name: str, in_graph: bool) -> Iterator[None]:
        operators = OperatorNodes()
        with recorded(runs=False) as launches, operators:
            yield
        if not self.keeps:
            return
        nodes = list(operators.nodes)
        for launch in launches:
            form = compiled_form(launch)
            key = json.dumps(_without_learners(form), sort_keys=True)
            self.cubins.setdefault(key, form)
            nodes.append(node_of_launch(launch, key))
        self.parts.append(Part(name, in_graph, nodes))


def _without_learners(form: dict[str, Any]) -> dict[str, Any]:
    constants = {name: value for name, value in form["constants"].items() if name != "GROUPS"}
    return {**form, "constants": constants}


@dataclass
class Counted:
    """What one job found, as plain values when it is printed."""

    parts: list[dict[str, Any]]
    calls: dict[str, int]
    cubins: dict[str, dict[str, Any]] = field(default_factory=dict)


def make_tasks(model: str, batch_size: int, num_learners: int, precision: PrecisionName, order: Order) -> RoundTasks:
    """Make what a run with `device=cuda` has, on the host."""
    formats, shape = choose_precision(precision, CPU), input_shape(model)
    num_images = max(256, batch_size)
    images = torch.zeros(num_images, *shape, dtype=torch.uint8)
    augmentation = Augmentation(crop_padding=4, flip=True) if shape[0] == 3 else Augmentation()
    bank = ReplicaBank(
        build_model(model), num_learners, device=CPU, precision=formats, state_names=OPTIMIZER.state_names, order=order,
        channels_last=True, has_velocity=RULE.has_velocity, gradient_mean=RULE.gradient_mean,
    )  # fmt: skip
    feed = make_feed(
        (images, torch.arange(num_images) % 10), batch_size, 0, CPU, augmentation, (0.5,) * shape[0],
        (0.25,) * shape[0], channels_last=True, dtype=formats.compute, kernels=True,
    )  # fmt: skip
    update = TorchUpdate(OPTIMIZER, RULE)
    return RoundTasks(
        bank, update=update, feed=feed, loss=nn.functional.cross_entropy, seed=0, collective=Collective()
    )  # fmt: skip


def plan(tasks: RoundTasks, index: int) -> Round:
    learners, size = tasks.bank.num_learners, tasks.feed.batch_size
    return Round(
        index=index,
        starts=tuple((index * learners + learner) * size for learner in range(learners)),
        learning_rates=(0.1,) * learners,
        together=tasks.update.rule.round(Stage(index, learners, 0.1, 1.0)),
    )


def count_fused(model: str, batch_size: int, num_learners: int, precision: PrecisionName) -> Counted:
    """Count a round of `fused` with kernels, its convolutions by the implicit matrix product."""
    tasks = make_tasks(model, batch_size, num_learners, precision, "blocks")
    device, notes = PaperDevice(), list[str]()
    fused = FusedPass(tasks, kernels=True)
    rounds = FusedRounds(tasks, fused, device, notes, True, lambda *_: nullcontext())
    if notes or fused.notes:
        raise AssertionError(f"kernels are not used: {notes + fused.notes}")
    for index in range(WARM_UP_ROUNDS + 1):
        device.keeps = index == WARM_UP_ROUNDS
        rounds.issue(RoundOutcome(plan(tasks, index)))
    if fused.graph.looped:
        raise AssertionError(f"operators run learner by learner: {fused.graph.looped}")
    return Counted(_plain(device.parts), dict(device.calls), device.cubins)


def count_streams(model: str, batch_size: int, num_learners: int, precision: PrecisionName) -> Counted:
    """Count a round of `streams`: the parts of the first learner, and averaging."""
    tasks = make_tasks(model, batch_size, num_learners, precision, "rows")
    device = PaperDevice()
    executor = StreamsExecutor(tasks, device)
    for index in range(WARM_UP_ROUNDS + 1):
        device.keeps = index == WARM_UP_ROUNDS
        executor.submit(plan(tasks, index))
    executor.close()
    # Before a capture a round is loaded twice.
    kept = {part.name: part for part in device.parts if "(0)" in part.name or part.name == _AVERAGING}
    return Counted(_plain(list(kept.values())), dict(device.calls))


def count_plain(model: str, batch_size: int, num_learners: int, precision: PrecisionName) -> Counted:
    """Count a step of one model with the images of all learners: forward, loss, backward, and SGD in one launch.

    On tensors without memory.
    """
    batch_size *= num_learners
    formats, num_parameters = choose_precision(precision, CPU), 0
    with FakeTensorMode():
        module = cast_module(build_model(model), formats).train()
        inputs = torch.empty(batch_size, *input_shape(model), dtype=formats.compute)
        targets = torch.zeros(batch_size, dtype=torch.int64)
        trained = list(module.parameters())
        num_parameters = sum(parameter.numel() for parameter in trained)
        with OperatorNodes() as operators:
            loss = nn.functional.cross_entropy(module(inputs).to(formats.master), targets)
            torch.autograd.grad(loss, trained)
    # Weights, gradient and momentum are read, weights and momentum written; in bfloat16 the gradient is cast and the
    # weights are copied back.
    casts = formats.has_shadow
    update = [Node("fused SGD", 20 * num_parameters, max(1, num_parameters // 2048), 1, 2, chain=3)]
    if casts:
        update += [Node("cast", 6 * num_parameters, max(1, num_parameters // 2048), 1, 3, chain=2)] * 2
    batch = Node("gather", batch_size * 3072 * 3, max(1, batch_size * 3), 4, 12, chain=4)
    return Counted(_plain([Part("step", True, [batch, *operators.nodes, *update])]), {"replays": 1, "records": 1})


def _plain(parts: list[Part]) -> list[dict[str, Any]]:
    """Parts as plain values, with nodes that are alike joined and counted."""
    found = []
    for part in parts:
        alike = Counter(part.nodes)
        nodes = [{**node.plain(), "count": count} for node, count in alike.items()]
        found.append({"name": part.name, "in_graph": part.in_graph, "nodes": nodes})
    return found


COUNTS: Mapping[str, Callable[[str, int, int, PrecisionName], Counted]] = {
    "fused": count_fused, "streams": count_streams, "plain": count_plain,
}  # fmt: skip


if __name__ == "__main__":
    side, name, k, form, size = sys.argv[1:]
    torch.manual_seed(0)
    precision: PrecisionName = "bf16" if form == "bf16" else "fp32"
    print(json.dumps(vars(COUNTS[side](name, int(size), int(k), precision))))
