"""Learners' models as `torch.compile` makes them: fewer and larger operators, also in CUDA graphs captured afterwards.

Compiled once for all learners, as they differ in nothing but their tensors; whoever runs first compiles, which takes up
to minutes, and later runs find most of it in torch's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from crossbow_py.errors import UserError, one_line

_COMPILERS = ("torch._dynamo", "torch._inductor")  # where their errors are defined

Model = Callable[[Tensor], Tensor]


class CompiledModels:
    """Compiled modules by learner. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Model]] = {}
        self._lock = threading.Lock()
        self._has_run = False

    def __call__(self, module: nn.Module, learner: int) -> Model:
        """The learner's module, compiled; another one than before, as after growth, anew."""
        own, compiled = self._known.get(learner, (None, None))
        if own is not module or compiled is None:
            compiled = self._guarded(torch.compile(module, dynamic=False))
            self._known[learner] = module, compiled
        return compiled

    def _guarded(self, compiled: Model) -> Model:
        """One at a time until the first has run; then side by side. Failure of the compiler is the user's to know."""

        def run(inputs: Tensor) -> Tensor:
            if self._has_run:
                return compiled(inputs)
            with self._lock:
                try:
                    outputs = compiled(inputs)
                except Exception as error:
                    if not type(error).__module__.startswith(_COMPILERS):
                        raise
                    raise UserError(
                        f"compile_model=true failed ({one_line(error)[:200]}); install a C++ compiler if there is "
                        "none, or set compile_model=false."
                    ) from error
                self._has_run = True
                return outputs

        return run
