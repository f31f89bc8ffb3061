"""The frozen parameters of a bank's modules: held once for all learners, or by each learner where values differ.

Nothing that training needs is allocated for them.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from crossbow_py.engine.modules.precision import Precision, cast_module, full_precision_parameters
from crossbow_py.models.lora import replaced_names

_Key = tuple[Precision, torch.device, bool]
# The templates whose passes only read frozen parameters, and the bases that their banks share.
_ONLY_READ: WeakKeyDictionary[nn.Module, dict[_Key, FrozenBase]] = WeakKeyDictionary()
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenBase:
    """The values of frozen parameters, by name.

    Args:
        template: the model. It is copied, but for what all learners share, if it has the form and is only read.
        rows: the number of learners that hold values of their own; None if all share one row.
        channels_last: whether 4-D values are channels-last in memory.
    """

    def __init__(
        self, template: nn.Module, rows: int | None, precision: Precision, device: torch.device, channels_last: bool
    ) -> None:
        self.is_shared, self._on_host = rows is None, dict[str, Tensor]()
        full, self._master = full_precision_parameters(template), dict[str, Tensor]()  # [1 or rows, *shape]
        self._of_passes: dict[str, Tensor] = {}  # the same tensors, or in compute precision
        adopts = self.is_shared and only_reads(template)
        self._compared = read_parameters(template).keys()
        for name, own in frozen_parameters(template).items():
            stays = stays_in_its_format(own, precision, name in full)
            dtype = own.dtype if stays else precision.master
            if adopts and _is_like(own, dtype, device, channels_last):
                values = own.detach().unsqueeze(0)
            else:
                values = _empty((rows or 1, *own.shape), dtype, device, channels_last).copy_(own.detach())
            self._master[name] = values
            self._of_passes[name] = values if stays or name in full else values.to(precision.compute)

    def __len__(self) -> int:
        return len(self._master)

    def __contains__(self, name: str) -> bool:
        return name in self._master

    @property
    def num_values(self) -> int:
        """The number of values of one learner."""
        return sum(own[0].numel() for own in self._master.values())

    def row(self, learner: int) -> dict[str, Tensor]:
        """Return a learner's values `[*shape]` as its passes read them, views."""
        return {name: own[0 if self.is_shared else learner] for name, own in self._of_passes.items()}

    def master(self, learner: int) -> dict[str, Tensor]:
        """Return a learner's values `[*shape]` in master precision, or in their own, of which they have all digits."""
        return {name: own[0 if self.is_shared else learner] for name, own in self._master.items()}

    def masters(self, num_rows: int) -> dict[str, Tensor]:
        """Return the values in master precision, `[1, *shape]` of what is shared, or `[K, *shape]`."""
        return {name: own if self.is_shared else own[:num_rows] for name, own in self._master.items()}

    def stacked(self, num_rows: int, first: int = 0) -> dict[str, Tensor]:
        """Return, as passes read them, `[*shape]` of what is shared, or `[K, *shape]` of K rows from `first` on."""
        return {n: own[0] if self.is_shared else own[first : first + num_rows] for n, own in self._of_passes.items()}

    def is_of(self, template: nn.Module) -> bool:
        """Return whether a template holds the values in the memory that learners share."""
        return all(own.data_ptr() == self._master[name].data_ptr() for name, own in frozen_parameters(template).items())

    def lend(self, template: nn.Module) -> None:
        """Have a template hold the values in the memory that learners share, so that they are there once."""
        for name, own in frozen_parameters(template).items():
            own.data = self._master[name][0]

    def load(self, learner: int, values: Mapping[str, Tensor]) -> None:
        """Copy values by name to a learner's row. Raises ValueError if all share one that has other values.

        Of names without a value, and of what no pass reads, the learner has those that all share.
        """
        if not self.is_shared:
            self._write(learner, values)
            return
        shared = self.master(0)
        for name, own in ((name, shared[name]) for name in self._compared if name in values):
            given = values[name].detach().to(own)
            if given.data_ptr() != own.data_ptr() and not torch.equal(given.nan_to_num(), own.nan_to_num()):
                raise ValueError(f"the frozen parameter {name} has other values than that of the other learners")

    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Give the row that all share these values by name."""
        self._write(0, values)
        self._on_host.clear()

    @torch.no_grad()
    def _write(self, learner: int, values: Mapping[str, Tensor]) -> None:
        for own in (self.master(learner), self.row(learner)):
            for name, value in own.items():
                value.copy_(values[name])

    def on_host(self, learner: int) -> dict[str, Tensor]:
        """Return a learner's values `[1, *shape]` on the host: of what is shared the same each time, else a copy."""
        if self.is_shared:
            self._on_host = self._on_host or {name: own.cpu() for name, own in self._master.items()}
            return self._on_host
        return {name: own.to("cpu", copy=True).unsqueeze(0) for name, own in self.master(learner).items()}


def stays_in_its_format(own: Tensor, precision: Precision, in_full: bool) -> bool:
    """Return whether a base holds a frozen value in its own format alone, and not in that of rows.

    Whole numbers stay, and what is in the format of passes, as a base that was loaded in bfloat16, unless they need it
    `in_full`.
    """
    return not own.is_floating_point() or (own.dtype == precision.compute and not in_full)


