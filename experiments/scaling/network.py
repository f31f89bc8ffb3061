"""The time of an all-reduce by the α-β model: a step costs α seconds and a byte 1/β. Pure.

    ring of n             2·(n − 1)·α + 2·(n − 1)/n · bytes/β
    double binary tree    2·⌈log₂ n⌉·α + 2 · bytes/β               # pipelined, as NCCL's
    nodes of g            reduce-scatter inside, all-reduce of each share between nodes, all-gather inside;
                          or a tree inside and one GPU a node that talks to the others
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """α in seconds a step, β in bytes a second and direction.

    `multiprocessors` are what an all-reduce over it takes of a GPU.
    """

    alpha_s: float
    bytes_per_s: float
    multiprocessors: int = 0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Link:
        return cls(values["alpha_us"] / 1e6, values["gb_per_s"] * 1e9, values["multiprocessors"])


@dataclass(frozen=True)
class Network:
    """Nodes of `gpus_per_node`, linked `inside`; between nodes each has `nics` cards with a link `between` each.

    `start_s` is what every all-reduce costs before its first step.
    """

    name: str
    gpus_per_node: int
    inside: Link
    between: Link
    nics: int
    start_s: float = 0.0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Network:
        return cls(
            name=values["name"],
            gpus_per_node=values["gpus_per_node"],
            inside=Link.from_values(values["inside"]),
            between=Link.from_values(values["between"]),
            nics=values["nics"],
            start_s=values["start_us"] / 1e6,
        )

    def all_reduce_s(self, num_gpus: int, num_bytes: float) -> float:
        """Seconds from when the last GPU has come to when all have the sum; nothing to do for one."""
        if num_gpus == 1:
            return 0.0
        nodes = math.ceil(num_gpus / self.gpus_per_node)
        if nodes == 1:
            return self.start_s + fastest_s(num_gpus, num_bytes, self.inside)
        return self.start_s + min(self._by_shares_s(nodes, num_bytes), self._by_roots_s(nodes, num_bytes))

    def multiprocessors(self, num_gpus: int) -> int:
        """The share of each of so many GPUs that an all-reduce takes while it is under way."""
        return (self.inside if num_gpus <= self.gpus_per_node else self.between).multiprocessors

    def inside_node_s(self, num_gpus: int, num_bytes: float) -> float:
        """The same within every node alone, for the two-level period."""
        return self.all_reduce_s(min(num_gpus, self.gpus_per_node), num_bytes)

    def _by_shares_s(self, nodes: int, num_bytes: float) -> float:
        """Every GPU of a node sums a share with its counterparts; cards are shared where there are fewer."""
        gpus, cards = self.gpus_per_node, min(self.nics, self.gpus_per_node)
        own = Link(self.between.alpha_s, self.between.bytes_per_s * cards / gpus)
        return ring_s(gpus, num_bytes, self.inside) + fastest_s(nodes, num_bytes / gpus, own)

    def _by_roots_s(self, nodes: int, num_bytes: float) -> float:
        return tree_s(self.gpus_per_node, num_bytes, self.inside) + fastest_s(nodes, num_bytes, self.between)


def fastest_s(ranks: int, num_bytes: float, link: Link) -> float:
    """The faster of ring and tree, as NCCL chooses: many bytes a rank favour the ring, many ranks the tree."""
    return min(ring_s(ranks, num_bytes, link), tree_s(ranks, num_bytes, link))


def ring_s(ranks: int, num_bytes: float, link: Link) -> float:
    return 2 * (ranks - 1) * link.alpha_s + 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s


def tree_s(ranks: int, num_bytes: float, link: Link) -> float:
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.alpha_s + 2 * num_bytes / link.bytes_per_s


# What is assumed of networks, and on what ground. Latencies inside a node and over InfiniBand, and `start_us`, are
# those of NCCL's own model (src/graph/tuning.cc: the Simple protocol, 3.4 µs a step by NVLink, 14 µs by network, 8.4
# µs to begin); NVLink's effective rate on Hopper, 370 GB/s, is NVIDIA's (NVIDIA/nccl-tests, issue 212). A 400 Gb/s
# card gives 46 to 48 GB/s (issue 290 there); DGX H100 and H200 have one for each GPU. 25 Gb/s Ethernet: one card a
# node, 94 % of the line rate are payload of TCP; 25 µs a message, half of an ordinary round trip in a data centre, is
# a guess. An all-reduce takes a multiprocessor a channel: 16 on Hopper, as in torch/_inductor/comm_analysis.py, and 2
# for one slow card, a guess.
NETWORKS: tuple[dict[str, Any], ...] = (
    {
        "name": "InfiniBand 400 Gb/s",
        "gpus_per_node": 8,
        "inside": {"alpha_us": 3.4, "gb_per_s": 370.0, "multiprocessors": 16},
        "between": {"alpha_us": 14.0, "gb_per_s": 47.0, "multiprocessors": 16},
        "nics": 8,
        "start_us": 8.4,
    },
    {
        "name": "Ethernet 25 Gb/s",
        "gpus_per_node": 8,
        "inside": {"alpha_us": 3.4, "gb_per_s": 370.0, "multiprocessors": 16},
        "between": {"alpha_us": 25.0, "gb_per_s": 2.9, "multiprocessors": 2},
        "nics": 1,
        "start_us": 8.4,
    },
)
