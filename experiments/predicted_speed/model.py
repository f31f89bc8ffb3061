"""What a round should take on a GPU: kernels by what binds them, graphs by their longest chain. Pure.

A kernel takes the longest of these, and a node of a graph a fixed time more:

    memory     bytes ÷ bandwidth, of the cache where all of them fit it
    cache      bytes that programs load ÷ bandwidth of the L2 cache
    products   FLOPs of whole tiles ÷ peak, of the multiprocessor that has the most tiles
    issue      instructions ÷ four a clock, likewise
    latency    waves · (dependent accesses + turns of the main loop, half of them if loads run ahead) · latency,
               turns being the mean over programs; or the same of the longest program alone

with waves = ⌈programs ÷ (multiprocessors · programs that fit one at once)⌉. Nothing of it was measured: `SLOW` and
`FAST` hold every assumption, on the two sides of what seems likely.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]
LIMITS = ("memory", "cache", "products", "issue", "latency")
LIMITS_OF_STREAMS = ("chain", "work", "memory", "dispatch", "host")


@dataclass(frozen=True)
class Gpu:
    """Nominal figures of a data sheet, dense FLOP/s by how products are multiplied.

    Attributes:
        bytes_per_s: of its memory.
        flops_per_s: of `bf16`, `tf32` and `ieee` (float32).
    """

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    capability: int = 90
    multiprocessors: int = 132
    clock_hz: float = 1.83e9
    cache_bytes: int = 50 * 2**20
    registers: int = 65536
    shared_bytes: int = 228 * 2**10
    threads: int = 2048
    most_programs: int = 32


_HOPPER = {"bf16": 989.4e12, "tf32": 494.7e12, "ieee": 66.9e12}
GPUS = (Gpu("H100", 3.35e12, _HOPPER), Gpu("H200", 4.8e12, _HOPPER))


@dataclass(frozen=True)
class Assumptions:
    """What data sheets do not say.

    Attributes:
        node_s: from the end of a kernel of a graph to the first work of the one that depends on it.
        bandwidth_share, flops_share, issue_share: what kernels reach of a peak that binds them.
        clock_share: of the nominal clock, under load.
        cache_bytes_per_s: of the L2 cache.
        cached_share: of the L2 cache: nodes with fewer bytes find all of them there.
        latency_s: of an access that others wait for.
        products_at_once, others_at_once: programs that fit a multiprocessor, of kernels that are not ours.
        fills: whether kernels of several streams share a multiprocessor well.
        most_launches: whether an operator of torch is the most launches it may be, or the fewest.
        dispatch_s: between the beginnings of two kernels, of whichever streams.
        operator_s, replay_s, event_s: of the host, for an operator, for a replay, to record or wait for an event.
    """

    node_s: float
    bandwidth_share: float
    flops_share: float
    issue_share: float
    clock_share: float
    cache_bytes_per_s: float
    cached_share: float
    latency_s: float
    products_at_once: int
    others_at_once: int
    fills: bool
    most_launches: bool
    dispatch_s: float
    operator_s: float
    replay_s: float
    event_s: float


SLOW = Assumptions(
    node_s=2.5e-6, bandwidth_share=0.7, flops_share=0.25, issue_share=0.4, clock_share=0.8, cache_bytes_per_s=3.5e12,
    cached_share=0.0, latency_s=0.8e-6, products_at_once=1, others_at_once=12, fills=False, most_launches=True,
    dispatch_s=1e-6, operator_s=10e-6, replay_s=15e-6, event_s=2e-6,
)  # fmt: skip
FAST = Assumptions(
    node_s=1.5e-6, bandwidth_share=0.92, flops_share=0.6, issue_share=0.8, clock_share=1.0, cache_bytes_per_s=5.5e12,
    cached_share=0.5, latency_s=0.4e-6, products_at_once=2, others_at_once=16, fills=True, most_launches=False,
    dispatch_s=0.3e-6, operator_s=4e-6, replay_s=6e-6, event_s=0.7e-6,
)  # fmt: skip
BOTH = {"slow": SLOW, "fast": FAST}
# Assumptions that stand or fall together. What else holds is unknown of each, so ratios are looked at in every mixture.
GROUPS = (
    ("node_s", "latency_s"),
    ("bandwidth_share", "cache_bytes_per_s", "cached_share"),
    ("flops_share", "issue_share", "clock_share"),
    ("products_at_once", "others_at_once", "fills", "most_launches"),
    ("dispatch_s", "operator_s", "replay_s", "event_s"),
)


def mixtures() -> Iterator[Assumptions]:
    """Yield all assumptions in which every group is either slow or fast."""
    for choice in itertools.product((SLOW, FAST), repeat=len(GROUPS)):
        taken = {name: getattr(each, name) for group, each in zip(GROUPS, choice, strict=True) for name in group}
        yield replace(SLOW, **taken)


_BYTES_A_CLOCK = 64  # that a multiprocessor takes from the L2 cache
_RESERVED_BYTES = 1024  # of shared memory, for each program
_SCHEDULERS = 4


@dataclass(frozen=True)
class Time:
    """How long a kernel runs, what binds it, and the share of the multiprocessors that it keeps busy."""

    seconds: float
    limit: str
    busy: float


def programs_at_once(cubin: Row, gpu: Gpu) -> int:
    """Return how many programs of a kernel fit a multiprocessor at once."""
    threads = 32 * cubin["warps"]
    registers = -(-max(cubin["registers"], 1) // 8) * 8 * threads
    shared = cubin["shared_bytes"] + _RESERVED_BYTES
    fits = gpu.threads // threads, gpu.registers // registers, gpu.shared_bytes // shared, gpu.most_programs
    return int(min(fits))


def kernel_time(node: Row, cubin: Row | None, arithmetic: str, gpu: Gpu, given: Assumptions) -> Time:
    """Return the time of a node's kernel, without what a node costs.

    Args:
        node: see `launches.Node`.
        cubin: of its kernel; None for operators of torch.
        arithmetic: `bf16`, `tf32` or `ieee`.
        gpu, given: the device, and what is assumed.
    """
    programs, units, clock = node["programs"], gpu.multiprocessors, gpu.clock_hz * given.clock_share
    others = given.products_at_once if node["steps"] else given.others_at_once
    at_once = programs_at_once(cubin, gpu) if cubin else others
    active, tail = min(programs, units), -(-programs // units) * units / programs
    most = active * _BYTES_A_CLOCK * clock
    cache = min(given.cache_bytes_per_s, most)
    cached = node["num_bytes"] <= given.cached_share * gpu.cache_bytes
    memory = cache if cached else min(gpu.bytes_per_s * given.bandwidth_share, most)
    flops = gpu.flops_per_s[arithmetic] * given.clock_share * given.flops_share
    seconds = dict.fromkeys(LIMITS, 0.0)
    seconds["memory"] = node["num_bytes"] / memory
    seconds["cache"] = node["loaded_bytes"] / cache
    seconds["products"] = node["tile_flops"] / flops * tail
    if cubin:
        issued = (programs * cubin["outside"] + node["turns"] * cubin["loop"]) * cubin["warps"]
        seconds["issue"] = issued / (units * _SCHEDULERS * clock * given.issue_share) * tail
    a_turn = given.latency_s / (2 if cubin is None or cubin["asynchronous"] else 1)
    waves, accesses_s = -(-programs // (units * at_once)), node["chain"] * given.latency_s
    longest, mean = (accesses_s + turns * a_turn for turns in (node["steps"], node["turns"] / programs))
    seconds["latency"] = max(longest, waves * mean)
    limit = max(seconds, key=lambda name: seconds[name])
    return Time(seconds[limit], limit, min(1.0, programs / (units * (at_once if given.fills else 1))))


@dataclass
class Sums:
    """What nodes add up to.

    Attributes:
        launches: of their kernels.
        chain_s: their time one after another, with what nodes cost.
        nodes_s: of this, what nodes cost.
        by_limit: of the rest, the seconds by what binds.
        work_s: the seconds that they would take if they filled the device.
        num_bytes, flops: of all.
    """

    launches: float = 0.0
    chain_s: float = 0.0
    nodes_s: float = 0.0
    work_s: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0
    by_limit: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0.0))


class Predictor:
    """Predicts rounds of a device under assumptions.

    Args:
        gpu, given: the device, and what is assumed.
        arithmetic: of products.
        cubins: of kernels, by key.
    """

    def __init__(self, gpu: Gpu, given: Assumptions, arithmetic: str, cubins: Mapping[str, Row]) -> None:
        self.gpu, self._given, self._arithmetic, self._cubins = gpu, given, arithmetic, cubins

    def sums(self, parts: Sequence[Row]) -> Sums:
        """Add up the nodes of parts, which run one after another."""
        found, given = Sums(), self._given
        for node in _nodes(parts):
            time = kernel_time(node, self._cubins.get(node["cubin"]), self._arithmetic, self.gpu, given)
            count, launches = node["count"], node["most" if given.most_launches else "fewest"]
            found.launches += count * launches
            found.nodes_s += count * launches * given.node_s
            found.chain_s += count * (time.seconds + launches * given.node_s)
            found.work_s += count * time.seconds * time.busy
            found.num_bytes += count * node["num_bytes"]
            found.flops += count * node["flops"]
            found.by_limit[time.limit] += count * time.seconds
        return found

    def one_stream_s(self, counted: Row) -> float:
        """Return the time of a round whose parts follow each other on one stream; the host is a round ahead."""
        return max(self.sums(counted["parts"]).chain_s, self.host_s(counted))

    def host_s(self, counted: Row) -> float:
        """Return the time that the host takes to enqueue a round."""
        return self._eager_s(counted["parts"]) + self._calls_s(counted["calls"])

    def _eager_s(self, parts: Sequence[Row]) -> float:
        nodes = _nodes([part for part in parts if not part["in_graph"]])
        return float(sum(node["count"] for node in nodes) * self._given.operator_s)

    def _calls_s(self, calls: Mapping[str, float]) -> float:
        events = calls.get("records", 0) + calls.get("waits", 0)
        return float(calls.get("replays", 0) * self._given.replay_s + events * self._given.event_s)

    def streams(self, few: Row, more: Row, num_learners: int) -> dict[str, float]:
        """Return the seconds of what a round of `streams` may be bound by, and what it launches, moves and multiplies.

        The longest of the seconds is the round. Averaging runs beside the next round's learning.

        Args:
            few: what was counted with two learners, or with the only one.
            more: with three, or with the only one.
            num_learners: K.
        """
        learner, (averaging, one_more) = _of_learner(few), (self.sums(_of_averaging(each)) for each in (few, more))
        own, beyond = self.sums(learner), max(0, num_learners - 2)

        def total(name: str) -> float:
            first = float(getattr(averaging, name))
            return float(num_learners * getattr(own, name) + first + beyond * (getattr(one_more, name) - first))

        calls, calls_of_more = self._calls_s(few["calls"]), self._calls_s(more["calls"])
        return {
            "chain": own.chain_s,
            "work": total("work_s"),
            "memory": total("num_bytes") / (self.gpu.bytes_per_s * self._given.bandwidth_share),
            "dispatch": total("launches") * self._given.dispatch_s,
            "host": num_learners * self._eager_s(learner) + calls + beyond * (calls_of_more - calls),
            "launches": total("launches"),
            "chain_launches": own.launches,
            "num_bytes": total("num_bytes"),
            "flops": num_learners * own.flops,
        }


def _of_learner(counted: Row) -> list[Row]:
    return [part for part in counted["parts"] if "(0)" in part["name"]]


def _of_averaging(counted: Row) -> list[Row]:
    return [part for part in counted["parts"] if "(0)" not in part["name"]]


def _nodes(parts: Sequence[Row]) -> Iterator[Row]:
    for part in parts:
        yield from part["nodes"]
