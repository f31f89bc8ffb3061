"""An optimizer of torch over one learner's row, which keeps its state itself, of whatever form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossbow_py.engine.bank.layout import DECAYED, Block, GroupSettings

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # from groups of parameters


class RowOptimizer:
    """Steps a row's parameters, views of their own shapes, in place.

    Args:
        make: makes the optimizer.
        blocks: those that are trained.
        weights, gradients: the row's views by name.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        blocks: Sequence[Block],
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._make, self._weights = make, weights
        self._parameters: dict[str, nn.Parameter] = {}
        self._groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for block in blocks:
            own = nn.Parameter(weights[block.name].new_empty(0))
            own.data = weights[block.name]  # an nn.Parameter built on a view would share its version counter
            own.grad = gradients[block.name]
            self._parameters[block.name] = own
            self._groups.setdefault((block.group, block.kind in DECAYED), []).append(own)
        self.reset()

    def reset(self) -> None:
        """Begin without state."""
        self._optimizer = self._make([{"params": own} for own in self._groups.values()])

    @torch.no_grad()
    def step(self, settings: GroupSettings) -> None:
        """Take a step with these settings of each group of parameters, and of those that are decayed in it."""
        for (number, decays), group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group.update(settings(number, decays))
        self._optimizer.step()
        for name, own in self._parameters.items():
            if own.data_ptr() != self._weights[name].data_ptr():  # it has replaced p.data
                self._weights[name].copy_(own)
                own.data = self._weights[name]

    def state(self) -> dict[str, Any]:
        """Return a copy of the state, by the names of parameters: tensors on the host and plain types."""
        kept = self._optimizer.state
        return {
            "state": {name: _copied(dict(kept[own])) for name, own in self._parameters.items() if own in kept},
            "groups": [
                _copied({key: value for key, value in own.items() if key != "params"})
                for own in self._optimizer.param_groups
            ],
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Restore what `state` has returned, or begin without it."""
        self.reset()
        if saved is None:
            return
        for own, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            own.update(_copied(values))
        for name, values in saved["state"].items():
            self._optimizer.state[self._parameters[name]] = _copied(values, self._weights[name].device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state, in an order that follows from its form."""
        kept = (self._optimizer.state.get(own, {}) for own in self._parameters.values())
        return [leaf for values in kept for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _copied(values: Any, device: torch.device | None = None) -> Any:
    """Return a copy, on the host or with what is no single number on a device: torch keeps counts on the host."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to("cpu" if device is None or leaf.ndim == 0 else device, copy=True)

    return pytree.tree_map(copied, values)
