"""A model as a run begins with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from crossbow_py.errors import UserError
from crossbow_py.weights_file import load_weights

MakeModel = Callable[[], nn.Module]


def seeded_model(make_model: MakeModel, seed: int, init_from: str | None) -> nn.Module:
    """A model whose initialisation follows from the seed alone; torch's generators stay as they were.

    Raises UserError when what it makes is no module with something to train, or one without shapes as yet.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise UserError(
            f"model must be a function that returns an nn.Module, got {type(make_model).__name__}; "
            "give the class itself or a lambda."
        )
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        module = make_model()
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model must be a function that returns an nn.Module, got {type(module).__name__} from it; "
            "have it return the model."
        )
    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(value):
            raise UserError(
                f"the model's {name} has no shape yet, as a lazy module gets one from its first batch; run the model "
                "on one where it is made, before it is returned: model(torch.zeros(2, ...))."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("the model has no parameter to train; give it some, or set requires_grad.")
    if init_from is not None:
        load_weights(module, init_from)
    return module
