"""Dropout and other random numbers of a forward pass, from its learner's own generator.

Masks depend only on (seed, round, learner), so they are the same with any executor, on any thread and after a resume,
and no generator state has to be saved. They are drawn when a pass needs them, or ahead of it on a `MaskTape`.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# Whether masks drop whole channels of an input [B, C, ...], or single values.
_KINDS: dict[type[nn.Module], bool] = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


class CounterDropout(nn.Dropout):
    """The replacement of an nn.Dropout module, which draws from the learner's generator."""

    def __init__(self, p: float, whole_channels: bool, generator: torch.Generator, inplace: bool = False) -> None:
        super().__init__(p, inplace)
        self.whole_channels, self.generator = whole_channels, generator

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs with inverted dropout: kept values are scaled by 1/(1−p)."""
        if not self.training or self.p == 0:
            return inputs
        shape = inputs.shape[:2] + (1,) * (inputs.ndim - 2) if self.whole_channels else inputs.shape
        mask = take_masks(shape, [self.p], [self.generator], inputs)[0]
        return inputs.mul_(mask) if self.inplace else inputs * mask


_LAYERS: tuple[type[Any], ...] = (CounterDropout, *_KINDS)


@dataclass(frozen=True)
class _Masks:
    """Masks `[N, *shape]`, one from each of N generators."""

    values: Tensor
    p: tuple[float, ...]
    generators: Sequence[torch.Generator]

    def draw(self) -> None:
        for own, p, generator in zip(self.values, self.p, self.generators, strict=True):
            own.bernoulli_(1 - p, generator=generator)
            own.div_(max(1 - p, torch.finfo(self.values.dtype).tiny))


_THREAD = threading.local()  # `tape` is the one that this thread's pass records or plays


def take_masks(
    shape: Sequence[int], p: Sequence[float], generators: Sequence[torch.Generator], like: Tensor
) -> Tensor:
    """Return masks `[len(generators), *shape]` with the dtype and device of `like`: 0 with probability p, else 1/(1−p).

    They come from the thread's tape if one is playing; else each is drawn from its generator, with its own p.
    """
    tape: MaskTape | None = getattr(_THREAD, "tape", None)
    if tape is not None and tape.is_playing:
        return tape.next((len(generators), *shape), tuple(p))
    drawn = _Masks(like.new_empty((len(generators), *shape), requires_grad=False), tuple(p), generators)
    drawn.draw()
    if tape is not None:
        tape.add(drawn)
    return drawn.values


class MaskTape:
    """The masks of a pass, in the order it takes them, in tensors with fixed addresses.

    A CUDA graph repeats its launches, so it must not draw: `draw` fills the tensors before a replay, from the
    generators that the pass itself would draw from and in the same order, so that the numbers are the same. From then
    on graphs may read the tensors, and a pass that draws its own leaves them as they are.
    """

    def __init__(self) -> None:
        self._masks: list[_Masks] = []
        self._position = 0
        self.is_playing = self._is_read = False

    @contextmanager
    def over(self, masks_ahead: bool) -> Iterator[None]:
        """Have the pass in the block take the masks that `draw` has drawn, or draw its own.

        Its own are recorded until the first `draw`. Raises RuntimeError if it takes masks other than the pass last
        recorded did.
        """
        self._position, self.is_playing = 0, masks_ahead
        records = not masks_ahead and not self._is_read
        if records:
            self._masks.clear()
        _THREAD.tape = self if masks_ahead or records else None
        try:
            yield
        finally:
            _THREAD.tape = None
        if masks_ahead and self._position != len(self._masks):
            raise RuntimeError(f"dropout took {self._position} masks, and {len(self._masks)} in the rounds before")

    def draw(self) -> None:
        """Draw all masks again on the current stream; seed the generators first."""
        self._is_read = True
        for each in self._masks:
            each.draw()

    def add(self, drawn: _Masks) -> None:
        """Record what a pass drew."""
        self._masks.append(drawn)

    def next(self, shape: tuple[int, ...], p: tuple[float, ...]) -> Tensor:
        """Return the next masks. Raises RuntimeError if others were recorded."""
        found = self._masks[self._position] if self._position < len(self._masks) else None
        if found is None or (tuple(found.values.shape), found.p) != (shape, p):
            raise RuntimeError("dropout takes masks of other shapes than in the rounds before")
        self._position += 1
        return found.values


class OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operators draw from `generator` that would draw from torch's own, as for drop path.

    Numbers fill a tensor in the order of a contiguous one, whatever its memory format, so that they are the same with
    every executor. Operators that take no generator draw as they would without this mode. For one thread.

    Attributes:
        has_drawn: whether anything was drawn.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator, self.has_drawn = generator, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: compiled models run without this mode, and torch would import its compiler, for a second."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, with the generator if it takes one."""
        kwargs = kwargs or {}
        own = _with_generator(func)
        if own is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.has_drawn = True
        named = {**kwargs, "generator": self._generator}
        if not args or not isinstance(args[0], Tensor) or args[0].is_contiguous():
            return own(*args, **named)
        found = own(args[0].contiguous(), *args[1:], **named)
        return args[0].copy_(found) if func._schema.is_mutable else found


