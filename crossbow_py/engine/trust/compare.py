"""The comparison of another way to run a model with the model itself, and how much two ways may differ.

Exported graphs, kernels, compiled code and copies are trusted only after they were compared with the module as the user
wrote it, run by eager autograd. What autograd does only in the backward pass, such as a custom backward or a hook, is
in no exported graph, and only a comparison of gradients shows it.

Two ways round differently, and a model may amplify this. If values differ by more than rounding explains, a control
decides: the module is run again with weights moved by about one rounding. Values that are sensitive to that may differ
as much by rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crossbow_py.core.trees import Tree, leaves

Values = Mapping[str, Tensor]


class Tolerance(NamedTuple):
    """The largest differences that rounding alone explains in a format; none where nothing is compared in it.

    Attributes:
        rounding: of a value of a whole model, by norm, relative to its norm.
        moved: how far the control moves weights, relatively.
        residue: what rounding leaves of a gradient that is zero, such as that of a bias before BatchNorm, relative to
            all gradients.
        each: of single values by the same formula, absolute and relative to each.
        kernel: of long sums in another order, in float32 with TF32's 10 bits: relative to the largest value.
        run: of a bank after the nine rounds of a rung of the ladder, by norm, relative to how far the weights went. On
            a CPU another order of sums makes 1e-6 in float32 and 1.5e-2 in bfloat16, a stale batch or a lost gradient
            of one learner in one round 2e-2 to 7e-2, and TF32 3e-3. So float32 has room for a hundred times that
            rounding, as libraries on GPUs choose other algorithms, and finds faults; bfloat16 finds gross ones.
    """

    rounding: float
    moved: float
    residue: float
    each: float = 0.0
    kernel: float = 0.0
    run: float = 0.0


TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-14, 1e-13, each=1e-12, kernel=1e-10),
    torch.float32: Tolerance(1e-4, 1e-6, 1e-5, each=1e-5, kernel=1e-2, run=1e-4),
    torch.bfloat16: Tolerance(3e-2, 2**-8, 2**-8, each=2**-7, kernel=5e-2, run=4e-2),
    torch.float16: Tolerance(3e-3, 2**-10, 2**-10),  # and TF32, see `digits_of`
}
EXACT_PRODUCTS = 1e-4  # in place of `kernel` for convolutions in float32 without TF32
_CHAOS, _CHAOS_SAME = 10.0, 2.0  # times what the control moves: allowed differences, of other and of the same operators
_CHANCE = 3.0  # times as far from float32 as another way in the same format: allowed
_NOISE = 0.1  # a value of which the control moves this share is nothing but rounding
_LEAST = 1e-2  # the share of the residue that is always allowed: the last digit of the whole gradient
_SMALL = 1e-12  # norms below this lose squares of float32 values
_DEVIATES = 4093  # a prime, so that repetitions are never in step with a layer


@dataclass(frozen=True)
class Difference:
    """The value that differs most, and its relative distance."""

    name: str
    distance: float

    def __str__(self) -> str:
        return f"{self.name} is off by {self.distance:.0%}" if self.distance > 0.01 else f"{self.name} differs"


def are_close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Return whether all tensors agree in format and value by value. Blocks the host."""
    return all(
        one.dtype == other.dtype
        and torch.allclose(one, other, rtol=TOLERANCES[one.dtype].each, atol=TOLERANCES[one.dtype].each)
        for one, other in zip(found, expected, strict=True)
    )


