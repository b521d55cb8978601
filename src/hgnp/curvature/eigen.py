"""Top eigenpair of a factor: warm-started powers with an honest residual.

One step turns the direction x into F^k x / ‖·‖ and measures λ = vᵀFv and ‖Fv − λv‖/λ at that very v: what is reported
is what is used. The error of λ is at most the residual squared over the relative gap, or the residual itself.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hgnp.curvature.factors import Factor, unit


@dataclass(frozen=True)
class Eigenpair:
    value: Tensor  # (G,)
    vector: Tensor  # (G, side), unit length
    residual: Tensor  # (G,), relative


def top(factor: Factor, start: Tensor, steps: int) -> Eigenpair:
    """The pair after `steps` products from `start`, each group by itself.

    An overflow keeps `start`; a product that vanishes (a dead layer, or a start in the factor's null space) gives way
    to an arbitrary direction, or the pair would never come back."""
    v = factor.advance(start, steps)
    size = v.abs().amax(1, keepdim=True)
    v = torch.where(torch.isfinite(size), v, start)
    v = unit(torch.where(size == 0, arbitrary(start.shape[1], start.dtype, start.device), v))
    y = factor.product(v)
    value = (v * y).sum(1)
    rest = torch.linalg.vector_norm(y - value.unsqueeze(1) * v, dim=1)
    return Eigenpair(value, v, rest / value.clamp_min(torch.finfo(v.dtype).tiny))


@functools.cache
def arbitrary(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same unit vector for every run, (1, side), without zeros or symmetry."""
    generator = torch.Generator().manual_seed(0)
    return unit(torch.randn(1, side, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype))


def top_dense(factor: Factor) -> Eigenpair:
    """The same by a full decomposition of the dense factor: the oracle."""
    values, vectors = torch.linalg.eigh(factor.dense())
    return Eigenpair(values[:, -1], vectors[..., -1], torch.zeros_like(values[:, -1]))


def kronecker_residual(psi: Tensor, gamma: Tensor) -> Tensor:
    """‖(Ψ ⊗ Γ)v − λv‖/λ of v = v^Ψ ⊗ v^Γ from the residuals of the two: their errors are orthogonal to them."""
    return (psi**2 + gamma**2 + psi**2 * gamma**2).sqrt()
