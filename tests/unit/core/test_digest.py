"""What code names beside what it holds: results of a folder are of equal globals too."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.digest import digest_of
from tests import trainers

LIMIT, SHARES, WEIGHTS, ARGUMENTS = 0.0, {"a": 1.0}, torch.ones(3), argparse.Namespace(rate=1)


def helper(outputs: Tensor) -> Tensor:
    return outputs * SHARES["a"]


def caller(outputs: Tensor) -> Tensor:
    return helper(outputs) if len(outputs) else caller(outputs)


class Net(nn.Module):
    width = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * WEIGHTS * self.width


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        (lambda outputs: [outputs > LIMIT for _ in range(2)], (globals(), "LIMIT", 3.0)),
        (caller, (SHARES, "a", 2.0)),
        (lambda: ARGUMENTS.rate, (ARGUMENTS, "rate", 2)),
        (caller, (globals(), "helper", lambda outputs: outputs)),
        (Net(), (globals(), "WEIGHTS", torch.tensor([1.0, 1.0, 2.0]))),
        (Net(), (Net, "width", 2)),
        (lambda: trainers.blobs(3), (vars(trainers), "blobs", helper)),
    ],
)
def test_digest_changes_with_what_code_names(
    code: Callable[..., Any], changed: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stale result whose code is the same and whose globals are not."""
    before = digest_of(code)
    assert digest_of(code) == before
    place, name, value = changed
    (monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr)(place, name, value)
    assert digest_of(code) != before


def test_functions_written_in_c_differ_by_name() -> None:
    assert digest_of(math.sin) != digest_of(math.cos) and digest_of(torch.relu) != digest_of(torch.tanh)