@cache
def _with_generator(func: OpOverload) -> OpOverload | None:
    """Return the overload of a random operator that also takes a generator, or None."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    wanted = {*names, "generator"}
    return next((own for own in overloads if {each.name for each in own._schema.arguments} == wanted), None)


def replace_dropout(module: nn.Module, generator: torch.Generator) -> bool:
    """Replace every nn.Dropout, Dropout1d, 2d and 3d below `module` in place. Returns whether there were any."""
    found = False
    for name, child in list(module.named_children()):
        if type(child) in _KINDS:
            layer: Any = child
            new = CounterDropout(layer.p, _KINDS[type(child)], generator, layer.inplace)
            new.__dict__.update({name: value for name, value in vars(child).items() if "hooks" in name})
            setattr(module, name, new)
            found = True
        else:
            found = replace_dropout(child, generator) or found
    return found


def dropout_rates(module: nn.Module) -> tuple[float, ...]:
    """Return the p of every dropout layer below `module`, in order, before or after `replace_dropout`."""
    return tuple(child.p for child in module.modules() if isinstance(child, _LAYERS))


def set_dropout_rate(module: nn.Module, rate: float) -> None:
    """Set the p of every dropout layer below `module`, after `replace_dropout`."""
    for child in module.modules():
        if isinstance(child, CounterDropout):
            child.p = rate


def has_one_rate(module: nn.Module, run: Callable[[nn.Module], object]) -> bool:
    """Return whether all dropout of a module is by layers that `replace_dropout` replaces, of one rate, not 0.

    Args:
        module: is run once, in training mode, and thrown away.
        run: calls it on a batch.
    """
    layers = [child for child in module.modules() if isinstance(child, _LAYERS)]
    if len({layer.p for layer in layers}) != 1 or not layers[0].p or any(type(own) not in _KINDS for own in layers):
        return False
    reads = []

    def sealed(kind: type[Any]) -> type[Any]:
        """A layer whose rate is noted when it is read by anything but its forward, as by functional dropout."""

        def forward(self: Any, x: Tensor) -> Tensor:
            inner: Tensor = nn.functional.dropout(x, self.__dict__["p"], self.training)
            return inner

        def rate(self: Any) -> float:
            reads.append(self)
            found: float = self.__dict__["p"]
            return found

        return type(kind.__name__, (kind,), {"forward": forward, "p": property(rate)})

    for layer in layers:
        layer.__class__ = sealed(type(layer))
    run(module.train())
    return not reads


def differ_in_rate_alone(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules are equal but for the values of tensors and the rate of all of their dropout layers.

    Attributes are compared by `==`, and functions and other objects without it are equal to themselves alone.
    """
    every = [each.named_modules(remove_duplicate=False) for each in (one, other)]
    pairs = list(itertools.zip_longest(*every))
    return all(len(set(dropout_rates(each))) == 1 for each in (one, other)) and all(
        None not in pair and pair[0][0] == pair[1][0] and type(pair[0][1]) is type(pair[1][1])
        and _attributes(pair[0][1]) == _attributes(pair[1][1]) for pair in pairs
    )  # fmt: skip


def _attributes(module: nn.Module) -> list[object]:
    """Return what a module holds besides tensors and modules, without the rate of a dropout layer."""
    apart = {"_modules", *(["p"] if type(module) in _KINDS else [])}
    held = {name: own for name, own in vars(module).items() if name not in apart}
    shapes = [
        [(name, value if value is None else (value.shape, value.dtype)) for name, value in held.pop(part).items()]
        for part in ("_parameters", "_buffers")
    ]
    return [shapes, held]


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Have no dropout layer below `module`, replaced or not, drop anything in the block."""
    layers = [child for child in module.modules() if isinstance(child, _LAYERS)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


def counter_seed(seed: int, purpose: str, round_index: int, learner: int) -> int:
    """Return a 63-bit seed that depends only on the arguments, and is the same on every platform."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{round_index}/{learner}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
