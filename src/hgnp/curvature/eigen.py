"""Top eigenpair of a factor: warm-started powers with an honest residual.

One step turns the direction x into F^k x / ‖·‖ and measures λ = vᵀFv and ‖Fv − λv‖/λ at that very v: what is reported
is what is used. The error of λ is at most the residual squared over the relative gap, or the residual itself.
"""

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
    """The pair after `steps` products from `start`, each group by itself; a vanished factor keeps its direction."""
    v = factor.advance(start, steps)
    alive = torch.isfinite(v).all(1, keepdim=True) & (v.abs().amax(1, keepdim=True) > 0)
    v = unit(torch.where(alive, v, start))
    y = factor.product(v)
    value = (v * y).sum(1)
    rest = torch.linalg.vector_norm(y - value.unsqueeze(1) * v, dim=1)
    return Eigenpair(value, v, rest / value.clamp_min(torch.finfo(v.dtype).tiny))


def top_dense(factor: Factor) -> Eigenpair:
    """The same by a full decomposition of the dense factor: the oracle."""
    values, vectors = torch.linalg.eigh(factor.dense())
    return Eigenpair(values[:, -1], vectors[..., -1], torch.zeros_like(values[:, -1]))


def kronecker_residual(psi: Tensor, gamma: Tensor) -> Tensor:
    """‖(Ψ ⊗ Γ)v − λv‖/λ of v = v^Ψ ⊗ v^Γ from the residuals of the two: their errors are orthogonal to them."""
    return (psi**2 + gamma**2 + psi**2 * gamma**2).sqrt()