def base_of(
    template: nn.Module, rows: int | None, precision: Precision, device: torch.device, channels_last: bool
) -> FrozenBase:
    """Return the base for a bank: the same for all banks of a template that share it, which holds it in their memory.

    A new one if each of `rows` learners holds its own, or if passes may write frozen parameters, see `only_reads`.
    """
    key, known = (precision, device, channels_last), _ONLY_READ.get(template)
    if rows is not None or known is None:
        return FrozenBase(template, rows, precision, device, channels_last)
    if key not in known or not known[key].is_of(template):
        known[key] = FrozenBase(template, rows, precision, device, channels_last)
        known[key].lend(template)
    return known[key]


def share_frozen(template: nn.Module, others: Iterable[nn.Module]) -> None:
    """Have a template hold frozen values that others hold, too, in their memory; values are equal bit by bit.

    No memory is taken twice: in copies of the template parameters stay apart.

    Args:
        template, others: models that are copied, but neither run nor trained themselves.
    """
    mine = frozen_parameters(template).values()
    theirs = {own.data_ptr(): own for other in others for own in frozen_parameters(other).values()}
    taken, free = {own.data_ptr() for own in mine}, dict[object, list[nn.Parameter]]()
    for pointer, own in theirs.items():
        if pointer not in taken:
            free.setdefault(_form(own), []).append(own)
    for own in mine:
        alike = free.get(_form(own), []) if own.data_ptr() not in theirs else []
        found = next((place for place, other in enumerate(alike) if _have_same_bits(own, other)), None)
        if found is not None:
            own.data = alike.pop(found).data


def _form(own: nn.Parameter) -> object:
    return type(own), own.shape, own.dtype, own.device


def _have_same_bits(own: Tensor, other: Tensor) -> bool:
    bits = _BITS.get(own.itemsize)
    return bits is not None and torch.equal(own.detach().view(bits), other.detach().view(bits))


def only_reads(template: nn.Module) -> bool:
    """Return whether `note_only_read` was said of a module: then what is frozen in its copies may be one memory."""
    return template in _ONLY_READ


def note_only_read(template: nn.Module) -> None:
    """Note that a module's passes, in training and in evaluation, were seen to leave frozen parameters as they are."""
    _ONLY_READ.setdefault(template, {})


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained; tied ones once, under their first name."""
    return {name: own for name, own in module.named_parameters() if not own.requires_grad}


def read_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters that passes read: not those of a layer in whose place PEFT trains a copy.

    These may be a new head's first values, which differ from seed to seed.
    """
    replaced = replaced_names(name for name, _ in module.named_parameters())
    return {name: own for name, own in frozen_parameters(module).items() if name not in replaced}


def frozen_values(model: nn.Module) -> str | None:
    """Return a text that is equal for models whose `read_parameters` are equal; None for a model without any."""
    found = read_parameters(model)
    return values_digest(found) if found else None


def values_digest(values: Mapping[str, Tensor]) -> str:
    """Return a text that is equal for equal values by name."""
    known = hashlib.sha256()
    for name, own in values.items():
        known.update(repr((name, tuple(own.shape))).encode())
        plain = own.detach().float() if own.is_floating_point() else own
        known.update(plain.cpu().flatten().numpy().data)
    return known.hexdigest()[:16]


def copy_with(template: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype, reads: bool) -> nn.Module:
    """Return a copy of a template with parameters and buffers of a state in a dtype; see `Evaluator.module`."""
    frozen = frozen_parameters(template)
    state, named = {**frozen, **state}, frozen if reads and template in _ONLY_READ else {}
    read = {
        name: nn.Parameter(state[name].to(own.device, dtype if own.is_floating_point() else None), False)
        for name, own in named.items()
        if type(own) is nn.Parameter
    }
    memo: dict[int, Any] = {id(named[name]): own for name, own in read.items()}
    # Buffers that are complex stay as they are.
    module = cast_module(copy.deepcopy(template, memo), Precision("master", dtype, dtype))
    with torch.no_grad():
        for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name not in read:
                value.copy_(state[name])
    return module


def _is_like(own: nn.Parameter, dtype: torch.dtype, device: torch.device, channels_last: bool) -> bool:
    """Return whether a parameter is as a base has it."""
    last = torch.channels_last if channels_last and own.ndim == 4 else torch.contiguous_format
    is_there = own.device.type == device.type and device.index in (None, own.device.index)
    return type(own) is nn.Parameter and own.dtype == dtype and is_there and own.is_contiguous(memory_format=last)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, channels_last: bool) -> Tensor:
    """Return a tensor `[n, *shape]`, of which 4-D rows are channels-last if that is asked for."""
    if channels_last and len(shape) == 5:
        rows, out, channels, height, width = shape
        return torch.empty(rows, out, height, width, channels, dtype=dtype, device=device).movedim(-1, 2)
    return torch.empty(shape, dtype=dtype, device=device)
