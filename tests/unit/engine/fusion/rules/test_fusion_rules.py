"""Every rule of fusion: single operators for three learners against three ordinary modules, values and gradients.

Each case meets its operator in all three layouts: on the raw input (shared by all learners, or a batch each), on values
`[K, ...]` (scaled by a parameter), and on values with channels together (out of a convolution or a norm).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention

from crossbow_py.engine.fusion.values import Fused, Layout, channels
from tests.unit.engine.fusion.trio import K, Trio, three_of

# As many learners as samples, and images as wide as they are high: values mixed up must not be found by their shape.
B = K
IMAGE, SEQUENCE, ROWS, VOLUME = (B, 8, 6, 6), (B, 8, 6), (B, 6), (B, 4, 4, 4, 4)


class Case(NamedTuple):
    """`operator(x, w, module)`; what it is told, and what it may do."""

    operator: Callable[[Tensor, Tensor, nn.Module], Tensor]
    x: tuple[int, ...] = IMAGE
    w: tuple[int, ...] = (1,)
    looped: bool = False  # a rule does not cover it, in one of the layouts at least
    parts: Callable[[], dict[str, nn.Module | Tensor]] = dict


def part(make: Callable[[], nn.Module], **options: Any) -> Case:
    """A module in place of an operator."""
    return Case(lambda x, w, m: m.part(x), parts=lambda: {"part": make()}, **options)


class Model(nn.Module):
    """The operator on the input in three layouts; its results as one vector."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.scale, self.w = nn.Parameter(torch.rand(case.x[1:]) + 0.5), nn.Parameter(torch.rand(case.w) + 0.5)
        channels = case.x[1]
        mix = {2: nn.BatchNorm1d, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(case.x)]
        self.mix = mix(channels) if len(case.x) == 2 else mix(channels, channels, 1)
        for name, part in case.parts().items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        raw = x.clone()
        values = [self.case.operator(arrived, self.w, self) for arrived in (raw, x * self.scale, self.mix(x))]
        return torch.cat([value.reshape(-1).to(x.dtype) for value in values])


def pairwise(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first.reshape(-1), second.reshape(-1).to(first.dtype)])


INDEX = torch.tensor([4, 0, 3, 3])
TRIANGLE = torch.ones(6, 6, dtype=torch.bool).tril()


@torch.no_grad()
def _without_gradient(x: Tensor) -> Tensor:
    mean = x.mean()
    with torch.enable_grad():
        return x / 2 + mean


