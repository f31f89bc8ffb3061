"""Where a parameter lives: one allocation, blocks aligned to 128 bytes and ordered decayed | undecayed | frozen.

The same layout serves the bank (rows = capacity) and flat vectors such as z (rows = 1), in one of two orders:

    blocks   parameter by parameter, `[rows, numel]` each: a prefix of K rows, viewed as `[K·O, I, H, W]`, is one
             channels-last grouped-convolution weight without a copy. For devices that run learners in one operator.
    rows     learner by learner, `[P]` each: what one learner does to its row is a few operators over two vectors
             instead of a few for every parameter. For CPUs, where a call costs as much as 10,000 values, and where
             threads hand the interpreter lock around with every call. Cutting rows into pieces that fit a core's cache
             lost by that: LeNet, K = 2, batch size 16, 1,195 images/s against 1,510 uncut.

4-D weights are channels-last inside their block in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 128
ALIGNMENT_VALUES = 64  # 128 bytes of bfloat16; one number for all formats, so that rows of any two line up
Order = Literal["blocks", "rows"]
Kind = Literal["decayed", "undecayed", "frozen"]
_ORDER: tuple[Kind, ...] = ("decayed", "undecayed", "frozen")
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True)
class Block:
    """One parameter or buffer: its name in the module, shape `[*shape]`, number of values, and place in the order."""

    name: str
    shape: tuple[int, ...]
    numel: int
    kind: Kind


@dataclass(frozen=True)
class Layout:
    """An order of blocks. Offsets follow from the number of rows, so bank and flat vectors share one description."""

    blocks: tuple[Block, ...]
    channels_last: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Block names, in order."""
        return tuple(block.name for block in self.blocks)

    @property
    def num_values(self) -> int:
        """P: values of one replica, padding not counted."""
        return sum(block.numel for block in self.blocks)

    def count(self, *kinds: Kind) -> int:
        """How many blocks are of these kinds."""
        return sum(block.kind in kinds for block in self.blocks)


