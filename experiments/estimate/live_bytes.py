"""Counts live bytes of tensors, operator by operator, and refuses to go past a limit.

What is counted is storages: each once, however many tensors and views share it, from the operator that made it until
nothing refers to it any more. So what autograd keeps for the backward pass counts for as long as it keeps it. Tensors
of devices without memory ("meta", or under FakeTensorMode) count like real ones: a model can "use" more than the
machine has. What an operator takes and gives back inside is not seen, nor is an allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OverLimitError(Exception):
    """The bytes that are alive went past the limit."""


class Ledger:
    """The storages that are alive, and what they take. Not thread-safe; threads may use it in turns.

    Args:
        limit: bytes; None for none. May be changed between operators.

    Attributes:
        live: bytes alive now.
        peak: the most that were alive since the start, or since it was set.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.live, self.peak = limit, 0, 0
        # Both by the storage's address: what tells of its end, and its bytes, unless it was left out.
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        """Storages that are alive and known, those left out among them."""
        return len(self._ends)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new or has another size than before.

        Raises:
            OverLimitError: this goes past the limit. The storage stays counted for as long as it lives.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ends:
            self._watch(storage)
            self._sizes[key] = 0
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.live)
        if self.limit is not None and self.live > self.limit:
            raise OverLimitError(f"{self.live} bytes are alive, and the limit is {self.limit}")

    def leave_out(self, tensor: Tensor) -> None:
        """A storage that nothing counted made was there before: it is none of the ledger's."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ends:
            self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        # torch keeps a storage's Python object for as long as the storage lives, so this tells of the storage's end.
        key = storage._cdata
        self._ends[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        del self._ends[key]
        self.live -= self._sizes.pop(key, 0)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every operator of this thread enters what it makes into a ledger.

    Args:
        ledger: may be shared with modes of other threads.
        after_operator: called after every operator, while what went in and what came out is alive.
    """

    def __init__(self, ledger: Ledger, after_operator: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._after_operator = ledger, after_operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for given in _tensors((args, kwargs)):
            self.ledger.leave_out(given)
        result = func(*args, **(kwargs or {}))
        for made in _tensors(result):
            self.ledger.add(made)
        if self._after_operator is not None:
            self._after_operator()
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
