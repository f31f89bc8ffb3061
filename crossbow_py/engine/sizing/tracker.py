"""Counts tensors with torch's own `MemTracker`, which is private: a module by itself, because torch may lack it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker


class Tracker(MemTracker):
    """`MemTracker` without its statistics of every module, which take most of its time.

    Attributes:
        held: the bytes held after every operator, beyond those of `known`.
    """

    def __init__(self, *known: nn.Module | Tensor) -> None:
        super().__init__()
        self.track_external(*known)
        self.held: list[int] = []
        self._before = self._now()

    def _now(self) -> int:
        return sum(of_device["Total"] for of_device in self._curr_mem_snap.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # which depends on a cache inside fake tensors
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _update_peak_stats(self, peak_state: Any) -> None:
        self.held.append(self._now() - self._before)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...
