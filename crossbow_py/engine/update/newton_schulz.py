"""Orthogonalisation of matrices by Newton–Schulz iterations, as Muon does (Jordan et al. 2024).

A matrix G = U·S·Vᵀ is divided by its Frobenius norm, which brings its singular values to [0, 1], and goes through

    X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X

some times. X keeps U and V, and each singular value s becomes a·s + b·s³ + c·s⁵. With the coefficients below, values
from about 0.01 on are near 1 (in [0.68, 1.14]) after five iterations, which serves as well as 1 itself and takes
fewer iterations than a polynomial that converges to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7  # a matrix of zeros stays one


def orthogonalize(matrices: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Return matrices `[rows, columns]` with singular values near 1, in new memory.

    Those of one shape go through one product. The iterations are in the dtype of the matrices.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    found: list[Tensor] = [torch.empty(0)] * len(matrices)
    for shape, indices in by_shape.items():
        wide = [each if each.shape == shape else each.T for each in (matrices[index] for index in indices)]
        # The stack has no name here, so that it is freed with the first iterate.
        for index, own in zip(indices, _iterate(torch.stack(wide), iterations), strict=True):
            found[index] = own if own.shape == matrices[index].shape else own.T
    return found


def _iterate(x: Tensor, iterations: int) -> Tensor:
    """Return the iterates of wide matrices `[N, rows, columns]`; `x` is scratch."""
    a, b, c = COEFFICIENTS
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=_LEAST_NORM)
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x
