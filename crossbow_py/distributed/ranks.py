"""The ranks of a run: processes, one a device, that train one model together. A single rank needs no process group.

All ranks call the methods of `Ranks` in the same order, from the training loop's thread. A failure of one rank is
raised on all; the first rank prints it.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from crossbow_py.core.errors import CrossbowError, RankError
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.watch import Watch


class Place(NamedTuple):
    """The place of a rank: its node as the launcher counts them, the name of the host, and the UUIDs of its devices."""

    node: int
    host: str
    device_uuids: tuple[str, ...] = ()

    def is_beside(self, other: Place) -> bool:
        """Return whether both are on one node. A launcher that does not count nodes has all ranks on node 0."""
        return (self.node, self.host) == (other.node, other.host)


class Ranks:
    """A single rank. Base of several ranks.

    Attributes:
        rank, num_ranks: index and number in the whole run; rank 0 writes its folder.
        local_rank, num_local: index and number on this host.
        node, num_nodes: index and number of hosts, as the launcher counts them.
        watch: finds ranks that hang.
        token: text that is the same on all ranks, and new at every start of them.
    """

    rank, num_ranks = 0, 1
    local_rank, num_local = 0, 1
    node, num_nodes = 0, 1
    token = uuid.uuid4().hex[:12]

    def __init__(self) -> None:
        self.watch = Watch()

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that records the run and writes the model."""
        return self.rank == 0

    def collective(self, device: torch.device, apart: bool = False) -> Collective:
        """Return the sum over devices. `apart` keeps nodes apart, except for `mean_over_nodes`."""
        return Collective()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, in rank order; each gives as many. Blocks until all ranks have called it."""
        return [list(values)]

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Blocks until all ranks have called it."""
        return [text]

    def gather_tensors(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return every rank's tensors on the host, in rank order and to the bit. All ranks call it together.

        Ranks may give other numbers of tensors, of other shapes and dtypes.
        """
        if self.num_ranks == 1:
            return [list(values)]
        own = [_as_bytes(each) for each in values]
        forms = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in values]
        every = [json.loads(text) for text in self.gather_texts(json.dumps([forms, sum(map(len, own))]))]
        starts = [0, *itertools.accumulate(size for _, size in every)]
        held = torch.zeros(starts[-1], dtype=torch.uint8)
        if own:
            held[starts[self.rank] : starts[self.rank + 1]] = torch.cat(own)
        self.add(held)  # every byte is zero on all ranks but one
        return [_from_bytes(held[start:], rank_forms) for start, (rank_forms, _) in zip(starts, every, strict=False)]

    def places(self, device_uuids: Sequence[str]) -> list[Place]:
        """Return the places of all ranks, in rank order; each gives the UUIDs of its devices. All ranks together."""
        own = json.dumps([self.node, socket.gethostname(), list(device_uuids)])
        every = map(json.loads, self.gather_texts(own))
        return [Place(node, host, tuple(uuids)) for node, host, uuids in every]

    def nodes(self) -> list[int]:
        """Return, for every rank in rank order, the first rank on the same node."""
        nodes = [node for (node,) in self.gather([self.node])]
        return [nodes.index(node) for node in nodes]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks, added in rank order, so that it is the same to the bit everywhere."""
        return [sum(each) for each in zip(*self.gather(values), strict=True)]

    def add(self, values: Tensor) -> None:
        """Set values ← Σ over ranks, in place, on the host; the same to the bit everywhere."""

    @property
    def adder(self) -> Callable[[Tensor], None] | None:
        """Return `add` if there are other ranks, else None."""
        return self.add if self.num_ranks > 1 else None

    def copy_first(self, values: Iterable[Tensor]) -> None:
        """Set values ← the first rank's, in place, to the bit except for the sign of zero; float32 or float64."""
        self.copy_from(0, values)

    def copy_from(self, source: int, values: Iterable[Tensor]) -> None:
        """Set values ← those of rank `source`, as `copy_first`."""
        if self.num_ranks == 1:
            return
        for tensor in values:
            on_host = torch.zeros(tensor.shape, dtype=tensor.dtype)
            if self.rank == source:
                on_host.copy_(tensor.detach())
            self.add(on_host)
            tensor.detach().copy_(on_host)

    def from_first(self, make: Callable[[], str]) -> str:
        """Return what the first rank makes. Its failure is raised on all."""
        text = ""
        with self.together():
            text = make() if self.is_first else ""
        return self.gather_texts(text)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on each rank, at whose end an error of one rank is raised on all."""
        failure: CrossbowError | None = None
        try:
            yield
        except CrossbowError as error:
            failure = error
        self.raise_any(failure)

    def raise_any(self, failure: CrossbowError | None) -> None:
        """Raise the failure of the first rank that failed on every rank. Each gives its own failure, or None.

        Raises:
            CrossbowError: the failure itself, on rank 0 if it is the one that failed.
            RankError: the failure of that rank, on all others.
        """
        own = "" if failure is None else json.dumps([str(failure), failure.exit_code, type(failure).__name__])
        found = [(rank, text) for rank, text in enumerate(self.gather_texts(own)) if text]
        if not found:
            return
        rank, (text, exit_code, kind) = found[0][0], json.loads(found[0][1])
        if failure is not None and rank == self.rank and self.is_first:
            raise failure
        raise RankError(rank, text, exit_code, kind, is_said=self.is_first) from failure

    def close(self) -> None:
        """Leave the process group. Does not raise."""


def _as_bytes(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(held: Tensor, forms: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Return the tensors whose bytes are one behind the other, given their dtypes and shapes."""
    found, at = [], 0
    for name, shape in forms:
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        found.append(held[at : at + size].clone().view(dtype).view(list(shape)))
        at += size
    return found


ALONE = Ranks()
