"""Learners' models compiled by `torch.compile`: fewer and larger operators, also in CUDA graphs captured afterwards.

Models are compiled once for all learners, which differ only in their tensors. The first learner that runs compiles,
which takes up to minutes; later runs find most of it in torch's cache. The first result is compared with the module's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.host_randomness import kept_torch_state
from crossbow_py.engine.modules.dropout import CounterDropout
from crossbow_py.engine.trust.compare import furthest, gradients_of, kept_buffers, moved_weights, projection

_COMPILERS = ("torch._dynamo", "torch._inductor")  # where their errors are defined

Model = Callable[[Tensor], Tensor]


class CompiledModels:
    """Compiled modules by learner. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Model]] = {}
        self._lock = threading.Lock()
        self._has_run = False

    def __call__(self, module: nn.Module, learner: int) -> Model:
        """Return the learner's module, compiled; compiles again if it is not the module it was."""
        own, compiled = self._known.get(learner, (None, None))
        if own is not module or compiled is None:
            compiled = self._guarded(torch.compile(module, dynamic=False), module)
            self._known[learner] = module, compiled
        return compiled

    def _guarded(self, compiled: Model, module: nn.Module) -> Model:
        """Return the compiled model with a lock until the first run is over, and UserError if the compiler fails."""

        def run(inputs: Tensor) -> Tensor:
            if self._has_run:
                return compiled(inputs)
            with self._lock:
                try:
                    if not self._has_run:
                        _check(compiled, module, inputs)
                    outputs = compiled(inputs)
                except UserError:
                    raise
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


def _check(compiled: Model, module: nn.Module, inputs: Tensor) -> None:
    """Raise UserError unless compiled code gives the module's outputs, gradients and buffers on these inputs."""
    trained = {name: own for name, own in module.named_parameters() if own.requires_grad}
    generators = {id(each.generator): each.generator for each in module.modules() if isinstance(each, CounterDropout)}
    states = [(generator, generator.get_state()) for generator in generators.values()]

    def values(model: Model) -> dict[str, Tensor]:
        for generator, state in states:
            generator.set_state(state)
        with kept_buffers(module), kept_torch_state(inputs.device):
            outputs = model(inputs)
            found = gradients_of(projection(outputs), module, list(trained))
            return {"the output": outputs.detach().clone(), **found}

    def control() -> dict[str, Tensor]:
        with moved_weights(list(trained.values()), expected["the output"].dtype):
            return values(module)

    expected = values(module)
    found = furthest(values(compiled), expected, control, expected["the output"].dtype)
    for generator, state in states:
        generator.set_state(state)
    if found is not None:
        raise UserError(
            f"compile_model=true gives other numbers than the model itself ({found}), as compiled code does for random "
            "numbers that the model draws outside nn.Dropout; set compile_model=false."
        )
