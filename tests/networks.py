"""Networks of many kinds, small, for tests of executors. Each is a class without arguments; INPUTS are their shapes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

NUM_CLASSES = 3


class Net(nn.Module):
    """Two linear layers for `blobs`, which models of odd habits are made of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def net(forward=Net.forward, **parts):
    """Return the class of a `Net` with a forward of its own, and further attributes that are made with it."""

    class Own(Net):
        def __init__(self):
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

    Own.forward = forward
    return Own


class LstmClassifier(nn.Module):
    """Its projection has no rule of fusion."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 7, batch_first=True, proj_size=5)
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Transformer(nn.Module):
    """Learned positions, masked attention, GELU, layer norms, a block written by hand."""

    def __init__(self, width=8, heads=2, length=7):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Parameter(torch.randn(length, width) / 10)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.heads, self.head = heads, nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x).mean(1))


class HandAttention(nn.Module):
    """Attention by softmax and products, with a constant mask."""

    def __init__(self, width=6):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("mask", torch.full((7, 7), float("-inf")).triu(1), persistent=False)
        self.head = nn.Linear(7 * width, NUM_CLASSES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 6**0.5 + self.mask
        return self.head((scores.softmax(-1) @ self.v(x)).flatten(1))


class DepthwiseSeparable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Hardswish(),
            nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU6(),
            nn.Conv2d(6, 8, 1, bias=False),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Dropout2d(0.2),
        )
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.layers(x).amax((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        gate = self.up(functional.relu(self.down(functional.adaptive_avg_pool2d(x, 1)))).sigmoid()
        spatial = x.mean(1, keepdim=True).tanh()
        return self.head((x * gate + x * spatial).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution and by interpolation, with concatenations."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(14, 5, 3, padding=1)
        self.norm, self.head = nn.InstanceNorm2d(5, affine=True), nn.Linear(5, NUM_CLASSES)

    def forward(self, x):
        skip = functional.leaky_relu(self.first(functional.pad(x, (1, 1, 1, 1))))
        low = functional.elu(self.down(skip))
        wide = functional.interpolate(low, scale_factor=2, mode="nearest")
        joined = torch.cat([skip, self.up(low), wide], dim=1)
        left, right = self.norm(self.last(joined)).chunk(2, dim=3)
        return self.head((left + right.flip(3)).mean((-2, -1)))


class Conv3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(inplace=True), nn.MaxPool3d(2), nn.Flatten()
        )
        self.head = nn.Linear(4 * 2 * 3 * 3, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


class Conv1d(nn.Module):
    """Sequences: 1-D convolutions, plain and transposed, BatchNorm of [B, C, L] and of [B, C]."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm1 = nn.Conv1d(3, 6, 3, dilation=2), nn.BatchNorm1d(6)
        self.up, self.norm2 = nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x):
        x = functional.max_pool1d(torch.tanh(self.norm1(self.conv(x))), 2)
        x = self.up(x)
        return self.head(self.norm2(x.sum(-1) + x.max(-1).values))


class Shapes(nn.Module):
    """Changes of shape, and reductions without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(4, 1)), nn.Linear(12, NUM_CLASSES)

    def forward(self, x):
        x = x.flatten(1)[:, :24].reshape(-1, 4, 6) * self.scale
        first, second = x.split(3, dim=-1)
        x = torch.stack([first, second], dim=1).sum(1) - x.mean() + x.std(dim=(1, 2), keepdim=True)
        x = torch.where(x > 0, x, x.abs() / 2).clamp(max=3.0)
        return self.head(x.permute(0, 2, 1).unsqueeze(1).squeeze(1).flatten(1).log_softmax(-1))


class Tied(nn.Module):
    """One weight under two names, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES)
        self.second.weight = self.first.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.second(functional.relu(self.first(x))))


IMAGE, TOKENS = (3, 8, 8), (7,)
NETWORKS = {
    LstmClassifier: TOKENS,
    Transformer: TOKENS,
    HandAttention: TOKENS,
    DepthwiseSeparable: IMAGE,
    SqueezeExcite: IMAGE,
    UNet: IMAGE,
    Conv3d: (1, 4, 6, 6),
    Conv1d: (3, 16),
    Shapes: IMAGE,
    Tied: (8,),
}


def inputs_for(network, num_samples=48):
    """Random inputs and targets, always the same."""
    generator = torch.Generator().manual_seed(3)
    shape = NETWORKS[network]
    if shape == TOKENS:
        inputs = torch.randint(0, 11, (num_samples, *shape), generator=generator)
    else:
        inputs = torch.randn((num_samples, *shape), generator=generator)
    return inputs, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
