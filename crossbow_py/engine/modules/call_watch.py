"""What a forward pass does besides computing values: hooks on gradients, and generators that it sets."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from crossbow_py.engine.modules.code_lines import place_of_call

_HOOKS = {Tensor.register_hook.__code__, Tensor.register_post_accumulate_grad_hook.__code__}
_NODE_HOOKS = {"register_hook", "register_prehook"}
_SETTERS = {"manual_seed", "seed", "set_state"}


class CallWatch:
    """Notes what the block calls, in this thread. Python's profiler pauses meanwhile; beside others nothing is noted.

    Args:
        under_mode: whether the block runs under a dispatch mode.

    Attributes:
        hooks: file and line, in the user's code, of each hook on a gradient or on a node of the graph.
        reseeds: likewise of each call that sets torch's generator of the CPU.
    """

    def __init__(self, under_mode: bool = True) -> None:
        self._under_mode = under_mode
        self.hooks: list[str] = []
        self.reseeds: list[str] = []

    def __enter__(self) -> CallWatch:
        if self._under_mode:  # which imports this, and that takes longer while it is watched
            importlib.import_module("torch._dynamo")
        before: Any = sys.getprofile()
        self._put_back: Callable[[], None] | None = None
        if before is None or callable(before):
            self._put_back = partial(sys.setprofile, before)
        elif hasattr(before, "enable"):  # cProfile, which sys.setprofile cannot put back
            before.disable()
            self._put_back = before.enable
        if self._put_back is not None:
            sys.setprofile(self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._put_back is not None:
            sys.setprofile(None)
            self._put_back()

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code in _HOOKS:
                self.hooks.append(place_of_call(frame))
        elif event == "c_call":
            name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
            if name in _NODE_HOOKS and isinstance(owner, Node):
                self.hooks.append(place_of_call(frame))
            elif name in _SETTERS and owner is torch.default_generator:
                self.reseeds.append(place_of_call(frame))