CASES: dict[str, Case] = {
    # Reductions
    "max of everything": Case(lambda x, w, m: x.max()),
    "min of everything": Case(lambda x, w, m: x.min()),
    "max along a dimension": Case(lambda x, w, m: pairwise(*x.max(2))),
    "min along the channels": Case(lambda x, w, m: x.min(1, keepdim=True).values),
    "max of two": Case(lambda x, w, m: torch.max(x, x.roll(1, 0))),
    "var": Case(lambda x, w, m: x.var()),
    "std along space": Case(lambda x, w, m: x.std((2, 3))),
    "var along negative dimensions": Case(lambda x, w, m: x.var((-1, 1), unbiased=False, keepdim=True)),
    "var of everything by correction": Case(lambda x, w, m: x.var(None, correction=0)),
    "var_mean": Case(lambda x, w, m: pairwise(*torch.var_mean(x, (1, 3)))),
    "var_mean of everything": Case(lambda x, w, m: pairwise(*torch.var_mean(x)), looped=True),
    "mean of everything": Case(lambda x, w, m: x.mean()),
    "mean of nothing but one value": Case(lambda x, w, m: x.mean().mean()),
    "mean of everything by an empty list": Case(lambda x, w, m: x.mean(())),
    "sum with a format": Case(lambda x, w, m: x.sum(dtype=torch.float32)),
    "sum over the batch": Case(lambda x, w, m: x.sum(0)),
    "sum over the batch and space": Case(lambda x, w, m: x.sum((0, -1))),
    "prod along a dimension": Case(lambda x, w, m: x.prod(-1)),
    "prod of everything": Case(lambda x, w, m: (1 + x / 100).prod()),
    "logsumexp": Case(lambda x, w, m: x.logsumexp((1, 2))),
    "norm": Case(lambda x, w, m: x.norm()),
    "norm along a dimension": Case(lambda x, w, m: x.norm(dim=1, keepdim=True)),
    "amax over space": Case(lambda x, w, m: x.amax((2, 3))),
    "any and all": Case(lambda x, w, m: pairwise((x > 0).any(1).double(), (x > -1).all())),
    "softmax of one value": Case(lambda x, w, m: x.mean().softmax(-1) * x.mean(), looped=True),
    "softmax over channels": Case(lambda x, w, m: x.softmax(1)),
    "log_softmax over the batch": Case(lambda x, w, m: functional.log_softmax(x, 0)),
    "cumsum": Case(lambda x, w, m: x.cumsum(1) + x.cumsum(-1)),
    "cumprod": Case(lambda x, w, m: x.cumprod(2)),
    # Choosing
    "argmax as an index": Case(lambda x, w, m: x.gather(1, x.argmax(1, keepdim=True))),
    "argmax of everything": Case(lambda x, w, m: x.argmax(), looped=True),
    "topk": Case(lambda x, w, m: pairwise(*x.topk(2, 1))),
    "sort": Case(lambda x, w, m: pairwise(*x.sort(-1, descending=True))),
    "sort along the batch, stable": Case(lambda x, w, m: torch.sort(x, dim=0, stable=True).values),
    "gather": Case(lambda x, w, m: x.gather(-1, m.index.expand(*x.shape[:-1], 4)), parts=lambda: {"index": INDEX}),
    "index_select": Case(lambda x, w, m: x.index_select(1, torch.tensor([4, 0, 3, 3]))),
    "index_select of own indices": Case(
        lambda x, w, m: x.index_select(1, m.index), looped=True, parts=lambda: {"index": INDEX}
    ),
    "advanced index": Case(lambda x, w, m: x[:, torch.tensor([1, 0]), torch.tensor([2, 2])]),
    "advanced index of dimensions apart": Case(lambda x, w, m: x[torch.tensor([1, 0]), :, torch.tensor([[2], [1]])]),
    "advanced index of rows": Case(
        lambda x, w, m: (w * 2)[m.index] * x,
        w=(5, 6),
        x=SEQUENCE,
        parts=lambda: {"index": INDEX.repeat(2)},
    ),
    "advanced index by own values": Case(lambda x, w, m: x[torch.arange(B), x.mean((2, 3)).argmax(1)]),
    "advanced index by own values, last": Case(lambda x, w, m: x[..., x.mean((1, 2)).argmax(-1)]),
    "unbind": Case(lambda x, w, m: pairwise(x.unbind(0)[1], x.unbind(-1)[0])),
    "narrow": Case(lambda x, w, m: x.narrow(1, 2, 3)),
    "select": Case(lambda x, w, m: x[:, -1] + x[1, 0]),
    "slice": Case(lambda x, w, m: x[1:, ::2, -2:]),
    "split": Case(lambda x, w, m: x.split([3, 5], 1)[1] + x.split(5, 1)[0]),
    "masked_fill": Case(lambda x, w, m: x.masked_fill(x > 0.3, 2.0)),
    "masked_fill by a constant mask": Case(lambda x, w, m: x.masked_fill(TRIANGLE, 2.0)),
    "masked_fill by a value": Case(lambda x, w, m: x.masked_fill(x > 0.3, w.sum()), looped=True),
    "where": Case(lambda x, w, m: torch.where(x > 0, x, w), w=(8, 1, 1)),
    "where with numbers": Case(lambda x, w, m: torch.where(x > 0, 1.0, x)),
    "diagonal": Case(lambda x, w, m: x.diagonal(dim1=2, dim2=3), looped=True),
    "tril": Case(lambda x, w, m: x.tril(), looped=True),
    # Order and shape
    "roll": Case(lambda x, w, m: x.roll((1, 2), (1, -1))),
    "roll of everything": Case(lambda x, w, m: x.roll(5), looped=True),
    "flip": Case(lambda x, w, m: x.flip((0, -1))),
    "transpose": Case(lambda x, w, m: x.transpose(1, -1) * w, w=(8,)),
    "t of a matrix": Case(lambda x, w, m: x.t() @ w, x=ROWS, w=(B, 2)),
    "t of a vector": Case(lambda x, w, m: x[0].t() * w, x=ROWS, w=(6,)),
    "mT": Case(lambda x, w, m: x.mT @ w, w=(6, 2)),
    "permute": Case(lambda x, w, m: x.permute(0, -1, 2, -3) * w, w=(8,)),
    "movedim": Case(lambda x, w, m: x.movedim(1, -1) * w + x.movedim((1, 2), (-1, 0)).mean(0).unsqueeze(1), w=(8,)),
    "unsqueeze and squeeze": Case(lambda x, w, m: (x.unsqueeze(-1) * w).squeeze(1), w=(2,)),
    "view": Case(lambda x, w, m: x.reshape(-1, 2, 4, 36).flatten(2) * w, w=(144,)),
    "view as integers": Case(lambda x, w, m: x.contiguous().view(torch.int64).sign(), looped=True),
    "unflatten": Case(lambda x, w, m: x.unflatten(1, (2, 4)).sum(1)),
    "expand": Case(lambda x, w, m: x.mean(1, keepdim=True).expand(-1, 5, -1, -1) * w, w=(5, 1, 6)),
    "expand with new dimensions": Case(lambda x, w, m: w.expand(2, 3, 6) * x.mean(), w=(3, 6)),
    "expand of an input": Case(lambda x, w, m: x.expand(2, *x.shape) * w, w=(2, 1, 1, 1, 6)),
    "stack": Case(lambda x, w, m: torch.stack([x, x * 2], -1).prod(1)),
    "repeat": Case(lambda x, w, m: x.repeat(1, 2, 1, 1)),
    "repeat_interleave": Case(lambda x, w, m: x.repeat_interleave(2, 1), looped=True),
    "unfold": Case(lambda x, w, m: functional.unfold(x, (3, 2), padding=1) * w, w=(48, 1)),
    "resized with less aliasing": Case(
        lambda x, w, m: functional.interpolate(x, (4, 3), mode="bicubic", antialias=True) * w, w=(8, 1, 1)
    ),
    "channel shuffle": Case(lambda x, w, m: torch.stack(x.chunk(2, 1), 2).flatten(1, 2) * w, w=(8, 1, 1)),
    "shuffle of groups": Case(
        lambda x, w, m: m.conv(functional.channel_shuffle(x, 2)),
        looped=True,
        parts=lambda: {"conv": nn.Conv2d(8, 2, 1)},
    ),
    "pixel_shuffle": Case(lambda x, w, m: functional.pixel_shuffle(x, 2) * w, w=(12,)),
    "pixel_unshuffle": Case(lambda x, w, m: functional.pixel_unshuffle(x, 2) * w, w=(3,)),
    "pixel_shuffle of a single image": Case(
        lambda x, w, m: (
            functional.pixel_shuffle(x.transpose(0, 1)[:, 0].unsqueeze(1).expand(-1, 4, -1), 2) if x.ndim == 3 else x
        ),
        x=SEQUENCE,
        looped=True,
    ),
    # Joining
    "cat of batches": Case(lambda x, w, m: torch.cat([x, x * 2], 0)),
    "cat of channels": Case(
        lambda x, w, m: torch.cat([x, m.conv(x), m.conv(x)], 1) * w,
        w=(14, 1, 1),
        parts=lambda: {"conv": nn.Conv2d(8, 3, 1)},
    ),
    "cat of channels that only convolutions made": Case(
        lambda x, w, m: m.last(torch.cat([m.conv(x), m.conv(x.flip(2)), m.other(x)], 1)),
        parts=lambda: {"conv": nn.Conv2d(8, 3, 1), "other": nn.Conv2d(8, 2, 1), "last": nn.Conv2d(8, 3, 3)},
    ),
    "cat of the last dimension": Case(
        lambda x, w, m: torch.cat([x, m.conv(x)], -1), parts=lambda: {"conv": nn.Conv2d(8, 8, 1)}
    ),
    "cat of sequences": Case(
        lambda x, w, m: torch.cat([m.conv(x), m.conv(x * 2)], 1) * w,
        x=SEQUENCE,
        w=(6, 1),
        parts=lambda: {"conv": nn.Conv1d(8, 3, 1)},
    ),
    "cat with a token": Case(lambda x, w, m: torch.cat([w.expand(B, -1, -1), x], 1), x=SEQUENCE, w=(1, 6)),
    # Values and broadcasting
    "scale of channels": Case(lambda x, w, m: x * w, x=SEQUENCE, w=(8, 1)),
    "scale of the last dimension": Case(lambda x, w, m: x * w + 1, w=(6,)),
    "one scalar": Case(lambda x, w, m: x * w.sum()),
    "bias used raw": Case(lambda x, w, m: x + w, x=ROWS, w=(6,)),
    "shared constants": Case(lambda x, w, m: x * torch.arange(6.0, dtype=x.dtype) + torch.ones(8, 1, 1) / 2),
    "buffer": Case(lambda x, w, m: x * m.factor, parts=lambda: {"factor": torch.rand(8, 1, 1)}),
    "integer buffer": Case(lambda x, w, m: x * m.factor + m.factor, parts=lambda: {"factor": torch.arange(6)}),
    "mask in a buffer": Case(lambda x, w, m: x.masked_fill(m.mask, 0), parts=lambda: {"mask": TRIANGLE}),
    "higher rank of a parameter": Case(lambda x, w, m: (x[0, 0, 0] * w).sum((1, 2)), w=(2, 3, 1, 6)),
    "power of a number": Case(lambda x, w, m: 2**x + x**2 + x.abs() ** w),
    "clamp by tensors": Case(lambda x, w, m: x.clamp(min=w, max=w + 1), w=(8, 1, 1)),
    "comparison as a factor": Case(lambda x, w, m: (x > w) * x, w=(6,)),
    "glu": Case(lambda x, w, m: functional.glu(x, 1)),
    "logarithms and friends": Case(lambda x, w, m: (x.abs() + 1).log() + x.erf() + x.sin() + torch.lerp(x, x * 2, w)),
    "threshold": Case(lambda x, w, m: functional.threshold(x, 0.1, 20)),
    "softplus": Case(lambda x, w, m: functional.softplus(x, 2.0) + functional.mish(x) + functional.silu(x)),
    "gelu": Case(
        lambda x, w, m: functional.gelu(x) + functional.gelu(x, approximate="tanh") + functional.logsigmoid(x)
    ),
    "prelu of one": Case(lambda x, w, m: functional.prelu(x, w), w=(1,)),
    "prelu of channels": Case(lambda x, w, m: functional.prelu(x, w), w=(8,)),
    "prelu of rows": Case(lambda x, w, m: functional.prelu(x, w), x=ROWS, w=(6,)),
    "memory formats": Case(
        lambda x, w, m: (
            x.clone(memory_format=torch.channels_last).contiguous() * w + x.to(memory_format=torch.channels_last)
        )
    ),
    "formats of numbers": Case(lambda x, w, m: x.float().double() + x.to(torch.float32) + x.type_as(w).detach()),
    # In place
    "relu_": Case(
        lambda x, w, m: (x * 1).relu_() + functional.relu(m.conv(x), inplace=True),
        parts=lambda: {"conv": nn.Conv2d(8, 8, 1)},
    ),
    "relu_ on the value itself": Case(lambda x, w, m: x.relu_() + x),
    "mul_ by a scalar": Case(lambda x, w, m: (x * 1).mul_(w.sum()).add_(x, alpha=2)),
    "add_ of channels": Case(
        lambda x, w, m: (y := x * 2).add_(m.conv(x)) * y + m.conv(x).add_(x), parts=lambda: {"conv": nn.Conv2d(8, 8, 1)}
    ),
    "add_ of a wider format": Case(lambda x, w, m: (x.float().add_(x * 1e-3) * 1e6).double()),
    "sigmoid_": Case(lambda x, w, m: (x * 2).sigmoid_() * x),
    "pow_": Case(lambda x, w, m: (x * 1).pow_(2)),
    "fill_ and copy_": Case(lambda x, w, m: torch.zeros(6, dtype=x.dtype).copy_(w) * x, w=(6,), looped=True),
    "tanh_ in a loop": Case(lambda x, w, m: torch.zeros_like(x).copy_(x).tanh_(), looped=True),
    "masked_fill_": Case(lambda x, w, m: (x * 1).masked_fill_(x > 0, 0.5)),
    "index_put": Case(lambda x, w, m: (x * 1).index_put((torch.tensor([1]),), w), looped=True),
    "write after a view was read": Case(lambda x, w, m: [y := x * 1, y.flatten(1).sum() + y.add_(1).sum()][1]),
    "write through the only view": Case(lambda x, w, m: (x * 1).flatten(1).add_(w), w=(288,)),
    # Layers
    "convolution in groups": part(lambda: nn.Conv2d(8, 4, 3, groups=2)),
    "convolution dilated": part(lambda: nn.Conv2d(8, 4, 3, dilation=2)),
    "convolution same": part(lambda: nn.Conv2d(8, 4, (3, 2), padding="same")),
    "convolution valid": part(lambda: nn.Conv2d(8, 4, 3, padding="valid")),
    "convolution with padding of a kind": part(lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular")),
    "convolution transposed in groups": part(lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1)),
    "convolution of a single image": Case(
        lambda x, w, m: m.conv(x[0]), looped=True, parts=lambda: {"conv": nn.Conv2d(8, 4, 3)}
    ),
    "convolution by a constant": Case(
        lambda x, w, m: functional.conv2d(x, torch.ones(8, 1, 3, 3, dtype=x.dtype) / 9, groups=8)
    ),
    "convolution by a buffer": Case(
        lambda x, w, m: functional.conv2d(x, m.blur, groups=8), parts=lambda: {"blur": torch.rand(8, 1, 3, 3)}
    ),
    "convolution by computed filters": Case(
        lambda x, w, m: functional.conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) / w.std()),
        w=(4, 8, 3, 3),
    ),
    "convolution used twice": Case(
        lambda x, w, m: m.conv(m.conv(x).relu()), parts=lambda: {"conv": nn.Conv2d(8, 8, 3, padding=1)}
    ),
    "convolution in three dimensions": part(lambda: nn.Conv3d(4, 2, 3), x=VOLUME),
    "batch_norm of images": part(lambda: nn.BatchNorm2d(8)),
    "batch_norm of rows": part(lambda: nn.BatchNorm1d(6), x=ROWS),
    "batch_norm without statistics": part(lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False)),
    "instance_norm with statistics": part(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    "instance_norm of sequences": part(lambda: nn.InstanceNorm1d(8), x=SEQUENCE),
    "group_norm": part(lambda: nn.GroupNorm(2, 8)),
    "group_norm of rows": part(lambda: nn.GroupNorm(3, 6), x=ROWS),
    "layer_norm": part(lambda: nn.LayerNorm((6, 6))),
    "layer_norm without bias": part(lambda: nn.LayerNorm(6, bias=False)),
    "rms_norm": part(lambda: nn.RMSNorm(6)),
    "local_response_norm": Case(lambda x, w, m: functional.local_response_norm(x, 3)),
    "linear": part(lambda: nn.Linear(6, 4)),
    "linear of a vector": Case(lambda x, w, m: m.fc(x[0, 0, 0]), parts=lambda: {"fc": nn.Linear(6, 4)}),
    "linear without bias": part(lambda: nn.Linear(6, 4, bias=False), x=ROWS),
    **{
        f"cross entropy, {reduction}": Case(
            lambda x, w, m, reduction=reduction: functional.cross_entropy(
                x * w, torch.arange(len(x)) % 4, reduction=reduction, ignore_index=2, label_smoothing=0.1
            ),
            x=ROWS,
            w=(6,),
        )
        for reduction in ("none", "mean", "sum")
    },
    "cross entropy of weighted classes": Case(
        lambda x, w, m: functional.cross_entropy(x * w, torch.arange(len(x)) % 4, torch.arange(6.0, dtype=x.dtype)),
        x=ROWS,
        w=(6,),
        looped=True,
    ),
    "linear of a constant": Case(lambda x, w, m: functional.linear(x, torch.ones(2, 6, dtype=x.dtype))),
    "linear used twice": Case(lambda x, w, m: m.fc(m.fc(x).tanh()), x=ROWS, parts=lambda: {"fc": nn.Linear(6, 6)}),
    "bilinear": Case(lambda x, w, m: m.fc(x, x), x=ROWS, looped=True, parts=lambda: {"fc": nn.Bilinear(6, 6, 2)}),
    "embedding": Case(lambda x, w, m: functional.embedding((x.abs() * 9).long() % 5, w), x=ROWS, w=(5, 2)),
    "embedding with padding": Case(
        lambda x, w, m: functional.embedding((x.abs() * 9).long() % 5, w, padding_idx=1), x=ROWS, w=(5, 2)
    ),
    "embedding by frequency": Case(
        lambda x, w, m: functional.embedding((x.abs() * 9).long() % 5, w, scale_grad_by_freq=True), x=ROWS, w=(5, 2)
    ),
    "one_hot": Case(
        lambda x, w, m: functional.one_hot((x.abs() * 9).long() % 5, 5).to(w.dtype) @ w, x=ROWS, w=(5, 2), looped=True
    ),
    "matmul": Case(lambda x, w, m: x @ w, w=(6, 4)),
    "matmul of matrices": Case(lambda x, w, m: x[0, 0] @ x, w=(6, 4)),
    "matmul with a vector": Case(lambda x, w, m: x @ w, w=(6,), looped=True),
    "matmul of vectors": Case(lambda x, w, m: x[0, 0, 0] @ w, w=(6,), looped=True),
    "bmm": Case(lambda x, w, m: torch.bmm(x, x.transpose(1, 2)) * w, x=SEQUENCE, w=(8, 8)),
    "baddbmm": Case(lambda x, w, m: torch.baddbmm(w, x, x.mT, beta=2), x=SEQUENCE, w=(8, 8)),
    "addmm": Case(lambda x, w, m: torch.addmm(w, x, x.mT), x=ROWS, w=(3, 3)),
    "addmm of a vector": Case(lambda x, w, m: torch.addmm(w, x, x.mT, alpha=3), x=ROWS, w=(3,)),
    "one value": Case(lambda x, w, m: x * w.exp(), w=()),
    "embedding with a sparse gradient": Case(
        lambda x, w, m: functional.embedding((x.abs() * 9).long() % 5, w, sparse=True), x=ROWS, w=(5, 2)
    ),
    "bag of embeddings with a sparse gradient": Case(
        lambda x, w, m: functional.embedding_bag((x.abs() * 9).long() % 5, w, sparse=True),
        x=ROWS,
        w=(5, 2),
        looped=True,
    ),
    "zeros like it": Case(lambda x, w, m: torch.zeros_like(x).add_(x) + x.new_ones(6) + torch.full_like(x, 2.0)),
    "without a gradient": Case(lambda x, w, m: x * _without_gradient(x * w)),
    "einsum": Case(lambda x, w, m: torch.einsum("bchw,cd->bdhw", x, w), w=(8, 2)),
    "einsum with dots": Case(lambda x, w, m: torch.einsum("...ij,jk->...ik", x, w), w=(6, 2)),
    "einsum without a result": Case(lambda x, w, m: torch.einsum("bi,ij", x, w), x=ROWS, w=(6, 2), looped=True),
    "cosine_similarity": Case(lambda x, w, m: functional.cosine_similarity(x, w, dim=-1), w=(6,), looped=True),
    "normalize": Case(lambda x, w, m: functional.normalize(x, dim=1) * w, w=(8, 1, 1)),
    # Attention
    "attention": Case(lambda x, w, m: attention(x, x * w, x)),
    "attention of rank 3": Case(lambda x, w, m: attention(x, x * w, x), x=SEQUENCE),
    "attention of rank 2": Case(lambda x, w, m: attention(x, x * w, x), x=ROWS, looped=True),
    "attention, causal and scaled": Case(lambda x, w, m: attention(x, x * w, x, is_causal=True, scale=0.3)),
    "attention with a mask": Case(lambda x, w, m: attention(x, x * w, x, TRIANGLE)),
    "attention with a mask for samples and heads": Case(lambda x, w, m: attention(x, x * w, x, (x @ x.mT).abs() < 9)),
    "attention with a mask for samples": Case(lambda x, w, m: attention(x, x * w, x, TRIANGLE.expand(B, 1, 6, 6))),
    "attention with a bias for heads": Case(lambda x, w, m: attention(x, x, x, w), w=(8, 6, 6)),
    "attention with a bias for all": Case(lambda x, w, m: attention(x, x, x, w), w=(6, 6)),
    "attention of groups": Case(lambda x, w, m: attention(x, x[:, :2] * w, x[:, 2:4], enable_gqa=True)),
    # Pooling and resizing
    "max_pool": Case(lambda x, w, m: functional.max_pool2d(x, 3, 2, 1)),
    "max_pool with indices": Case(lambda x, w, m: pairwise(*functional.max_pool2d(x, 3, 2, 1, return_indices=True))),
    "max_pool without channels": Case(lambda x, w, m: functional.max_pool2d(x[:, 0], 3, 2, 1), looped=True),
    "avg_pool with ceil_mode": Case(
        lambda x, w, m: functional.avg_pool2d(x, 4, 4, 1, ceil_mode=True, count_include_pad=False)
    ),
    "avg_pool without channels": Case(lambda x, w, m: functional.avg_pool2d(x[:, 0], 3, 2, 1), looped=True),
    "avg_pool of sequences": Case(lambda x, w, m: functional.avg_pool1d(x, 2), x=SEQUENCE),
    "max_pool of rows": Case(lambda x, w, m: functional.max_pool1d(x, 2), x=ROWS, looped=True),
    "max_pool of volumes": Case(lambda x, w, m: functional.max_pool3d(x, 2), x=VOLUME),
    "adaptive_avg_pool": Case(lambda x, w, m: functional.adaptive_avg_pool2d(x, (4, 1))),
    "adaptive_max_pool": Case(lambda x, w, m: functional.adaptive_max_pool2d(x, (4, 1)) * w, w=(8, 1, 1)),
    "adaptive_max_pool without channels": Case(lambda x, w, m: functional.adaptive_max_pool2d(x[:, 0], 2), looped=True),
    "adaptive_max_pool of sequences": Case(lambda x, w, m: functional.adaptive_max_pool1d(x, 4), x=SEQUENCE),
    "lp_pool": Case(lambda x, w, m: functional.lp_pool2d(x, 2, 2)),
    "upsample bilinear": Case(lambda x, w, m: functional.interpolate(x, size=(9, 4), mode="bilinear")),
    "upsample bilinear, corners aligned": Case(
        lambda x, w, m: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    ),
    "upsample bicubic": Case(lambda x, w, m: functional.interpolate(x, scale_factor=1.5, mode="bicubic")),
    "upsample nearest": Case(lambda x, w, m: functional.interpolate(x, scale_factor=2) * w, w=(8, 1, 1)),
    "upsample of sequences": Case(lambda x, w, m: functional.interpolate(x, size=9, mode="linear"), x=SEQUENCE),
    "upsample of volumes": Case(lambda x, w, m: functional.interpolate(x, size=5, mode="trilinear"), x=VOLUME),
    "resize antialiased": Case(lambda x, w, m: functional.interpolate(x, size=4, mode="bilinear", antialias=True)),
    "grid_sample": Case(
        lambda x, w, m: functional.grid_sample(
            x, functional.affine_grid(w.expand(B, 2, 3), [B, 8, 4, 4], False), align_corners=False
        ),
        w=(2, 3),
        looped=True,
    ),
    "reflection pad": Case(lambda x, w, m: functional.pad(x, (1, 2, 0, 1), "reflect") * w, w=(9,)),
    "replication pad of sequences": Case(
        lambda x, w, m: functional.pad(x, (1, 2), "replicate") * w, x=SEQUENCE, w=(9,)
    ),
    "reflection pad without channels": Case(
        lambda x, w, m: functional.pad(x[:, 0], (1, 2, 0, 1), "reflect"), looped=True
    ),
    "reflection pad of rows": Case(lambda x, w, m: functional.pad(x, (1, 2), "reflect"), x=ROWS, looped=True),
    "circular pad": Case(lambda x, w, m: functional.pad(x, (1, 2, 0, 1), "circular") * w, w=(9,)),
    "constant pad": Case(lambda x, w, m: functional.pad(x, (1, -1, 0, 1), value=3.0)),
    "constant pad of channels": Case(lambda x, w, m: functional.pad(x, (0, 0, 1, 0, 2, 1)) * w, w=(11, 1, 1)),
    "constant pad of the batch": Case(lambda x, w, m: functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))),
    "constant pad of rows": Case(lambda x, w, m: functional.pad(x, (1, 0), value=1.0) * w, x=ROWS, w=(7,)),
}


# An operator of `make test` with other arguments, or on other shapes.
VARIANT = re.compile(r" (with|without|of|by|in|over|from|used) |, ")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * bool(VARIANT.search(name))) for name in CASES]
)
def test_operator_for_three_learners_equals_three_modules(name):
    case = CASES[name]
    torch.manual_seed(4)
    trio = Trio(three_of(Model(case).double(), -0.3, 0.7))
    inputs = torch.randn(K, *case.x, dtype=torch.float64)
    graph = trio.graph(inputs[0])
    trio.check(graph, inputs)
    trio.check(graph, inputs + 0.1)  # rules that did not fit are settled now
    assert bool(graph.looped) == case.looped, graph.looped
    trio.check(trio.graph(inputs[0]), inputs[0], shared=True)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_images_of_all_learners_side_by_side_lie_channels_last(num_channels):
    images = channels(Fused(torch.randn(3, 5, num_channels, 4, 4), Layout.STACK), 3)
    assert images.shape == (5, 3 * num_channels, 4, 4)
    assert images.is_contiguous(memory_format=torch.channels_last)
