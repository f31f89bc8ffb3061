"""Bases in few bits: what a bank can hold trains as plain PyTorch does, anything else is refused in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossbow_py import SGD, Trainer, UserError
from crossbow_py.engine.bank.frozen_base import FrozenBase
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.schedules import Constant

DATA = torch.randn(64, 12, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


class Eight(nn.Module):
    """A linear layer of whole numbers that forward scales."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        values = torch.randint(-128, 128, (16, 12), generator=torch.Generator().manual_seed(0)).to(torch.int8)
        self.weight = nn.Parameter(values.view(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * 0.01)


class Four(Eight):
    """Two numbers a byte, which shifts of bits tell apart: nothing that a floating copy could do."""

    def __init__(self) -> None:
        super().__init__(torch.uint8)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.cat([self.weight >> 4, self.weight & 15])[:16]
        return nn.functional.linear(x, (pairs.to(x.dtype) - 8) * 0.1)


class Scaled(Tensor):
    """A parameter as torchao has them: a subclass that dequantizes in every operator."""

    @staticmethod
    def __new__(cls, whole: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        plain = pytree.tree_map(lambda own: own.whole.float() if isinstance(own, cls) else own, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class Packed(nn.Parameter):
    """A parameter as bitsandbytes has them: bytes in a class of their own, which knows how to read them."""


def with_head(first: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(16, 3))


def dynamic() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(with_head(nn.Linear(12, 16))[:2], {nn.Linear})
    return with_head(made)


def learner(make_model: Callable[[], nn.Module], executor: str, **settings: Any) -> Trainer:
    return Trainer(
        model=make_model, train_data=DATA, num_learners=1, batch_size=8, executor=executor, precision="fp32",
        optimizer=SGD(learning_rate=0.1), schedule=Constant(), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("executor", ["serial", "fused"])
@pytest.mark.parametrize("first", [Eight, Four, dynamic])
def test_whole_numbers_and_opaque_modules_train_as_a_plain_loop_does(first: Any, executor: str) -> None:
    make = first if first is dynamic else lambda: with_head(first())
    if first is dynamic and executor == "fused":
        with pytest.raises(UserError, match=r"executor=fused cannot run this model: torch.export .* executor=auto\."):
            learner(make, executor)
        return
    trainer, model = learner(make, executor), make()
    head = model[2]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    for index in range(8):
        inputs, targets = trainer.run.train_feed.batch(8 * index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    result = trainer.fit(max_rounds=8)
    torch.testing.assert_close(result.model.state_dict()["2.weight"], head.weight.detach(), rtol=1e-5, atol=1e-6)
    if first is not dynamic:
        assert torch.equal(result.model.state_dict()["0.weight"], model[0].weight)
        assert trainer.run.bank.base.row(0)["0.weight"].dtype == model[0].weight.dtype


@pytest.mark.parametrize(
    "make", [Scaled, lambda own: Packed(own, requires_grad=False)], ids=["torchao", "bitsandbytes"]
)
def test_parameters_that_only_their_class_can_read_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    def model() -> nn.Module:
        made = with_head(nn.Linear(12, 16, bias=False))
        own = make(torch.ones(16, 12, dtype=torch.int8))
        made[0].weight = own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=False)
        return made

    with pytest.raises(
        UserError, match=r"the model's 0\.weight is quantized \((Scaled|Packed)\).*load the base"
    ) as said:
        learner(model, "serial")
    assert "\n" not in str(said.value)


def test_a_base_in_bfloat16_is_there_once_in_bfloat16_where_passes_are() -> None:
    model = with_head(nn.Linear(12, 16).to(torch.bfloat16).requires_grad_(False))
    base = FrozenBase(model, None, BF16, torch.device("cpu"), channels_last=False)
    assert base.master(0)["0.weight"].data_ptr() == base.row(0)["0.weight"].data_ptr()
    assert {own.dtype for own in base.row(0).values()} == {torch.bfloat16}
    assert torch.equal(base.master(0)["0.weight"], model[0].weight)
    wide = FrozenBase(model, None, FP32, torch.device("cpu"), channels_last=False)
    assert torch.equal(wide.row(0)["0.weight"], model[0].weight.float())


def test_a_forward_that_casts_to_bfloat16_is_told_of_the_precision() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(12, 16, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.base(x.bfloat16()).to(self.head.weight.dtype))
            return out

    with pytest.raises(UserError, match="or precision=bf16, in which bfloat16 weights stay as they are"):
        learner(Casts, "serial")
