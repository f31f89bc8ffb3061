"""A small GPT (Radford et al. 2019): a decoder of pre-norm transformer blocks over token ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting
from crossbow_py.models.base import ModelSettings

_DEVIATION = 0.02  # of initial weights, as GPT-2's


@dataclass(frozen=True)
class GPT(ModelSettings):
    """Language model on token ids `[B, T]`. With the defaults and 256 tokens it has 0.84 million parameters."""

    NAME = "gpt"

    depth: int = setting(4, "transformer blocks", minimum=1)
    width: int = setting(128, "values of a token between blocks", minimum=1)
    heads: int = setting(4, "attention heads; they divide the width", minimum=1)
    dropout: float = setting(0.0, "share of values dropped while training", minimum=0, below=1)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if len(input_shape) != 1:
            found = f"samples of shape {input_shape}"
            raise UserError(f"model=gpt needs samples of token ids [T], got {found}; choose data=text.")
        if self.width % self.heads:
            rule = f"model.heads must divide model.width={self.width}, got {self.heads}"
            raise UserError(f"{rule}; choose another number of heads.")
        return Decoder(input_shape[0], num_classes, self.depth, self.width, self.heads, self.dropout)


class Decoder(nn.Module):
    """Scores `[B, T, V]` of the token behind each of `[B, T]`, for T of at most `context`. The embedding is tied."""

    def __init__(self, context: int, num_tokens: int, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # each adds to what goes through, so that the sum stays as large
            for last in (block.attention.out, block.mlp[2]):  # type: ignore[union-attr,index]
                assert isinstance(last, nn.Linear), "blocks end so"
                nn.init.normal_(last.weight, std=_DEVIATION / math.sqrt(2 * depth))
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Block(nn.Module):
    """Attention, then a perceptron, each of normalised values and added to them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        result: Tensor = hidden + self.mlp(self.second(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        size, length, width = hidden.shape
        each = self.inputs(hidden).view(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = each.unbind()
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.dropout(self.out(found.transpose(1, 2).reshape(size, length, width)))
        return result


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
