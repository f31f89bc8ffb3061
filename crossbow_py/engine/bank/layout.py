"""The memory layout of trained parameters, in one allocation of aligned blocks: matrices | decayed | undecayed.

Those of one kind are ordered by the group of parameters that the optimizer has them in. Frozen parameters are not
here, but in `engine/bank/frozen_base.py`.

Blocks are aligned to 128 bytes. *Matrices* are the weights that an optimizer takes as such (Muon); others have none.

The bank (rows = capacity) and flat vectors such as z (rows = 1) have the same layout, in one of two orders:

    blocks   parameter by parameter, `[rows, numel]` each: the first K rows, viewed as `[K·O, I, H, W]`, are one
             channels-last grouped-convolution weight without a copy. For devices that run learners in one operator.
    rows     learner by learner, `[P]` each: a learner's update of its row is a few operators on two vectors instead of
             a few for every parameter. For CPUs, where a call costs as much as 10,000 values, and where threads pass
             the interpreter lock around with every call. Cutting rows into pieces that fit a core's cache was slower
             for that reason: LeNet, K = 2, batch size 16, 1,195 images/s against 1,510 uncut.

4-D weights are channels-last inside their block in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 128
ALIGNMENT_VALUES = 64  # 128 bytes of bfloat16; the same for all dtypes, so that their rows line up
Order = Literal["blocks", "rows"]
GroupSettings = Callable[[int, bool], Mapping[str, float]]
Kind = Literal["matrix", "decayed", "undecayed"]
_ORDER: tuple[Kind, ...] = ("matrix", "decayed", "undecayed")
DECAYED = _ORDER[:2]
_CHECKED_AT_ONCE = 2**20  # values a chunk in `checksum`, so that their integer copies take little memory
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Block:
    """A parameter or buffer: its name in the module, shape `[*shape]`, number of values, and kind, which orders it.

    `group` is the number of its group of parameters, of the optimizer's, or 0; it orders those of one kind.
    An attention's one weight for queries, keys and values is three matrices, one below the other.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    kind: Kind
    num_matrices: int = 1
    group: int = 0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of each of its matrices."""
        return self.shape[0] // self.num_matrices, self.numel // self.shape[0]


@dataclass(frozen=True)
class Layout:
    """The blocks in order. It knows no number of rows, so that a bank and flat vectors share one layout."""

    blocks: tuple[Block, ...]
    channels_last: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in order."""
        return tuple(block.name for block in self.blocks)

    @property
    def num_values(self) -> int:
        """P, the number of values of one replica without padding."""
        return sum(block.numel for block in self.blocks)

    def count(self, *kinds: Kind) -> int:
        """Return the number of blocks of these kinds."""
        return sum(block.kind in kinds for block in self.blocks)

    @property
    def sections(self) -> tuple[range, ...]:
        """The blocks in sections of one kind and group."""
        every = range(len(self.blocks))
        found = itertools.groupby(every, lambda index: (self.blocks[index].kind, self.blocks[index].group))
        return tuple(range(own[0], own[-1] + 1) for own in (list(each) for _, each in found))


