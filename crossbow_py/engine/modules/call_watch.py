"""A watch on what a forward pass does besides computing values: hooks on gradients, and generators that it seeds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from crossbow_py.engine.modules.code_lines import line_of_call

_HOOKS = {Tensor.register_hook.__code__, Tensor.register_post_accumulate_grad_hook.__code__}
_NODE_HOOKS = {"register_hook", "register_prehook"}
_SETTERS = {"manual_seed", "seed", "set_state"}


class CallWatch:
    """Notes what the block calls in this thread.

    It takes the place of Python's profiler, which pauses meanwhile; beside other profilers it notes nothing.

    Attributes:
        hooks: the file and line, in the user's code, of each hook on a gradient or on a node of the autograd graph.
        reseeds: the file and line of each call that seeds torch's CPU generator.
    """

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.reseeds: list[str] = []

    def __enter__(self) -> CallWatch:
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
                self.hooks.append(line_of_call(frame))
        elif event == "c_call":
            name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
            if name in _NODE_HOOKS and isinstance(owner, Node):
                self.hooks.append(line_of_call(frame))
            elif name in _SETTERS and owner is torch.default_generator:
                self.reseeds.append(line_of_call(frame))
