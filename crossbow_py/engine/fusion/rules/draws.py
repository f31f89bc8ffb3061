"""Rules for operators that draw random numbers: from each learner's own generator, in the order of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from crossbow_py.engine.fusion.rules.registry import Call, NotFusedError, base_name, rule
from crossbow_py.engine.fusion.values import Fused, Layout, of_learner
from crossbow_py.engine.modules.dropout import take_masks

_MODULES = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")
_RATE_INDEX = {"dropout": 1, "feature_dropout": 1, "scaled_dot_product_attention": 4}  # of p among the arguments


def draws(node: Node) -> bool:
    """Return whether a node of a graph draws random numbers."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    index = _RATE_INDEX.get(base_name(target))
    if index is None:
        return True
    return bool(node.args[index] if len(node.args) > index else node.kwargs.get("dropout_p"))


def is_of_dropout_module(node: Node) -> bool:
    """Return whether a node is that of an `nn.Dropout`, which learners' own layers replace in eager mode."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return bool(modules) and str(modules[-1][1]).rsplit(".", 1)[-1].rstrip("'>") in _MODULES


@rule("dropout", "feature_dropout")
def dropout(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply each learner's own mask, the one that `CounterDropout` would take."""
    own, p, train = args
    assert call.shape is not None, "dropout gives a tensor"
    if not train or p == 0:
        return own
    whole_channels = "feature" in str(call.target)
    shape = (*call.shape[:2], *(1,) * (len(call.shape) - 2)) if whole_channels else call.shape
    rates = (call.dropout_rates[learner] for learner in call.learners)
    own_p = [p if rate is None else rate for rate in rates]
    mask = take_masks(shape, own_p, call.generators, own.tensor)
    if own.layout is Layout.CHANNELS:
        return Fused(own.tensor * call.channels(Fused(mask, Layout.STACK)), Layout.CHANNELS)
    return Fused(call.stack(own) * mask, Layout.STACK)


@rule("bernoulli")
def bernoulli(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw ones with one probability, as for drop path; the loop runs it for a tensor of probabilities."""
    own, chance = (*args, None)[:2]
    if not isinstance(chance, float | int) or kwargs.get("generator") is not None:
        raise NotFusedError
    assert call.shape is not None, "the result is a tensor"
    masks = take_masks(call.shape, [1 - chance] * call.num_learners, call.generators, own.tensor)
    return Fused((masks != 0).to(masks.dtype), Layout.STACK)


@rule("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
def new_tensor(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make one tensor for all learners, until it is written to."""
    return Fused(call.target(*of_learner(args, 0, call.num_learners), **kwargs), Layout.SHARED)