class Rows:
    """One tensor that holds `rows` replicas of a layout, and views of it by row, by name and stacked.

    Args:
        layout: the blocks.
        rows: the number of rows; 1 makes a flat vector.
        dtype, device: those of the tensor.
        order: the order of rows and blocks in memory, see the module's docstring.
        alike: whether all rows are one, the same memory.

    Attributes:
        offsets: the offset of each block in the storage; in `blocks` its rows follow one another.
        num_loads: how often `load` has written a row.
    """

    def __init__(
        self,
        layout: Layout,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        order: Order = "blocks",
        alike: bool = False,
    ) -> None:
        self.layout, self.num_rows, self.order, self.alike, self.num_loads = layout, rows, order, alike, 0
        aliases, rows = (rows, min(rows, 1)) if alike else (1, rows)
        repeat = rows if order == "blocks" else 1
        self.offsets: list[int] = []
        self._row_length = 0
        for block in layout.blocks:
            self.offsets.append(self._row_length)
            self._row_length += -(-repeat * block.numel // ALIGNMENT_VALUES) * ALIGNMENT_VALUES
        # The storage begins at a multiple of 128 bytes: CPU allocators guarantee only 64.
        count = self._row_length * (rows if order == "rows" else 1)
        whole = torch.zeros(count + ALIGNMENT_VALUES, dtype=dtype, device=device)
        start = -whole.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
        self.storage = whole[start : start + count]
        self._rows: list[list[Tensor]] = []
        for row in range(rows):
            starts = [
                base + row * (block.numel if order == "blocks" else self._row_length)
                for base, block in zip(self.offsets, layout.blocks, strict=True)
            ]
            views = [self.storage[at : at + own.numel] for at, own in zip(starts, layout.blocks, strict=True)]
            self._rows.append(views)
        self._rows = self._rows * aliases
        if order == "blocks":
            self._trained = self._rows
        else:
            length = self._row_length
            pieces = [self._pieces(self.storage[row * length : (row + 1) * length]) for row in range(rows)]
            self._trained = pieces * aliases

    def _pieces(self, whole: Tensor) -> list[Tensor]:
        """Return the values of a storage in a piece for each kind and group."""
        starts = [*self.offsets, self._row_length]
        return [whole[starts[own.start] : starts[own.stop]] for own in self.layout.sections]

    def flat(self, row: int = 0) -> list[Tensor]:
        """Return views `[numel]` of a row, one for each block, in layout order."""
        return self._rows[row]

    def trained(self, row: int = 0) -> list[Tensor]:
        """Return the values of a row in as few vectors as the order allows.

        The vectors of all `Rows` with one layout and order match. They may include padding, which is always zero. The
        first `num_decayed` take weight decay.
        """
        return self._trained[row]

    def end_to_end(self) -> list[Tensor]:
        """Return the values of all rows, with padding, in a piece for each kind and group."""
        assert self.order == "blocks", "order=rows does not separate values by kind"
        return self._pieces(self.storage)

    def whole(self) -> Tensor:
        """Return the values of a flat vector (one row), with padding, as one view."""
        assert self.num_rows == 1, "only a single row is contiguous in either order"
        return self.storage

    @property
    def num_decayed(self) -> int:
        """The number of vectors of `trained`, from the first, that take weight decay."""
        return self._num_vectors(*DECAYED)

    @property
    def num_matrices(self) -> int:
        """The number of vectors of `trained`, from the first, that hold matrices."""
        return self._num_vectors("matrix")

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups of parameters that the vectors of `trained` are of."""
        return tuple(block.group for block in self._firsts)

    @property
    def _firsts(self) -> list[Block]:
        """The first block of each vector of `trained`."""
        blocks = self.layout.blocks
        if self.order == "blocks":
            return list(blocks)
        return [blocks[own.start] for own in self.layout.sections]

    def _num_vectors(self, *kinds: Kind) -> int:
        return sum(block.kind in kinds for block in self._firsts)

    def matrices(self) -> tuple[Matrix, ...]:
        """Return where the matrices are in the vectors of `trained`."""
        found: list[Matrix] = []
        num_blocks = range(self.layout.count("matrix"))
        sections = [range(i, i + 1) for i in num_blocks] if self.order == "blocks" else self.layout.sections
        for vector, section in enumerate(sections):
            for index in section if section.start in num_blocks else ():
                block, begin = self.layout.blocks[index], self.offsets[index] - self.offsets[section.start]
                length = block.numel // block.num_matrices
                found += [Matrix(vector, begin + n * length, *block.matrix_shape) for n in range(block.num_matrices)]
        return tuple(found)

    def shaped(self, row: int = 0) -> dict[str, Tensor]:
        """Return views `[*shape]` of a row by name; 4-D ones are channels-last in memory."""
        return {
            block.name: self._shape(view, (), block)
            for block, view in zip(self.layout.blocks, self._rows[row], strict=True)
        }

    def stacked(self, num_rows: int, first: int = 0) -> dict[str, Tensor]:
        """Return views `[K, *shape]` by name of K = `num_rows` rows from `first` on; in `blocks` contiguous along K."""
        views = {}
        for base, block in zip(self.offsets, self.layout.blocks, strict=True):
            stride = 0 if self.alike else block.numel if self.order == "blocks" else self._row_length
            begin = self.storage.storage_offset() + base + first * stride
            rows = self.storage.as_strided((num_rows, block.numel), (stride, 1), begin)
            views[block.name] = self._shape(rows, (num_rows,), block)
        return views

    def _shape(self, view: Tensor, lead: tuple[int, ...], block: Block) -> Tensor:
        if self.layout.channels_last and len(block.shape) == 4:
            out, channels, height, width = block.shape
            k = len(lead)
            return view.view(*lead, out, height, width, channels).movedim(-1, k + 1)
        return view.view((*lead, *block.shape))  # as a tuple, because a scalar has no sizes to unpack

    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        """Copy tensors by name to a row, and ignore names that the layout does not have.

        Raises ValueError for a tensor of another shape.
        """
        self.num_loads += 1
        for name, view in self.shaped(row).items():
            if values[name].shape != view.shape:
                raise ValueError(f"{name} is of the shape {list(values[name].shape)} instead of {list(view.shape)}")
            view.copy_(values[name].detach())

    def copy_row(self, row: int, source: Rows, source_row: int = 0) -> None:
        """Copy a row of another `Rows` with the same layout."""
        if self.layout.blocks and not (source is self and self.alike):
            torch._foreach_copy_(self.flat(row), source.flat(source_row))

    def zero_row(self, row: int) -> None:
        """Set a row to zero."""
        if self.layout.blocks:
            torch._foreach_zero_(self.flat(row))


class OwnRows:
    """Rows for learners that have one in the bank, for what takes a row of each: copies of weights, and gradients.

    Args:
        row: the weights `[*shape]` by name, each dense in memory.
        num_rows: K.
        dtype: that of gradients.

    Attributes:
        weights, gradients: `[K, *shape]` by name, each row in the memory order of the weight.
    """

    def __init__(self, row: Mapping[str, Tensor], num_rows: int, dtype: torch.dtype) -> None:
        def rows(own: Tensor, dtype: torch.dtype) -> Tensor:
            shape, strides = (num_rows, *own.shape), (own.numel(), *own.stride())
            return torch.empty_strided(shape, strides, dtype=dtype, device=own.device)

        self.weights = {name: rows(own, own.dtype) for name, own in row.items()}
        self.gradients = {name: rows(own, dtype) for name, own in row.items()}
        self._of_learners = [[own[j] for own in self.gradients.values()] for j in range(num_rows)]
        # Of one dtype together, which are few launches.
        self._copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, own in row.items():
            copies, sources = self._copies.setdefault(own.dtype, ([], []))
            copies += self.weights[name].unbind()
            sources += [own.detach()] * num_rows
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights to all rows."""
        for copies, sources in self._copies.values():
            torch._foreach_copy_(copies, sources)

    def summed(self) -> dict[str, Tensor]:
        """Add all gradients to those of the first row, and return them, `[*shape]` by name."""
        first, *others = self._of_learners
        for own in others:
            torch._foreach_add_(first, own)
        return dict(zip(self.gradients, first, strict=True))


@dataclass(frozen=True)
class Matrix:
    """The place of a matrix `[rows, columns]` in a list of vectors: the vector, and the offset in it."""

    vector: int
    begin: int
    rows: int
    columns: int

    def of(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the view `[rows, columns]`. The columns of a channels-last filter are in the order of memory."""
        end = self.begin + self.rows * self.columns
        return vectors[self.vector][self.begin : end].view(self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class TrainedRow:
    """The trained values of one learner's row in every buffer, as lists of matching vectors.

    The first `num_decayed` vectors of each list take weight decay, and the first `num_matrices` of these hold
    `matrices`. `groups` has the parameter group of each vector; it is empty if there are no groups. `step` takes a step
    of the row's own torch optimizer, if there is one, given the settings of a group and of its decayed parameters.
    `shadow` is None where the module computes with the weights themselves.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    corrections: list[Tensor]
    state: dict[str, list[Tensor]]
    z: list[Tensor]
    shadow: list[Tensor] | None
    num_decayed: int
    num_matrices: int = 0
    matrices: tuple[Matrix, ...] = ()
    groups: tuple[int, ...] = ()
    step: Callable[[GroupSettings], None] | None = None

    def part(self, first: int, end: int) -> TrainedRow:
        """Return the vectors from `first` to `end`, without what is known of matrices."""
        return replace(self._selected(range(first, end)), num_matrices=0)

    def of_group(self, number: int) -> TrainedRow:
        """Return the vectors of a group, without `matrices`."""
        return self._selected([index for index, own in enumerate(self.groups) if own == number])

    def _selected(self, indices: Sequence[int]) -> TrainedRow:
        def selected(vectors: list[Tensor]) -> list[Tensor]:
            return [vectors[index] for index in indices]

        return TrainedRow(
            weights=selected(self.weights),
            gradients=selected(self.gradients),
            corrections=selected(self.corrections),
            state={name: selected(vectors) for name, vectors in self.state.items()},
            z=selected(self.z),
            shadow=None if self.shadow is None else selected(self.shadow),
            num_decayed=sum(index < self.num_decayed for index in indices),
            num_matrices=sum(index < self.num_matrices for index in indices),
            groups=tuple(self.groups[index] for index in indices if self.groups),
        )


def parameter_layout(
    module: nn.Module, channels_last: bool, matrices: Collection[str] = (), groups: Mapping[str, int] | None = None
) -> Layout:
    """Return the layout of a module's trained parameters; tied ones are stored once, under their first name.

    `matrices` are the names of those that the optimizer takes as matrices, and `groups` the groups of those in one.
    """
    norms, groups = norm_parameters(module), groups or {}

    def kind(name: str, parameter: nn.Parameter) -> Kind:
        if name in matrices:
            return "matrix"
        return "undecayed" if parameter.ndim < 2 or id(parameter) in norms else "decayed"

    stacked = {id(m.in_proj_weight) for m in module.modules() if isinstance(m, nn.MultiheadAttention)}
    blocks = [
        Block(name, tuple(p.shape), p.numel(), kind(name, p), 3 if id(p) in stacked else 1, groups.get(name, 0))
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    return Layout(tuple(sorted(blocks, key=lambda block: (_ORDER.index(block.kind), block.group))), channels_last)


def norm_parameters(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of normalisation layers."""
    return {id(p) for m in module.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}


def buffer_layout(module: nn.Module) -> Layout:
    """Return the layout of a module's floating-point buffers, such as BatchNorm's running statistics."""
    blocks: Sequence[Block] = [
        Block(name, tuple(b.shape), b.numel(), "undecayed")
        for name, b in module.named_buffers()
        if b.is_floating_point()
    ]
    return Layout(tuple(blocks), channels_last=False)


def copy_present(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to views, unless they are these views; a missing gradient is zero.

    Sparse gradients, as of `nn.Embedding(sparse=True)`, become dense.
    """
    gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not view]
    present = [(view, gradient) for view, gradient in pairs if gradient is not None]
    if present:
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
    for view, gradient in pairs:
        if gradient is None:
            view.zero_()


def add_present(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to views; a missing gradient is zero."""
    pairs = [(view, g.to_dense()) for view, g in zip(views, gradients, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([view for view, _ in pairs], [gradient for _, gradient in pairs])


def clone_all(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the host; rows that are one memory are one there too."""

    def clone(value: Tensor) -> Tensor:
        alike = value.ndim > 0 and value.stride(0) == 0 and value.shape[0] > 1
        own = value[:1] if alike else value
        return own.detach().to("cpu", copy=True).expand(value.shape)

    return {name: clone(value) for name, value in values.items()}


def norm(vectors: Sequence[Tensor]) -> float:
    """Return the norm of all values of some vectors, summed in float64. Host–device synchronisation on CUDA."""
    norms = torch._foreach_norm(list(vectors))
    return float(torch.stack(norms).double().square().sum().sqrt())


def checksum(values: Tensor) -> int:
    """Return 52 bits that almost surely change when any bit of `values` [n] does. Host–device synchronisation."""
    # A float64 is two words: a 64-bit word times its index would lose the upper bits.
    words, total = values.view(torch.int32), 0
    for first in range(0, len(words), _CHECKED_AT_ONCE):
        bits = words[first : first + _CHECKED_AT_ONCE].to(torch.int64)
        factors = torch.arange(first, first + len(bits), device=bits.device) * 2 + 1
        total += int((bits * factors).sum())  # wraps around, in the same way everywhere
    return total % 2**52