def is_within(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether no value is off by more than a share of the largest; not if there is NaN. Blocks the host."""
    expected = expected.double()
    return bool((found.double() - expected).abs().max() <= tolerance * expected.abs().max())


def furthest(
    found: Values, expected: Values, control: Callable[[], Values], compute: torch.dtype, same_operators: bool = False
) -> Difference | None:
    """Return the value that differs most, or None if rounding explains all differences.

    Args:
        found, expected: values by name, in pairs of the same shape.
        control: returns the expected values again, under `moved_weights`; called only if needed.
        compute: the dtype that both were computed in.
        same_operators: whether both ran the same operators, and may differ only in the order of some sums.
    """
    compute = digits_of(compute, next(iter(expected.values())).device)
    few = max(TOLERANCES[torch.float32].rounding, 4 * TOLERANCES[compute].moved)  # roundings
    rounding, chaos = (few, _CHAOS_SAME) if same_operators else (TOLERANCES[compute].rounding, _CHAOS)
    gradients = [value for name, value in expected.items() if name.startswith("the gradient")]
    residue = TOLERANCES[compute].residue * _norm(gradients)
    distances = {name: _distance(found[name], expected[name]) for name in expected}
    norms = {name: _norm([value]) for name, value in expected.items()}

    far = [name for name in expected if not distances[name] <= rounding * norms[name]]  # NaN is far
    if far:
        moved = control()
        by = {name: _distance(moved[name], expected[name]) for name in far}
        # A value that one rounding changes by a large share is the residue of a sum that is zero.
        least = residue * _LEAST if compute in (torch.float64, torch.float32) else 0.0
        residues = {name: residue if by[name] >= _NOISE * norms[name] else least for name in far}
        allowed = {name: max(chaos * by[name], residues[name]) for name in far}
        far = [name for name in far if not distances[name] <= allowed[name]]
    relative = {name: distances[name] / max(norms[name], torch.finfo(torch.float64).tiny) for name in far}
    worst = max(relative, key=lambda name: relative[name], default=None)
    return None if worst is None else Difference(worst, relative[worst])


def least_precise(found: Values, other: Values, precise: Values, compute: torch.dtype) -> Difference | None:
    """Return the gradient that is the furthest from float32's, if `other`, in the same format, comes much closer.

    One rounding of the weights moves the gradients of a deep model in bfloat16 by a tenth and more, so that `furthest`
    lets nearly anything pass there. But two ways in one format should be about as far from float32.

    Args:
        found, other, precise: values by name, `precise` computed in float32.
        compute: the dtype that the first two were computed in.
    """
    names = [name for name in precise if name.startswith("the gradient")]
    norms = {name: _norm([precise[name]]) for name in names}
    ours, theirs = ({name: _distance(each[name], precise[name]) for name in names} for each in (found, other))
    usual = float(np.median([theirs[name] / norms[name] for name in names if norms[name]] or [0.0]))
    residue = TOLERANCES[compute].residue * math.hypot(*norms.values())
    far = {
        name: ours[name] / max(norms[name], residue) for name in names
        if not ours[name] <= max(_CHANCE * theirs[name], _CHANCE * usual * norms[name], residue)
    }  # fmt: skip
    worst = max(far, key=lambda name: far[name], default=None)
    return None if worst is None else Difference(worst, far[worst])


def digits_of(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a dtype with as many digits as products have: on CUDA float32 may be TF32, with those of float16."""
    return torch.float16 if device.type == "cuda" and compute == torch.float32 else compute


def _norm(values: Sequence[Tensor]) -> float:
    """Return the norm of the finite values: masks may hold infinity."""
    return math.hypot(*(_norm_of(_real(value), lambda own: own.nan_to_num(0, 0, 0)) for value in values))


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference; it is not finite if only one of two values is."""
    found, expected = _real(found), _real(expected)
    fine = torch.promote_types(expected.dtype, torch.float32)
    difference = found.to(fine) - expected.to(fine)
    return _norm_of(
        difference, lambda own: own.masked_fill((found == expected) | (found.isnan() & expected.isnan()), 0)
    )


def _norm_of(value: Tensor, mended: Callable[[Tensor], Tensor]) -> float:
    """Return a norm; if squares overflow or vanish, that of `mended(value)` in float64."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))  # integers too
    found = float(torch.linalg.vector_norm(value))
    if math.isfinite(found) and (found > _SMALL or not value.any()):
        return found
    return float(mended(value.double()).norm())


def gradients_of(loss: Tensor, module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return `values_of` a loss and its gradients with respect to the named parameters of its module."""
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return values_of(loss, dict(zip(names, gradients, strict=True)), module)


def projection(outputs: Tree) -> Tensor:
    """Return a scalar for autograd that depends on all outputs."""
    found = []
    for own in (each for each in leaves(outputs) if each.is_floating_point()):
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)).to(own.device)
        found.append((own.to(torch.promote_types(own.dtype, torch.float32)) * weights).mean())
    return torch.stack(found).sum()


def outputs_by_name(outputs: Tree) -> dict[str, Tensor]:
    """Return the tensors of a model's output, under names for messages."""
    if isinstance(outputs, Tensor):
        return {"the output": outputs}
    return {f"output {place}": own for place, own in enumerate(leaves(outputs))}


def values_of(value: Tensor, gradients: Mapping[str, Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """Return the values by which two ways are compared, under names for messages; a missing gradient is zero."""
    parameters = dict(module.named_parameters())
    return {
        "the loss": value.detach().clone(),
        **{
            f"the gradient of {name}": torch.zeros_like(parameters[name]) if own is None else own.detach().to_dense()
            for name, own in gradients.items()
        },
        **{f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()},
    }


@contextlib.contextmanager
def kept_buffers(*modules: nn.Module) -> Iterator[None]:
    """Restore the modules' buffers after the block."""
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextlib.contextmanager
def moved_weights(parameters: Sequence[Tensor], compute: torch.dtype) -> Iterator[None]:
    """Have the block run with weights moved by about one rounding, in the same way each time."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            move(parameters, TOLERANCES[digits_of(compute, parameters[0].device)].moved)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)


@torch.no_grad()
def move(tensors: Sequence[Tensor], share: float) -> None:
    """Multiply values by 1 + `share` times normal deviates, the same each time; draws nothing from torch's generators.

    Tensors of the same shape are moved differently, which shows if tensors that should share memory do not.
    """
    factors = 1 + share * torch.randn(_DEVIATES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():  # of a quantized base
            continue
        own = factors.roll(index).to(tensor.device, tensor.dtype)
        repeated = own.repeat(1 + tensor.numel() // _DEVIATES)
        tensor.mul_(repeated[: tensor.numel()].view(tensor.shape))
