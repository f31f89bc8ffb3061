"""The ranks of a run: processes, one a device, that train one model together. One alone needs no process group.

All ranks call the methods of `Ranks` in the same order, from the training loop's thread. What one of them fails with is
raised on all; the first rank says it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from crossbow_py.core.errors import CrossbowError, RankError
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.watch import Watch


class Ranks:
    """One rank alone. Base of the real ones.

    Attributes:
        rank, num_ranks: of the whole run; rank 0 writes its folder.
        local_rank, num_local: on this host.
        node, num_nodes: hosts, as the launcher counts them.
        watch: notices ranks that hang.
        token: text that is equal on all ranks, and another one whenever they start anew.
    """

    rank, num_ranks = 0, 1
    local_rank, num_local = 0, 1
    node, num_nodes = 0, 1
    token = uuid.uuid4().hex[:12]

    def __init__(self) -> None:
        self.watch = Watch()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: records, and writes the model."""
        return self.rank == 0

    def collective(self, device: torch.device, apart: bool = False) -> Collective:
        """What sums over devices; `apart` keeps nodes apart but for `mean_over_nodes`."""
        return Collective()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, float64, in rank order; as many on each rank. Blocks until all have come."""
        return [list(values)]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Blocks until all have come."""
        return [text]

    def nodes(self) -> list[int]:
        """Of every rank, in rank order, the first rank that is in the same node."""
        nodes = [node for (node,) in self.gather([self.node])]
        return [nodes.index(node) for node in nodes]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Over ranks, added in rank order, so that it is one to the bit everywhere."""
        return [sum(each) for each in zip(*self.gather(values), strict=True)]

    def add(self, values: Tensor) -> None:
        """values ← Σ over ranks, in place, on the host; to the bit alike everywhere."""

    @property
    def adder(self) -> Callable[[Tensor], None] | None:
        """`add`, where there is another rank to add."""
        return self.add if self.num_ranks > 1 else None

    def copy_first(self, values: Iterable[Tensor]) -> None:
        """values ← the first rank's, in place, to the bit but for the sign of zero; float32 or float64."""
        self.copy_from(0, values)

    def copy_from(self, source: int, values: Iterable[Tensor]) -> None:
        """As `copy_first`, of another rank than the first."""
        if self.num_ranks == 1:
            return
        for tensor in values:
            on_host = torch.zeros(tensor.shape, dtype=tensor.dtype)
            if self.rank == source:
                on_host.copy_(tensor.detach())
            self.add(on_host)
            tensor.detach().copy_(on_host)

    def from_first(self, make: Callable[[], str]) -> str:
        """What the first rank makes. What it fails with is raised on all."""
        text = ""
        with self.together():
            text = make() if self.is_first else ""
        return self.gather_texts(text)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what each rank does for itself: an error of one is raised on all, at the end of the block."""
        failure: CrossbowError | None = None
        try:
            yield
        except CrossbowError as error:
            failure = error
        self.raise_any(failure)

    def raise_any(self, failure: CrossbowError | None) -> None:
        """Raise on every rank what the first that failed has failed with; each gives its own failure, or None.

        Raises:
            CrossbowError: the rank's own, where it is the first of those and alone or the first to speak.
            RankError: another's.
        """
        said = "" if failure is None else json.dumps([str(failure), failure.exit_code, type(failure).__name__])
        found = [(rank, text) for rank, text in enumerate(self.gather_texts(said)) if text]
        if not found:
            return
        rank, (text, exit_code, kind) = found[0][0], json.loads(found[0][1])
        if failure is not None and rank == self.rank and self.is_first:
            raise failure
        raise RankError(rank, text, exit_code, kind, is_said=self.is_first) from failure

    def close(self) -> None:
        """Leave the process group. Does not raise."""


ALONE = Ranks()