class Rows:
    """A buffer of `rows` replicas of a layout: one tensor, and views by row, by name and stacked.

    Args:
        layout: the blocks.
        rows: number of rows; 1 makes a flat vector.
        dtype, device: of the storage.
        order: of the storage, see the module's first lines.
    """

    def __init__(
        self, layout: Layout, rows: int, dtype: torch.dtype, device: torch.device, order: Order = "blocks"
    ) -> None:
        self.layout, self.num_rows, self.order = layout, rows, order
        repeat = rows if order == "blocks" else 1
        self._bases: list[int] = []
        self._row_length = 0
        for block in layout.blocks:
            self._bases.append(self._row_length)
            self._row_length += -(-repeat * block.numel // ALIGNMENT_VALUES) * ALIGNMENT_VALUES
        self.storage = _aligned_zeros(self._row_length * (rows if order == "rows" else 1), dtype, device)
        self._rows = [self._flat_views(row) for row in range(rows)]
        self._trained = [self._trained_views(row) for row in range(rows)]

    def _flat_views(self, row: int) -> list[Tensor]:
        views = []
        for base, block in zip(self._bases, self.layout.blocks, strict=True):
            start = base + row * (block.numel if self.order == "blocks" else self._row_length)
            views.append(self.storage[start : start + block.numel])
        return views

    def _trained_views(self, row: int) -> list[Tensor]:
        if self.order == "blocks":
            return self._rows[row][: self.layout.count("decayed", "undecayed")]
        return self._parts(self.storage[row * self._row_length : (row + 1) * self._row_length])

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """The trained values of a storage, apart by whether they take weight decay."""
        num_trained, num_decayed = self.layout.count("decayed", "undecayed"), self.layout.count("decayed")
        ends = [*self._bases, self._row_length]
        parts = (whole[: ends[num_decayed]], whole[ends[num_decayed] : ends[num_trained]])
        return [part for part in parts if len(part)]

    def flat(self, row: int = 0) -> list[Tensor]:
        """Views `[numel]` of a row, one a block, in layout order."""
        return self._rows[row]

    def trained(self, row: int = 0) -> list[Tensor]:
        """The trained part of a row, as few vectors as the order allows; padding, always zero, may be in them.

        Those of all buffers of one layout and order match. The first `num_decayed` take weight decay.
        """
        return self._trained[row]

    @property
    def offsets(self) -> list[int]:
        """Where each block begins in the storage; in `blocks` its rows follow one another."""
        return self._bases

    def end_to_end(self) -> list[Tensor]:
        """The trained part of all rows in `blocks`, padding included: what takes weight decay, and what does not."""
        assert self.order == "blocks", "rows of the other order are not apart by weight decay"
        return self._parts(self.storage)

    def whole(self) -> Tensor:
        """The trained part of a flat vector (one row) in one piece, padding included."""
        assert self.num_rows == 1, "only a single row lies in one piece whatever the order"
        num_trained = self.layout.count("decayed", "undecayed")
        return self.storage[: [*self._bases, self._row_length][num_trained]]

    @property
    def num_decayed(self) -> int:
        """How many vectors of `trained`, from the first, take weight decay."""
        decayed = self.layout.count("decayed")
        return decayed if self.order == "blocks" else min(decayed, 1)

    def shaped(self, row: int = 0) -> dict[str, Tensor]:
        """Views `[*shape]` of a row by name; 4-D ones are channels-last in memory."""
        return {
            block.name: self._shape(view, (), block)
            for block, view in zip(self.layout.blocks, self._rows[row], strict=True)
        }

    def stacked(self, num_rows: int, first: int = 0) -> dict[str, Tensor]:
        """Views `[K, *shape]` of `num_rows` rows from the `first` by name; in `blocks` contiguous along K."""
        views = {}
        for base, block in zip(self._bases, self.layout.blocks, strict=True):
            stride = block.numel if self.order == "blocks" else self._row_length
            begin = self.storage.storage_offset() + base + first * stride
            rows = self.storage.as_strided((num_rows, block.numel), (stride, 1), begin)
            views[block.name] = self._shape(rows, (num_rows,), block)
        return views

    def _shape(self, view: Tensor, lead: tuple[int, ...], block: Block) -> Tensor:
        if self.layout.channels_last and len(block.shape) == 4:
            out, channels, height, width = block.shape
            k = len(lead)
            return view.view(*lead, out, height, width, channels).movedim(-1, k + 1)
        return view.view((*lead, *block.shape))  # a tuple: a single value has no sizes

    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        """Copy tensors by name into a row; names the layout does not know are ignored.

        Raises ValueError for a tensor of another shape.
        """
        for name, view in self.shaped(row).items():
            if values[name].shape != view.shape:
                raise ValueError(f"{name} is of the shape {list(values[name].shape)} instead of {list(view.shape)}")
            view.copy_(values[name].detach())

    def copy_row(self, row: int, source: Rows, source_row: int = 0) -> None:
        """row ← source's row."""
        torch._foreach_copy_(self.flat(row), source.flat(source_row))

    def zero_row(self, row: int) -> None:
        """Set a row to zero."""
        torch._foreach_zero_(self.flat(row))


@dataclass(frozen=True, eq=False)
class TrainedRow:
    """The trained part of one learner's row in every buffer: lists of vectors, side by side.

    The first `num_decayed` of each list take weight decay. `shadow` is None where models run on the weights themselves.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    corrections: list[Tensor]
    state: dict[str, list[Tensor]]
    z: list[Tensor]
    shadow: list[Tensor] | None
    num_decayed: int


def _aligned_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose first byte is on the alignment: allocators on CPU promise 64 bytes only."""
    storage = torch.zeros(count + ALIGNMENT_VALUES, dtype=dtype, device=device)
    start = -storage.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return storage[start : start + count]


def parameter_layout(module: nn.Module, channels_last: bool) -> Layout:
    """The layout of a module's parameters; tied parameters are stored once, under their first name."""
    norm_parameters = {id(p) for m in module.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}

    def kind(parameter: nn.Parameter) -> Kind:
        if not parameter.requires_grad:
            return "frozen"
        return "undecayed" if parameter.ndim < 2 or id(parameter) in norm_parameters else "decayed"

    blocks = [Block(name, tuple(p.shape), p.numel(), kind(p)) for name, p in module.named_parameters()]
    return Layout(tuple(sorted(blocks, key=lambda block: _ORDER.index(block.kind))), channels_last)


def buffer_layout(module: nn.Module) -> Layout:
    """The layout of a module's floating-point buffers (BatchNorm running statistics and the like)."""
    blocks: Sequence[Block] = [
        Block(name, tuple(b.shape), b.numel(), "frozen")
        for name, b in module.named_buffers()
        if b.is_floating_point()
    ]
    return Layout(tuple(blocks), channels_last=False)


def copy_present(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their views, but for those that are there already; a missing one is zero.

    Those of `nn.Embedding(sparse=True)` are sparse, and become dense.
    """
    gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not view]
    present = [(view, gradient) for view, gradient in pairs if gradient is not None]
    if present:
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
    for view, gradient in pairs:
        if gradient is None:
            view.zero_()


def clone_all(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host."""
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
