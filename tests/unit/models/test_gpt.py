"""The small GPT: its size, that no token sees later ones, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.models import GPT


def test_default_has_as_many_parameters_as_its_page_says() -> None:
    model = GPT().build((128,), 256)
    d, v, t = 128, 256, 128
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    assert sum(own.numel() for own in model.parameters()) == v * d + t * d + 4 * block + 2 * d == 842_496
    assert model.head.weight is model.tokens.weight


def test_scores_of_a_token_depend_on_no_later_one() -> None:
    model = GPT(depth=2, width=16, heads=2).build((10,), 7).eval()
    ids = torch.randint(7, (3, 10), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 7
    with torch.no_grad():
        one, two = model(ids), model(other)
        assert torch.equal(one[:, :6], two[:, :6]) and not torch.equal(one[:, 6:], two[:, 6:])
        torch.testing.assert_close(model(ids[:, :4]), one[:, :4])


def test_first_loss_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    model = GPT(depth=4, width=64, heads=4).build((32,), 100)
    ids = torch.randint(100, (8, 33))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(100), abs=0.1)


@pytest.mark.parametrize(
    ("options", "shape", "says"), [({}, (3, 32, 32), "choose data=text"), ({"width": 30}, (8,), "must divide")]
)
def test_shapes_that_do_not_fit_are_refused(options: dict[str, int], shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        GPT(**options).build(shape, 10)
